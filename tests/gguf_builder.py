"""Writes GGUF files for tests: any metadata and tensors, or a whole tiny random Llama."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

# numpy type letter -> GGUF value type; 8 is a string, 9 an array
VALUE_TYPES = {
    "u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12,
}  # fmt: skip
# Types that gguf cannot write: the offset of a block's f16 scale, its weights' spread at scale 1, minimum / scale
RANDOM_TYPES = {
    "Q2_K": (80, 14.0, 1.5),
    "Q3_K": (108, 42.0, None),
    "Q4_K": (0, 257.0, 7.5),
    "Q5_K": (0, 523.0, 15.5),
    "Q6_K": (208, 1366.0, None),
    "IQ4_NL": (0, 70.0, None),
    "IQ4_XS": (0, 1300.0, None),
    "IQ3_S": (0, 141.0, None),
    "IQ3_XXS": (0, 142.0, None),
    "IQ2_S": (0, 56.0, None),
    "IQ2_XS": (0, 56.0, None),
    "IQ2_XXS": (0, 53.0, None),
    "IQ1_S": (0, 7.2, None),
    "IQ1_M": (48, 7.2, None),
}
Tensors = dict[str, tuple[str | int, tuple[int, ...], bytes]]  # name -> type or its number, numpy shape, data


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: Tensors,
    version: int = 3,
    alignment: int = 32,
    n_parts: int = 1,
) -> Path:
    """Python ints become u32 (i32, u64 where needed), floats f32; numpy scalars and arrays keep their type.
    With n_parts > 1 writes NAME-00001-of-0000N.gguf, ... and returns the first."""
    aligned = {} if alignment == 32 else {"general.alignment": alignment}
    if n_parts == 1:
        path.write_bytes(encode(aligned | metadata, tensors, version, alignment))
        return path
    paths = [path.with_name(f"{path.stem}-{i + 1:05d}-of-{n_parts:05d}.gguf") for i in range(n_parts)]
    counts = {"split.count": np.uint16(n_parts), "split.tensors.count": np.int32(len(tensors))}
    for i, names in enumerate(np.array_split(np.array(list(tensors), dtype=object), n_parts)):
        keys = aligned | ({} if i else metadata) | counts | {"split.no": np.uint16(i)}
        paths[i].write_bytes(encode(keys, {name: tensors[name] for name in names}, version, alignment))
    return paths[0]


def encode(
    metadata: dict[str, Any],
    tensors: Tensors,
    version: int = 3,
    alignment: int = 32,
    marks: list[tuple[str, int, int]] | None = None,
) -> bytes:
    """The file's bytes. `marks` collects (what, offset, size) of each count, length, type, dim and offset."""
    out = bytearray()
    marks = [] if marks is None else marks

    def put(what: str, fmt: str, value: Any) -> None:
        marks.append((what, len(out), struct.calcsize("<" + fmt)))
        out.extend(struct.pack("<" + fmt, value))

    def text(what: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else value
        put(f"length of {what}", "Q", len(raw))
        out.extend(raw)

    put("magic", "4s", b"GGUF")
    put("version", "I", version)
    put("tensor count", "Q", len(tensors))
    put("key count", "Q", len(metadata))
    for key, value in metadata.items():
        text("key", key)
        if isinstance(value, str | bytes):
            put("value type", "I", 8)
            text("string", value)
        elif isinstance(value, list) and (not value or isinstance(value[0], str | bytes)):
            put("value type", "I", 9)
            put("element type", "I", 8)
            put("array length", "Q", len(value))
            for item in value:
                text("element", item)
        else:
            array = value if isinstance(value, np.ndarray | np.generic) else _narrow(np.array(value))
            value_type = VALUE_TYPES[array.dtype.str[1:]]
            put("value type", "I", value_type if array.ndim == 0 else 9)
            if array.ndim:
                put("element type", "I", value_type)
                put("array length", "Q", array.size)
            marks.append(("value", len(out), array.itemsize))
            out.extend(array.tobytes())
    offset = 0
    for name, (ggml_type, shape, data) in tensors.items():
        text("tensor name", name)
        put("n_dims", "I", len(shape))
        for dim in reversed(shape):
            put("dim", "Q", dim)
        put("tensor type", "I", ggml_type if isinstance(ggml_type, int) else GGMLQuantizationType[ggml_type])
        put("offset", "Q", offset)
        offset += -(-len(data) // alignment) * alignment
    for _, _, data in tensors.values():
        out.extend(bytes(-len(out) % alignment))
        out.extend(data)
    return bytes(out)


def _narrow(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "f":
        return array.astype("f4")
    if array.dtype.kind == "i" and array.ndim == 0:
        return array.astype("i4" if array < 0 else "u4" if array < 1 << 32 else "u8")
    return array.astype("i4") if array.dtype.kind == "i" else array


def pack(values: np.ndarray, ggml_type: str, rng: np.random.Generator) -> bytes:
    """f32 values as `ggml_type`. K-quants and IQ4 are random blocks of the same spread, not these values."""
    if ggml_type in RANDOM_TYPES:
        at, spread, minimum = RANDOM_TYPES[ggml_type]
        weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[ggml_type]]
        blocks = rng.integers(0, 256, (values.size // weights, size), dtype=np.uint8)
        scale = (values.std() / spread * rng.uniform(0.8, 1.2, len(blocks))).astype("<f2")
        if ggml_type == "IQ1_M":  # a nibble of the scale on top of each of the last four words
            words = blocks[:, at:].copy().view(np.uint16) & 0x0FFF
            words |= (scale.view(np.uint16)[:, None] >> np.array([0, 4, 8, 12], np.uint16) & 15) << 12
            blocks[:, at:] = words.view(np.uint8)
        else:
            blocks[:, at : at + 2] = scale[:, None].view(np.uint8)
        if minimum:
            blocks[:, at + 2 : at + 4] = (scale * np.float16(minimum)).astype("<f2")[:, None].view(np.uint8)
        return blocks.tobytes()
    return quantize(values.astype(np.float32), GGMLQuantizationType[ggml_type]).tobytes()


def spm_vocab(size: int) -> dict[str, Any]:
    """A SentencePiece vocabulary of `size` >= 288: 3 specials, 256 bytes, the space, letters, fillers."""
    words = ["\u2581", *"abcdefghijklmnopqrstuvwxyz.,", *(f"\u2581w{i}" for i in range(max(0, size - 288)))]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    if len(tokens) != size:
        raise ValueError(f"a vocabulary needs at least {len(tokens)} entries, not {size}")
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * 259 + [-float(i) for i in range(len(words))], np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(words), np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def tiny_llama(path: Path, *, version: int = 3, alignment: int = 32, n_parts: int = 1, **model: Any) -> Path:
    """Writes the random model that `tiny_parts(**model)` describes."""
    return write_gguf(path, *tiny_parts(**model), version, alignment, n_parts)


def overflowing_llama(path: Path, token: int, **model: Any) -> Path:
    """A random model whose logits are NaN once it has read `token`: only that embedding has a first number."""
    keys, tensors = tiny_parts(tied=False, **model)

    def floats(name: str) -> np.ndarray:
        _, shape, data = tensors[name]
        return np.frombuffer(data, "<f4").reshape(shape).copy()

    embeddings, norm = floats("token_embd.weight"), floats("blk.0.attn_norm.weight")
    embeddings[token] = embeddings[:, 0] = 0
    embeddings[token, 0] = 1
    norm[0] = 1e38
    for name, array in (("token_embd.weight", embeddings), ("blk.0.attn_norm.weight", norm)):
        tensors[name] = (tensors[name][0], array.shape, array.tobytes())
    return write_gguf(path, keys, tensors)


def tiny_parts(
    *,
    seed: int = 0,
    layers: int = 2,
    dim: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 128,
    vocab: int = 288,
    ggml_type: str | Callable[[str], str] = "F32",
    tied: bool = True,
    biases: bool = False,
    arch: str = "llama",
    context: int = 256,
    rope_theta: float = 10000.0,
    rope_freqs: np.ndarray | None = None,
    metadata: dict[str, Any] | None = None,
    tokenizer: bool = True,
) -> tuple[dict[str, Any], Tensors]:
    """Metadata and tensors of a random Llama. `ggml_type` may choose by tensor name; vectors, and rows it does not
    divide, are F32. `metadata` adds keys, or drops them (value None)."""
    rng = np.random.default_rng(seed)
    hd = head_dim or dim // heads
    tensors: Tensors = {}

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            center = 1.0 if "norm" in name else 0.0
            values = center + 0.1 * rng.standard_normal(shape)
            tensors[name] = ("F32", shape, values.astype("<f4").tobytes())
            return
        wanted = ggml_type(name) if callable(ggml_type) else ggml_type
        used = wanted if shape[1] % GGML_QUANT_SIZES[GGMLQuantizationType[wanted]][0] == 0 else "F32"
        values = rng.standard_normal(shape) / np.sqrt(shape[1])
        tensors[name] = (used, shape, pack(values, used, rng))

    add("token_embd.weight", vocab, dim)
    if rope_freqs is not None:
        tensors["rope_freqs.weight"] = ("F32", rope_freqs.shape, rope_freqs.astype("<f4").tobytes())
    for i in range(layers):
        shapes = {
            "attn_norm": (dim,),
            "attn_q": (heads * hd, dim),
            "attn_k": (kv_heads * hd, dim),
            "attn_v": (kv_heads * hd, dim),
            "attn_output": (dim, heads * hd),
            "ffn_norm": (dim,),
            "ffn_gate": (ffn, dim),
            "ffn_up": (ffn, dim),
            "ffn_down": (dim, ffn),
        }
        for part, shape in shapes.items():
            add(f"blk.{i}.{part}.weight", *shape)
            qkv = part in ("attn_q", "attn_k", "attn_v")
            if len(shape) == 2 and (biases or (arch == "qwen2" and qkv)):
                add(f"blk.{i}.{part}.bias", shape[0])
    add("output_norm.weight", dim)
    if not tied:
        add("output.weight", vocab, dim)
    keys = {
        "general.architecture": arch,
        "general.name": "tiny",
        f"{arch}.block_count": layers,
        f"{arch}.context_length": context,
        f"{arch}.embedding_length": dim,
        f"{arch}.feed_forward_length": ffn,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": rope_theta,
        f"{arch}.rope.dimension_count": hd,
        **({f"{arch}.attention.key_length": hd, f"{arch}.attention.value_length": hd} if head_dim else {}),
        **(spm_vocab(vocab) if tokenizer else {}),
        **(metadata or {}),
    }
    return {k: v for k, v in keys.items() if v is not None}, tensors
