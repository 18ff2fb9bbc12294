"""Models without a file: the shapes of real ones, with random weights made on the device. For benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from llamagpu.engine.shelves import Shelves
from llamagpu.engine.tiled import upload_tiles
from llamagpu.engine.weights import Layer, Matrix, Part, Weights, joinable
from llamagpu.errors import LlamaGpuError
from llamagpu.files.config import LlamaConfig
from llamagpu.files.gguf_file import BLOCKS
from llamagpu.files.repack import FORMATS, Packed, row_bytes
from llamagpu.files.tiles import ROWS, tile
from llamagpu.gpu import routes
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.recorder import Plan, Recorder
from llamagpu.gpu.routes import Linear

Room = Callable[[int, str], Any]  # (bytes, label) to a buffer


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    context: int = 131072
    arch: str = "llama"


SHAPES = {
    "llama-3.2-1b": Shape(16, 2048, 8192, 32, 8, 64, 128256, True),
    "llama-3.2-3b": Shape(28, 3072, 8192, 24, 8, 128, 128256, True),
    "llama-3.1-8b": Shape(32, 4096, 14336, 32, 8, 128, 128256, False),
    "smollm2": Shape(30, 576, 1536, 9, 3, 64, 49152, True, 8192),
    "tinyllama": Shape(22, 2048, 5632, 32, 4, 64, 32000, False, 2048),
    "llama-2-7b": Shape(32, 4096, 11008, 32, 32, 128, 32000, False, 4096),
    "mistral-7b": Shape(32, 4096, 14336, 32, 8, 128, 32000, False, 32768),
    "qwen2.5-0.5b": Shape(24, 896, 4864, 14, 2, 64, 151936, True, 32768, "qwen2"),
    "tiny": Shape(2, 128, 256, 4, 2, 64, 512, True, 1024),  # for tests
}
# How llama-quantize mixes types: (most matrices, attn_v and ffn_down of half of the layers, output and tied embedding)
MIXES = {
    "q4_0": ("Q4_0", "Q4_0", "Q6_K"),
    "q4_1": ("Q4_1", "Q4_1", "Q6_K"),
    "q4_k_m": ("Q4_K", "Q6_K", "Q6_K"),
    "q8_0": ("Q8_0", "Q8_0", "Q8_0"),
    "f16": ("F16", "F16", "F16"),
}
INSTEAD = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # for rows that are no whole blocks, as llama-quantize does it
SMALL_SCALE = 0.004  # keeps activations of random weights finite
SMALL_STEPS = 0x0D0D0D0D  # about the same: a step of 0.00031 as f16, 13 of them as int8


def parse(spec: str) -> tuple[str, str]:
    """NAME[:QUANT] to both, checked."""
    name, _, quant = spec.partition(":")
    quant = quant or "q4_0"
    if name not in SHAPES:
        raise LlamaGpuError(f"no synthetic model is called {name!r}", f"choose one of {', '.join(SHAPES)}")
    if quant not in MIXES:
        raise LlamaGpuError(f"no synthetic quantisation is called {quant!r}", f"choose one of {', '.join(MIXES)}")
    return name, quant


def synthetic_config(name: str) -> LlamaConfig:
    s = SHAPES[name]
    return LlamaConfig(
        arch=s.arch, name=name, layers=s.layers, dim=s.dim, heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim,
        ffn_dim=s.ffn, vocab=s.vocab, context=s.context, rope_theta=500000.0, rope_dims=s.head_dim, rope_scaling="none",
        rope_factor=1.0, rope_orig_context=s.context, yarn_ext_factor=1.0, yarn_attn_factor=1.0, yarn_beta_fast=32.0,
        yarn_beta_slow=1.0, neox=False, norm_eps=1e-5, sliding_window=0, tied=s.tied,
    )  # fmt: skip


def synthetic_weights(gpu: Gpu, config: LlamaConfig, quant: str, tiled: bool = False) -> Weights:
    """`tiled`: for a TiledTransformer."""
    c, (most, some, output) = config, MIXES[quant]
    recorder = Recorder(gpu)

    def special(layer: int) -> str:
        few = layer < c.layers // 8 or layer >= 7 * c.layers // 8 or (layer - c.layers // 8) % 3 == 2
        return some if few else most

    shelves = Shelves(gpu)
    if not tiled and joinable(c, gpu):
        widest = 2 * c.ffn_dim * c.dim * max(row_bits(fitting(kind, c.dim), gpu) for kind in MIXES[quant]) // 8
        kinds = [dict.fromkeys(("qkv", "ffn_down"), special(i)) for i in range(c.layers)]
        shelves = Shelves(gpu, kinds, max(1, gpu.caps.binding_bytes // widest))

    def matrix(kinds: list[tuple[str, int]], k: int, label: str, layer: int | None = None) -> Matrix:
        """Rows in these types, one after the other; neighbours of one type are one part."""
        joined: list[tuple[str, int]] = []
        for wanted, n in kinds:
            kind = fitting(wanted, k)
            if joined and joined[-1][0] == kind:
                joined[-1] = (kind, joined[-1][1] + n)
            else:
                joined.append((kind, n))
        parts: list[Part] = []
        for kind, n in joined:
            row0 = sum(p.n for p in parts)
            if tiled:
                parts += random_tiles(gpu, kind, n, k, row0, label)
            else:
                room = partial(shelves.room, layer=layer)
                parts += random_parts(gpu, recorder, kind, n, k, row0, label, room)
        return Matrix(sum(p.n for p in parts), k, tuple(parts))

    def norm(label: str, layer: int | None = None) -> Any:
        ones = np.ones((1, c.dim // 4, 4), np.float32)
        return gpu.upload_image(ones, label) if tiled else shelves.upload(ones, label, layer)

    def layer(i: int) -> Layer:
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        return Layer(
            attn_norm=norm("attn_norm", i),
            qkv=matrix([(most, q), (most, kv), (special(i), kv)], c.dim, "qkv", i),
            attn_output=matrix([(most, c.dim)], q, "attn_output", i),
            ffn_norm=norm("ffn_norm", i),
            gate_up=(matrix([(most, 2 * c.ffn_dim)], c.dim, "gate_up", i),),
            ffn_down=matrix([(special(i), c.dim)], c.ffn_dim, "ffn_down", i),
        )

    token_embd = matrix([(output if c.tied else most, c.vocab)], c.dim, "token_embd")
    layers = tuple(layer(i) for i in range(c.layers))
    head = token_embd if c.tied else matrix([(output, c.vocab)], c.dim, "output")
    return Weights(token_embd, layers, norm("output_norm"), head)


def tileable(config: LlamaConfig, quant: str, gpu: Gpu) -> bool:
    """Whether a file of these shapes would run on images here."""
    c, widest = config, max(config.dim, config.ffn_dim, config.heads * config.head_dim)
    known = [FORMATS.get(fitting(kind, c.dim)) for kind in MIXES[quant]]
    shapes = [Linear(1, c.dim, widest, f.group if f else widest, f.form if f else "f16") for f in known]
    return routes.tileable(c.dim, c.ffn_dim, c.head_dim, c.rope_dims, shapes, gpu.caps)


def random_tiles(gpu: Gpu, kind: str, n: int, k: int, row0: int, label: str) -> list[Part]:
    """Rows of one type as `load_tiles` would store them; random on the host, for no kernel fills images."""
    known, rng = FORMATS.get(kind), np.random.default_rng(n * k)
    most = ROWS * gpu.caps.image_side
    packed = []
    for start in range(0, n, most):
        rows = min(most, n - start)
        if known is None:
            packed.append(Packed("f16", rows, k, k, np.full((rows, k + k % 2), 0.0039, np.float16), None))
            continue
        words = rng.integers(0, 256, (rows, k // 2 if known.form == "q4" else k), np.uint8)
        scales = np.full((rows, k // known.group, known.width), SMALL_SCALE, np.float16)
        words = words if known.form == "q4" else words.view(np.int8)
        packed.append(Packed(known.form, rows, k, known.group, words, scales))
    parts = upload_tiles(gpu, map(tile, packed), label).parts
    return [replace(part, row0=row0 + part.row0) for part in parts]


def fitting(kind: str, k: int) -> str:
    """The type that rows of k weights have in a file of this type."""
    return kind if k % BLOCKS[kind][0] == 0 else INSTEAD[kind]


def form_of(kind: str, gpu: Gpu) -> str:
    known = FORMATS.get(kind)
    if known is None:
        return "f16"
    return "q6" if known.form == "q8" and known.group == 16 and not gpu.caps.cpu else known.form


def row_bits(kind: str, gpu: Gpu) -> int:
    """Of a weight, without its scales."""
    return {"q4": 4, "q6": 6, "q8": 8, "f16": 16}[form_of(kind, gpu)]


def random_parts(
    gpu: Gpu, recorder: Recorder, kind: str, n: int, k: int, row0: int, label: str, room: Room
) -> list[Part]:
    """Rows of one type as `load_weights` would store them."""
    known = FORMATS.get(kind)
    form, group, width = form_of(kind, gpu), known.group if known else k, known.width if known else 0
    word_bytes = k * row_bits(kind, gpu) // 8
    most = gpu.caps.binding_bytes // word_bytes // 2 * 2
    parts = []
    for start in range(0, n, most):
        rows = min(most, n - start)
        value = 0x1C001C00 if form == "f16" else 0  # f16: 0.0039 each
        words = filled(gpu, recorder, rows * word_bytes, value, label, room)
        scales, bits = None, 0
        if known:
            bits = 32 if not gpu.caps.half else 8 if known.steps else 16
            half = int(np.float16(SMALL_SCALE).view(np.uint16))
            value = {32: int(np.float32(SMALL_SCALE).view(np.uint32)), 16: half | half << 16, 8: SMALL_STEPS}[bits]
            size = rows * (row_bytes(kind, k)[1] if bits < 32 else k // group * width * 4)
            scales = filled(gpu, recorder, size, value, f"{label}.scales", room)
        parts.append(Part(row0 + start, rows, k, group, form, width == 2, bits, words, scales))
    return parts


def filled(
    gpu: Gpu, recorder: Recorder, nbytes: int, value: int, label: str, room: Room | None = None
) -> Any:
    buffer = (room or gpu.zeros)(nbytes, label)
    consts = {"WORDS": buffer.size // 4, "VALUE": value, "SEED": len(label) + buffer.size % 1000003}
    groups = min(1024, -(-buffer.size // 1024))
    recorder.submit([(Plan([gpu.dispatch("fill_random", (), consts, {"y": buffer}, (groups, 1, 1))]), 1, 0)])
    return buffer
