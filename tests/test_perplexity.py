"""Perplexity against the float64 reference, chunk by chunk as llama-perplexity does it."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import tiny_parts, write_gguf
from package_data import default_model, english_text
from reference import Reference

from llamagpu.engine.model import BufferModel
from llamagpu.errors import LlamaGpuError, NumericCheckFailed
from llamagpu.files.gguf_file import GgufFile
from llamagpu.files.tokenizer import Tokenizer
from llamagpu.llama import Llama
from llamagpu.perplexity import chunks_of, perplexity

TEXT = "the quick brown fox jumps over the lazy dog, again and again. " * 4


def expected(path, ids: list[int], context: int, bos: int | None) -> tuple[float, float, int, int]:
    """llama-perplexity's loop: value, error, tokens, chunks.

    BOS replaces the first id of each chunk of `context` ids. The ids after the first half + 1 are scored, each given
    all ids before it in the chunk.
    """
    model, losses = Reference(GgufFile(path)), []
    for start in range(0, len(ids) - context + 1, context):
        chunk = ids[start : start + context]
        if bos is not None:
            chunk = [bos, *chunk[1:]]
        model.clear()
        logits = model.forward(chunk)
        for i in range(context // 2, context - 1):
            row = logits[i] - logits[i].max()
            losses.append(math.log(np.exp(row).sum()) - row[chunk[i + 1]])
    count, mean = len(losses), sum(losses) / len(losses)
    squares = sum(loss**2 for loss in losses) / count - mean**2
    value = math.exp(mean)
    return value, value * math.sqrt(squares / (count - 1)), count, len(ids) // context


@pytest.mark.parametrize("bos", [True, False], ids=["bos", "no bos"])
@pytest.mark.parametrize("context", [8, 33, 64])
def test_against_float64(tmp_path, gpu, context, bos):
    keys, tensors = tiny_parts(ggml_type="Q8_0", metadata={"tokenizer.ggml.add_bos_token": np.bool_(bos)})
    path = write_gguf(tmp_path / "m.gguf", keys, tensors)
    with Llama(path, device=gpu, context=context, precision="high", kv_type="f32") as llama:
        found = perplexity(llama, TEXT, context)
        ids = llama.tokenizer.encode(TEXT, special=False)
    value, error, tokens, chunks = expected(path, ids, context, 1 if bos else None)
    assert (found.tokens, found.chunks) == (tokens, chunks)
    assert tokens == chunks * (context - context // 2 - 1)
    assert found.value == pytest.approx(value, rel=1e-4)  # 3e-7 measured
    assert found.error == pytest.approx(error, rel=1e-3)


def test_steps_smaller_than_the_chunk(tmp_path, gpu):
    """A chunk that takes several steps, the last of them short, gives the same numbers."""
    path = write_gguf(tmp_path / "m.gguf", *tiny_parts())
    found = []
    for step in (512, 7):
        with Llama(path, device=gpu, context=64, chunk=step, precision="high", kv_type="f32") as llama:
            found.append(perplexity(llama, TEXT, 64).value)
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_progress(tmp_path, gpu):
    seen: list[tuple[int, int]] = []
    with Llama(write_gguf(tmp_path / "m.gguf", *tiny_parts()), device=gpu) as llama:
        perplexity(llama, TEXT, 64, lambda *done: seen.append(done))
    chunks = seen[-1][1]
    assert seen == [(i + 1, chunks) for i in range(chunks)] and chunks > 2


def test_special_tokens_in_the_text_are_text(tmp_path, gpu):
    with Llama(write_gguf(tmp_path / "m.gguf", *tiny_parts()), device=gpu) as llama:
        assert perplexity(llama, "<s>" * 30, 8).chunks > 30 // 8


def test_text_too_short(tmp_path, gpu):
    with (
        Llama(write_gguf(tmp_path / "m.gguf", *tiny_parts()), device=gpu) as llama,
        pytest.raises(LlamaGpuError, match="at least two chunks of 64"),
    ):
        perplexity(llama, "too short for that", 64)


def test_nan_is_an_error(tmp_path, gpu):
    keys, tensors = tiny_parts()
    tensors["output_norm.weight"] = ("F32", (64,), np.full(64, 3e38, "<f4").tobytes())
    with (
        Llama(write_gguf(tmp_path / "m.gguf", keys, tensors), device=gpu) as llama,
        pytest.raises(NumericCheckFailed),
    ):
        perplexity(llama, TEXT, 64)


def test_sentences_are_likelier_than_the_same_words_shuffled(gpu):
    """A trained model. Measured: 7 and 1,084."""
    text = (
        "The sun rises in the east and sets in the west. In the morning the birds begin to sing, and people wake up "
        "and go to work. In the evening they come home, eat dinner with their families and go to sleep."
    )
    words = text.split()
    random.Random(0).shuffle(words)
    with Llama(default_model(), device=gpu, context=16, precision="high") as llama:
        assert 1 < 20 * perplexity(llama, text, 16).value < perplexity(llama, " ".join(words), 16).value


# How far each precision may be from float64, with the kernels of GPUs


def english(path: Path, count: int, context: int) -> list[list[int]]:
    text = english_text()[: 10 * (count + 1) * context]
    return chunks_of(Tokenizer.from_gguf(GgufFile(path).metadata), text, context)[:count]


def reference_log_probs(path: Path, kv_type: str, chunks: list[list[int]]) -> np.ndarray:
    """Log probability of each next token in float64, but for the rounding of the KV cache. [chunks, tokens - 1]."""
    reference, found = Reference(GgufFile(path), kv_type=kv_type), []
    for ids in chunks:
        reference.clear()
        logits = reference.forward(ids)[:-1]
        logits -= logits.max(axis=1, keepdims=True)
        found.append(logits[range(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(axis=1)))
    return np.array(found)


def differences(path: Path, gpu: Any, monkeypatch: Any, precision: str, chunks: list[list[int]]) -> np.ndarray:
    """Log probability of each next token: prefill on the device minus float64. [chunks, tokens - 1]."""
    monkeypatch.setattr(gpu, "caps", replace(gpu.caps, cpu=False))  # a software adapter takes the GPUs' kernels, too
    found = []
    with Llama(path, device=gpu, context=len(chunks[0]), precision=precision) as llama:
        engine = llama.loaded.engine
        assert type(engine.model) is BufferModel and engine.model.int8_prefill == (precision == "fast")
        for ids in chunks:
            with llama.scheduler.alone(len(ids)) as sequence:
                found.append(engine.log_probs(sequence, ids))
    return np.array(found) - reference_log_probs(path, "f32", chunks)


GATES = {"high": 0.001, "fast": 0.005}


@pytest.mark.parametrize(("precision", "tokens", "deviation"), [("high", 8, 0.003), ("fast", 64, 0.15)])
def test_precision_of_a_prompt(gpu, monkeypatch, precision, tokens, deviation):
    """The mean of a short prompt is within the gate and three of its standard errors.

    Rounding to int8 moves a token's log probability by 0.07 to 0.1; f32 sums and an f16 cache by 0.001.
    """
    path = default_model()
    off = differences(path, gpu, monkeypatch, precision, english(path, 1, tokens))
    assert off.std() < deviation
    assert abs(off.mean()) < GATES[precision] + 3 * off.std() / math.sqrt(off.size)


@pytest.mark.slow
@pytest.mark.parametrize("precision", GATES)
def test_perplexity_within_the_gates(gpu, monkeypatch, precision):
    """As `llamagpu perplexity`: the second halves of 24 chunks of 512."""
    path = default_model()
    off = differences(path, gpu, monkeypatch, precision, english(path, 24, 512))[:, 256:]
    print(f"{precision}: {100 * math.expm1(-off.mean()):+.4f} %")
    assert abs(math.expm1(-off.mean())) < GATES[precision]


@pytest.mark.slow
def test_a_q8_0_cache_within_its_gate(gpu):
    """Perplexity within 0.1 % of that of an f16 cache: the second halves of 8 chunks of 512 in float64, which takes a
    hundredth of a software adapter's time, and the device as near to that on a short piece."""
    path = default_model()
    f16, q8_0 = (reference_log_probs(path, kv_type, english(path, 8, 512))[:, 256:] for kv_type in ("f16", "q8_0"))
    off = f16 - q8_0
    error, deviation = math.expm1(off.mean()), off.std() / math.sqrt(off.size)
    print(f"q8_0 against f16: {math.exp(-f16.mean()):.4f}, {100 * error:+.4f} ± {100 * deviation:.4f} %")
    assert abs(error) < 0.001
    (ids,) = english(path, 1, 32)
    with (
        Llama(path, device=gpu, context=64, precision="high", kv_type="q8_0") as llama,
        llama.scheduler.alone(len(ids)) as sequence,
    ):
        off = llama.loaded.engine.log_probs(sequence, ids) - reference_log_probs(path, "q8_0", [ids])[0]
    print(f"device: {off.mean():+.6f}, std {off.std():.6f}")
    # f32 sums make some numbers round to the next integer: 0.015; q8_0 itself moves a token by 0.037
    assert off.std() < 0.03 and abs(off.mean()) < 0.001 + 3 * off.std() / math.sqrt(off.size)
