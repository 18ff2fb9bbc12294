"""Thousands of damaged files: each is read or refused with one line of cause and one of remedy, quickly, in
little memory. A traceback of another kind, a hang or a large allocation fails."""

import os
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf_builder import Tensors, encode, tiny_parts

from llamagpu.errors import LlamaGpuError
from llamagpu.files.config import ModelConfig, check_tensors, rope_table
from llamagpu.files.gguf_file import MAX_KEYS, MAX_STRINGS, GgufFile
from llamagpu.files.repack import repack, to_f32
from llamagpu.files.tokenizer import Tokenizer

Rng = np.random.Generator
MODEL = {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1, "ffn": 32, "biases": True, "ggml_type": "Q4_0"}
EXTREMES = [0, 1, 2, 3, 4, 5, 8, 9, 12, 13, 31, 33, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60,
            2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]  # fmt: skip


def read_config(file: GgufFile) -> None:
    config = ModelConfig.from_gguf(file.metadata, file.tensors)
    check_tensors(config, file.tensors)
    rope_table(config, None, 8)


def read_tokenizer(file: GgufFile) -> None:
    tokenizer = Tokenizer.from_gguf(file.metadata)
    tokenizer.decode(tokenizer.encode("Once <s>upon</s> a time, \u00e9\U0001f600\n"))


def read_weights(file: GgufFile) -> None:
    for tensor in file.tensors.values():
        if len(tensor.shape) == 1:
            to_f32(tensor)
        else:
            repack(tensor)


# What a file goes through on its way to the GPU; each step may only return or raise LlamaGpuError.
STEPS: list[Callable[[GgufFile], object]] = [read_config, read_tokenizer, read_weights]


def outcome(path: Path) -> str:
    """ "ok", or the cause; anything else than a plain refusal within a second is a failure."""
    start = time.process_time()
    try:
        file = GgufFile(path)
        try:
            for step in STEPS:
                step(file)
        finally:
            file.close()
        said = "ok"
    except LlamaGpuError as error:
        said = error.cause
        assert error.cause.isprintable() and 0 < len(error.cause) < 500
        assert error.remedy.isprintable() and error.remedy
    assert time.process_time() - start < 1.0
    return said


def choice(rng: Rng, items):
    items = list(items)
    return items[rng.integers(len(items))]


def truncated(rng: Rng, raw: bytes, header: int, marks: list) -> bytes:
    return raw[: rng.integers(len(raw) if rng.random() < 0.3 else header)]


def bits_flipped(rng: Rng, raw: bytes, header: int, marks: list) -> bytes:
    out = bytearray(raw)
    for at in rng.integers(header, size=rng.integers(1, 9)):
        out[at] ^= 1 << rng.integers(8)
    return bytes(out)


def fields_rewritten(rng: Rng, raw: bytes, header: int, marks: list) -> bytes:
    out = bytearray(raw)
    for _ in range(rng.integers(1, 4)):
        _, at, size = marks[rng.integers(len(marks))]
        old = int.from_bytes(out[at : at + size], "little")
        values = [*EXTREMES, old + 1, old - 1, old * 2, old // 2, old ^ 1 << 8 * size - 1]
        out[at : at + size] = (choice(rng, values) % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(out)


def bytes_moved(rng: Rng, raw: bytes, header: int, marks: list) -> bytes:
    at, length = rng.integers(header), rng.integers(1, 64)
    other = rng.integers(header)
    copy = raw[other : other + length]
    piece = choice(rng, [b"", copy, rng.bytes(length), b"\xff" * length, bytes(length)])
    return raw[:at] + piece + raw[at + rng.integers(2) * length :]


def model_damaged(rng: Rng, raw: bytes, header: int, marks: list) -> bytes:
    keys, tensors = tiny_parts(**MODEL)
    for _ in range(rng.integers(1, 3)):
        choice(rng, MODEL_MUTATIONS)(rng, keys, tensors)
    return encode(keys, tensors)


def key_dropped(rng: Rng, keys: dict, tensors: Tensors) -> None:
    keys.pop(choice(rng, keys))


def key_changed(rng: Rng, keys: dict, tensors: Tensors) -> None:
    numbers = [*map(np.uint64, EXTREMES), np.int64(-1), np.bool_(1), *map(np.float32, (0, "nan", "inf"))]
    arrays = [[], ["a", b"\xff"], ["b"] * 1000, np.array([], "i4"), np.array([1, 2]), np.array([0.5, 0.5])]
    keys[choice(rng, keys)] = choice(rng, [*numbers, *arrays, "", "\x1b[2J\n", "x" * 10_000])


def tensor_dropped(rng: Rng, keys: dict, tensors: Tensors) -> None:
    tensors.pop(choice(rng, tensors))


def tensor_renamed(rng: Rng, keys: dict, tensors: Tensors) -> None:
    data = tensors.pop(choice(rng, tensors))
    twin = str(choice(rng, tensors)).encode()  # bytes: another key in this dict, the same name in the file
    tensors[choice(rng, [twin, b"\xff\xfe", b"", b"a\nb", b"n" * 5000])] = data


def tensor_reshaped(rng: Rng, keys: dict, tensors: Tensors) -> None:
    name = choice(rng, tensors)
    ggml_type, shape, data = tensors[name]
    shapes = [shape, shape[::-1], (*shape, 1), (0, 32), (), (2**60,), (32, 64), (2**32, 2**32, 32)]
    tensors[name] = (choice(rng, [ggml_type, ggml_type, 37, "IQ2_XXS", "F16", 2**32 - 1]), choice(rng, shapes), data)


def vocab_damaged(rng: Rng, keys: dict, tensors: Tensors) -> None:
    tokens = keys.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokens:
        broken = choice(rng, [b"\xc3\x28", b"\xed\xa0\x80", b"\xff", "", "\0", "a" * 70_000])
        at = rng.integers(len(tokens))
        keys["tokenizer.ggml.tokens"] = [*tokens[:at], broken, *tokens[at + rng.integers(2) :]]


MODEL_MUTATIONS = [key_dropped, key_changed, tensor_dropped, tensor_renamed, tensor_reshaped, vocab_damaged]
# how often, and the least number of distinct causes it must have drawn out
MUTATIONS = {
    truncated: (500, 10),
    bits_flipped: (1000, 40),
    fields_rewritten: (1000, 60),
    bytes_moved: (500, 20),
    model_damaged: (700, 60),
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_damaged_files_are_read_or_refused(tmp_path, mutate):
    times, causes = MUTATIONS[mutate]
    marks: list = []
    raw = encode(*tiny_parts(**MODEL), marks=marks)
    header = marks[-1][1] + 8  # the last mark is the last tensor's offset
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    assert outcome(path) == "ok"
    rng = np.random.default_rng(20_000)
    seen: Counter[str] = Counter()
    for i in range(times):
        path.write_bytes(mutate(rng, raw, header, marks))
        try:
            seen[outcome(path)] += 1
        except BaseException as error:
            error.add_note(f"{mutate.__name__}, file {i}")
            raise
    assert len(seen) >= causes


@pytest.mark.parametrize("value", [2**31 - 1, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1])
def test_huge_counts_take_no_memory(tmp_path, value):
    """Every count, length, dim and offset of the file in turn."""
    marks: list = []
    raw = encode(*tiny_parts(**MODEL), marks=marks)
    wanted = ("count", "length", "dim", "offset")
    marks = [m for m in marks if any(word in m[0] for word in wanted) and value < 1 << 8 * m[2]]
    marks = [m for i, m in enumerate(marks) if m[0] != "length of element" or i % 40 == 0]
    path = tmp_path / "m.gguf"
    tracemalloc.start()
    try:
        for what, at, size in marks:
            path.write_bytes(raw[:at] + value.to_bytes(size, "little") + raw[at + size :])
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            assert outcome(path) != "ok", what
            assert tracemalloc.get_traced_memory()[1] - before < 2 << 20, what  # the sound file takes 0.1 MB
    finally:
        tracemalloc.stop()


def test_a_million_keys(tmp_path):
    entry = (3).to_bytes(8, "little") + b"%s" + bytes(4) + b"\1"
    body = b"".join(entry.replace(b"%s", i.to_bytes(3, "little")) for i in range(1_000_000))
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\3\0\0\0" + bytes(8) + (1_000_000).to_bytes(8, "little") + body)
    assert f"1,000,000 metadata keys; at most {MAX_KEYS:,}" in outcome(path)


def sparse(path: Path, key_type: int, element: int, count: int, size: int) -> Path:
    """One metadata key that claims `count`, in a file of `size` bytes, nearly all of them holes."""
    head = b"GGUF\3\0\0\0" + bytes(8) + (1).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"k"
    head += key_type.to_bytes(4, "little") + (element.to_bytes(4, "little") if key_type == 9 else b"")
    path.write_bytes(head + count.to_bytes(8, "little"))
    os.truncate(path, size)
    return path


@pytest.mark.parametrize(
    ("key_type", "element", "count"),
    [(8, 0, 6 << 30), (9, 8, MAX_STRINGS + 1), (9, 8, 1 << 29), (9, 0, 6 << 30), (9, 12, 1 << 29)],
    ids=["string", "strings", "more strings", "bytes", "doubles"],
)
def test_counts_that_a_large_file_could_hold(tmp_path, key_type, element, count):
    path = sparse(tmp_path / "m.gguf", key_type, element, count, 8 << 30)
    tracemalloc.start()
    try:
        assert "claims" in outcome(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
