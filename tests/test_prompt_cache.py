"""A prompt's keys and values in a file: restored to the bit, refused when anything is wrong with it."""

import errno
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import tiny_llama, tiny_parts, write_gguf
from one_sequence import forget, reserve, token_ids
from reference import assert_close
from test_cli import RANDOM, finish, run, start, wait_for  # noqa: F401
from test_model import F16_CACHE, F32

from llamagpu import Llama, Sampling
from llamagpu.convert.convert import convert, open_source, plan
from llamagpu.engine import prompt_cache
from llamagpu.engine.kv_cache import BufferKvCache, TextureKvCache
from llamagpu.engine.model import BufferModel
from llamagpu.engine.scheduler import byte_reader
from llamagpu.engine.sequence import Sequence
from llamagpu.engine.texture_model import TextureModel
from llamagpu.errors import BadFile, DoesNotFit, LlamaGpuError
from llamagpu.gpu.buffers import BufferRange

GREEDY = Sampling(temperature=0)
WIDE = {"dim": 64, "heads": 2, "head_dim": 64, "ffn": 128, "ggml_type": "Q8_0"}  # int8 activations suit it
# name -> on textures?, model, settings
WAYS: dict[str, tuple[bool, dict[str, Any], dict[str, Any]]] = {
    "textures": (True, {}, {}),
    "textures, window": (True, {"metadata": {"llama.attention.sliding_window": 5}}, {}),
    "buffers f32": (False, {}, {"kv_type": "f32"}),
    "buffers f16": (False, {}, {"kv_type": "f16"}),
    "buffers f16, window": (False, {"metadata": {"llama.attention.sliding_window": 5}}, {"kv_type": "f16"}),
    "buffers, head_dim 6": (False, {"dim": 24, "ffn": 40}, {"kv_type": "f16"}),
    "buffers q8_0": (False, {"heads": 2, "kv_heads": 1}, {"kv_type": "q8_0"}),
    "fast": (False, WIDE, {"kv_type": "f16", "precision": "fast"}),
}


@pytest.fixture
def opened(gpu, tmp_path, monkeypatch):
    """A model, on textures or buffers as asked, whatever the adapter would be given."""

    def open_one(textures: bool = False, model: dict[str, Any] | None = None, **settings: Any) -> Llama:
        monkeypatch.setattr("llamagpu.engine.routes.suits_textures", lambda *_: textures)
        settings = {"precision": "high"} | settings
        path = tiny_llama(tmp_path / "m.gguf", **model or {})
        llama = Llama(path, device=gpu, **settings)
        assert type(llama.loaded.engine.model) is (TextureModel if textures else BufferModel)
        return llama

    return open_one


@pytest.fixture
def cache(tmp_path) -> Path:
    """Alone in its folder, so that what is left beside it shows."""
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache" / "prompt"


def left(cache: Path) -> list[str]:
    return sorted(os.listdir(cache.parent))


def read(llama: Llama, prompt: list[int]) -> np.ndarray:
    list(llama.generate(prompt, max_tokens=0))
    return llama.loaded.engine.read_logits()


def greedy(llama: Llama, prompt: list[int], count: int) -> list[int]:
    return [token.id for token in llama.generate(prompt, max_tokens=count, sampling=GREEDY, ignore_eos=True)]


@contextmanager
def held(llama: Llama, ids: list[int]) -> Iterator[Sequence]:
    """A sequence of these ids, all of which pages hold."""
    with llama.scheduler.alone(0) as sequence:
        assert llama.loaded.engine.begin(sequence, [*ids, 0]) == len(ids)
        yield sequence


def kv(llama: Llama, ids: list[int]) -> bytes:
    with held(llama, ids) as sequence:
        return b"".join(piece.tobytes() for piece in llama.loaded.engine.cache.read(sequence, len(ids)))


@pytest.mark.parametrize("name", WAYS)
def test_restored_is_what_was_read(opened, cache, name):
    """Keys, values, and the logits of every next prompt, bit for bit as if the prompt had just been read."""
    textures, model, settings = WAYS[name]
    more = token_ids(28, seed=1)
    reader, restorer = (opened(textures, model, chunk=32, **settings) for _ in range(2))
    # Within a chunk, and over several and two pages. No chunk of 2 to 8 rows: their kernels compile slowly.
    for length in (1, 76):
        first = token_ids(length)
        forget(reader)
        read(reader, first)
        reader.save_prompt(cache)
        prompts = {
            "same": (first, length - 1),
            "longer": ([*first, *more], length),
            "shorter": (first[: length // 2 + 1], length // 2),
            "diverging": ([*first[: length // 2], *more], length // 2),
            "other": ([287 - first[0], *first, *more], 0),
        }
        for prompt, shared in prompts.values():
            forget(reader)
            forget(restorer)
            read(reader, first)
            assert restorer.load_prompt(cache) == length
            assert kv(restorer, first) == kv(reader, first)
            going = restorer.generate(prompt, max_tokens=0)
            assert not list(going) and going.timings.cached_tokens == shared
            assert restorer.loaded.engine.read_logits().tobytes() == read(reader, prompt).tobytes()
            assert greedy(restorer, prompt, 4) == greedy(reader, prompt, 4)
    assert left(cache) == ["prompt"] and restorer.load_times.prompt_s > 0


@pytest.mark.parametrize("name, bounds", [("textures", F32), ("buffers f32", F32), ("buffers f16", F16_CACHE)])
def test_the_same_text_as_without_a_prompt_cache(opened, cache, name, bounds):
    """Against the prompt read in one go: its last tokens take other kernels then, which round elsewhere."""
    textures, model, settings = WAYS[name]
    first, prompt = token_ids(60), token_ids(75)
    assert prompt[:60] == first
    with opened(textures, model, **settings) as llama:
        want = greedy(llama, prompt, 40)
        llama.save_prompt(cache, 60)
        forget(llama)
        logits = read(llama, prompt)
    with opened(textures, model, **settings) as llama:
        assert llama.load_prompt(cache) == 60
        assert greedy(llama, prompt, 40) == want
        forget(llama)
        llama.load_prompt(cache)
        assert_close(read(llama, prompt), logits, *bounds, name)


def test_positions_beyond_the_rows_of_a_texture(opened, monkeypatch):
    """Textures of 128 rows: a cell stands in row cell % 128, columns cell // 128. A copied page has the same texels."""
    monkeypatch.setattr("llamagpu.engine.kv_cache.TEXTURE_ROWS", 128)
    engine = opened(textures=True, context=256).loaded.engine
    kv_cache, sequence = engine.cache, reserve(engine, 0, 170)
    assert isinstance(kv_cache, TextureKvCache)
    sequence.pages = [1, 3, 0]
    data = np.random.default_rng(0).integers(0, 256, 170 * kv_cache.position_bytes, np.uint8)
    rest = iter(np.split(data, len(data) // 256))  # a position of a layer has 2 x 2 x 16 f32
    kv_cache.write(sequence, 170, lambda count: np.concatenate([next(rest) for _ in range(count // 256)]))
    assert b"".join(piece.tobytes() for piece in kv_cache.read(sequence, 170)) == data.tobytes()
    kv_cache.copy_page(3, 2)
    rows = data.reshape(2, 170, 256)
    for layer, texture in enumerate(kv_cache.textures):
        found = kv_cache.gpu.read_texture(texture, 0, texture.width, texture.height).reshape(128, -1, 256)
        cells = found.swapaxes(0, 1).reshape(256, 256)
        for number, page in ((0, 1), (1, 3), (1, 2)):
            assert np.array_equal(cells[64 * page : 64 * page + 64], rows[layer, 64 * number : 64 * number + 64])


def by_cell(cache: BufferKvCache, cache_range: BufferRange) -> np.ndarray:
    """[kv_heads, pages, 64, bytes of a cell]."""
    planes = cache.kv_type.planes(cache.config.head_dim)
    pages = cache.gpu.read(cache_range, np.uint8, cache_range.size).reshape(-1, 64 * sum(planes))
    parts = np.split(pages, 64 * np.cumsum(planes)[:-1], axis=1)
    cells = np.concatenate([part.reshape(len(pages), 64, -1) for part in parts], axis=2)
    return cells.reshape(cache.config.kv_heads, -1, *cells.shape[1:])


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_heads_keep_their_place_in_other_pages(opened, kv_type):
    """[kv_heads, pages]: what is read from some pages lands right in others, also in copies of them; nothing is left
    behind the first positions of a sequence that is cleared."""
    wide = {"model": {"head_dim": 32}, "kv_type": kv_type, "chunk": 32}
    small, large = (opened(**wide, context=context) for context in (70, 250))
    read(small, token_ids(70))
    source, target = small.loaded.engine.cache, large.loaded.engine.cache
    assert isinstance(source, BufferKvCache) and isinstance(target, BufferKvCache)
    sequence = reserve(large.loaded.engine, 0, 70)
    sequence.pages = [3, 1]
    with held(small, token_ids(70)) as saved:
        first, second = saved.pages
        pieces = list(source.read(saved, 70))
    assert sum(map(len, pieces)) == 70 * source.position_bytes
    target.write(sequence, 70, byte_reader(pieces))
    target.copy_page(3, 0)
    ranges = [
        (before, after)
        for old, new in zip(source.layers, target.layers, strict=True)
        for before, after in ((old.keys, new.keys), (old.values, new.values))
    ]
    for before, after in ranges:
        want, got = by_cell(source, before), by_cell(target, after)
        assert want.any() and np.array_equal(got[:, [3, 0]], want[:, [first, first]])
        assert np.array_equal(got[:, 1, :6], want[:, second, :6]) and not got[:, 2].any()
    target.pool.holders[3] = target.pool.holders[1] = 1
    target.clear(sequence, 60)
    for before, after in ranges:
        want, got = by_cell(source, before), by_cell(target, after)
        assert np.array_equal(got[:, 3, :60], want[:, first, :60]) and not got[:, 3, 60:].any() and not got[:, 1].any()


def test_what_the_device_holds_at_a_time_is_bounded(opened, cache, monkeypatch):
    """Writes pile up on the host until they are submitted: not more than STAGING bytes of them."""
    llama = opened(kv_type="f32", context=64)
    read(llama, token_ids(60))
    llama.save_prompt(cache)
    submitted = []
    monkeypatch.setattr("llamagpu.gpu.device.STAGING_BYTES", 4 * 60 * 64)  # heads of 16 f32
    submit = llama.gpu.submit
    monkeypatch.setattr(llama.gpu, "submit", lambda *work: submitted.append(work) or submit(*work))
    llama.load_prompt(cache)
    assert len(submitted) == 2  # 8 heads


# Damage


@pytest.fixture
def saved(opened, cache) -> tuple[Llama, bytes]:
    llama = opened(kv_type="f16")
    read(llama, token_ids(5))
    llama.save_prompt(cache)
    return llama, cache.read_bytes()


def refused(llama: Llama, cache: Path, raw: bytes) -> str:
    cache.write_bytes(raw)
    with pytest.raises(BadFile) as caught:
        llama.load_prompt(cache)
    error = caught.value
    assert error.exit_code == 1 and error.cause.startswith(f"{cache}: ") and error.cause.isprintable()
    assert error.remedy == "delete it, or name another file"
    return error.cause


def test_a_flipped_bit_anywhere(saved, cache):
    llama, raw = saved
    rng = np.random.default_rng(0)
    for at in [*range(300), *range(300, len(raw), 5), *range(len(raw) - 40, len(raw))]:
        damaged = bytearray(raw)
        damaged[at] ^= 1 << rng.integers(8)
        refused(llama, cache, bytes(damaged))
    cache.write_bytes(raw)
    assert llama.load_prompt(cache) == 5


def test_any_other_length(saved, cache):
    llama, raw = saved
    for length in [*range(300), *range(300, len(raw), 11), len(raw) - 1]:
        assert "damaged or cut short" in refused(llama, cache, raw[:length])
    for more in (b"\0", raw[-32:], raw):
        assert "damaged" in refused(llama, cache, raw + more)


def test_forged_headers(saved, cache):
    """Sizes that the file cannot have, and JSON that is none of ours, before anything is allocated for them."""
    llama, raw = saved
    magic, version, length, count = prompt_cache.PREFIX.unpack_from(raw)
    body = raw[prompt_cache.PREFIX.size :]
    made = json.loads(body[:length])

    def with_json(text: bytes) -> bytes:
        return prompt_cache.PREFIX.pack(magic, version, len(text), count) + text + body[length:]

    for fields in ((length, 0), (length, 2**32 - 1), (2**32 - 1, count), (0, count), (5000, count)):
        refused(llama, cache, prompt_cache.PREFIX.pack(magic, version, *fields) + body)
    deep = b"[" * 4000
    for text in (b"[]", b"1", b"null", b"{}", b"\xff", deep, json.dumps(made | {"model": ["x"]}).encode()):
        refused(llama, cache, with_json(text))
    said = refused(llama, cache, with_json(json.dumps(made | {"precision": "\x1b[2J" * 99}).encode()))
    assert len(said) < 400
    assert "format 2, not 3" in refused(llama, cache, prompt_cache.PREFIX.pack(magic, 2, length, count) + body)
    for other in (b"", b"GGUF", b"hello " * 30, bytes(1000)):
        assert "prompt cache" in refused(llama, cache, other)


def test_after_a_refusal_the_prompt_is_read(saved, cache):
    """Half of a damaged file is on the device already when its end is found wrong."""
    llama, raw = saved
    prompt = token_ids(20)
    forget(llama)
    want = read(llama, prompt)
    forget(llama)
    refused(llama, cache, raw[:-40] + b"\x01" * 40)
    assert not llama.loaded.engine.cache.pool.contents
    assert read(llama, prompt).tobytes() == want.tobytes()
    refused(llama, cache, b"not one at all")
    assert kv(llama, prompt)  # nothing was touched


# Another model, other settings


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"rope_theta": 10001.0},
        {"ggml_type": "F16"},
        {"tied": False},
        {"rope_freqs": np.full(8, 2.0)},
        {"metadata": {"llama.attention.sliding_window": 5}},
        {"metadata": {"llama.attention.layer_norm_rms_epsilon": 2e-5}},
        {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}},
        {"vocab": 2000, "seed": 2},
    ],
    ids=str,
)
def test_another_model(saved, opened, cache, other):
    _, raw = saved
    assert "was made with another model" in refused(opened(model=other, kv_type="f16"), cache, raw)


def test_a_part_of_every_large_tensor_counts(opened, cache, tmp_path, gpu):
    """Weights that differ in one tensor of 256 KiB, as after training it further."""
    llama = opened(model={"vocab": 1024}, kv_type="f16")
    read(llama, token_ids(5))
    llama.save_prompt(cache)
    keys, tensors = tiny_parts(vocab=1024)
    ggml_type, shape, data = tensors["token_embd.weight"]
    assert len(data) > prompt_cache.SMALL_BYTES
    tensors["token_embd.weight"] = (ggml_type, shape, (np.frombuffer(data, "<f4") * np.float32(1.01)).tobytes())
    with Llama(write_gguf(tmp_path / "further.gguf", keys, tensors), device=gpu, kv_type="f16") as other:
        assert "was made with another model" in refused(other, cache, cache.read_bytes())


def test_what_the_cache_does_not_depend_on(saved, opened, cache):
    """Name of the file, chat template, context, chunk."""
    llama, _ = saved
    model = {"metadata": {"tokenizer.chat_template": "{{ messages[0].content }}"}}
    with opened(model=model, kv_type="f16", context=32, chunk=4) as other:
        assert other.load_prompt(cache) == 5
        assert kv(other, token_ids(5)) == kv(llama, token_ids(5))


def test_other_settings(saved, opened, cache):
    _, raw = saved
    said = refused(opened(kv_type="f32"), cache, raw)
    assert said.endswith("the prompt cache was made with cache type 'f16', and this run has f32")
    flat = opened(kv_type="f32")
    read(flat, token_ids(5))
    flat.save_prompt(cache)
    said = refused(opened(textures=True), cache, cache.read_bytes())
    assert said.endswith("made with layout 'buffers', and this run has textures")
    fast = opened(model=WIDE, kv_type="f16", precision="fast")
    assert fast.precision == "fast"
    read(fast, token_ids(5))
    fast.save_prompt(cache)
    said = refused(opened(model=WIDE, kv_type="f16", precision="high"), cache, cache.read_bytes())
    assert said.endswith("made with precision 'fast', and this run has high")


def test_a_context_too_small(saved, opened, cache):
    with pytest.raises(DoesNotFit, match="holds 5 tokens, and the context 4") as caught:
        opened(kv_type="f16", context=4).load_prompt(cache)
    assert caught.value.remedy


def test_packed_files(gpu, cache, tmp_path):
    """All of a packed file's matrices count, which `tensors` does not show."""
    files = []
    for seed in (0, 1):
        source = open_source(str(tiny_llama(tmp_path / f"{seed}.gguf", ggml_type="Q4_0", seed=seed)))
        files.append(tmp_path / f"{seed}.safetensors")
        convert(source, files[-1], plan(source, "packed"))
    with Llama(files[0], device=gpu) as llama:
        want = read(llama, token_ids(9))
        llama.save_prompt(cache)
    with Llama(files[0], device=gpu) as llama:
        assert llama.load_prompt(cache) == 9
        forget(llama)
        assert read(llama, token_ids(9)).tobytes() == want.tobytes()
    with Llama(files[1], device=gpu) as llama:
        assert "was made with another model" in refused(llama, cache, cache.read_bytes())


# Files that cannot be read or written


def test_not_a_file(saved, cache, tmp_path):
    llama, _ = saved
    os.mkfifo(tmp_path / "pipe")
    for wrong, said in ((tmp_path / "pipe", "regular file"), (tmp_path, "regular file")):
        with pytest.raises(BadFile, match=said):
            llama.load_prompt(wrong)
        with pytest.raises(LlamaGpuError, match=f"cannot write .*{said}"):
            llama.save_prompt(wrong)
    for wrong in (tmp_path / "none", tmp_path / "none" / "none", tmp_path / ("x" * 300)):
        with pytest.raises(BadFile, match="cannot read"):
            llama.load_prompt(wrong)
    assert (tmp_path / "pipe").is_fifo() and left(cache) == ["prompt"]


def test_nothing_read_yet(opened, cache):
    with pytest.raises(LlamaGpuError, match="no prompt to save") as caught:
        opened().save_prompt(cache)
    assert caught.value.remedy and not left(cache)


def test_the_file_before_stays_until_the_new_one_is_whole(saved, cache):
    llama, raw = saved

    def stop(done: int, total: int) -> None:
        assert left(cache) == [".prompt.part", "prompt"] and 0 < done <= total
        if done > 50:
            raise KeyboardInterrupt

    read(llama, token_ids(50))
    with pytest.raises(KeyboardInterrupt):
        llama.save_prompt(cache, progress=stop)
    assert left(cache) == ["prompt"] and cache.read_bytes() == raw


def test_two_runs_for_one_file(saved, opened, cache):
    llama, second = saved[0], opened(kv_type="f16")
    read(llama, token_ids(50))
    read(second, token_ids(50))

    def other(done: int, total: int) -> None:
        if not cache.exists():
            second.save_prompt(cache, 20)

    cache.unlink()
    llama.save_prompt(cache, progress=other)
    assert left(cache) == ["prompt"] and llama.load_prompt(cache) == 20


# The command


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", context=4096)


def test_generate_twice(run, model, cache):  # noqa: F811
    args = ["generate", "-m", model, "-n", 20, "--precision", "high", "-ctk", "f32", *RANDOM]

    def result(text: str, *more: object) -> dict[str, Any]:
        found = run(*args, "-p", text, "--prompt-cache", cache, "--json", *more)
        assert found.code == 0 and left(cache) == ["prompt"]
        return found.json

    def written() -> tuple[int, int]:
        return cache.stat().st_ino, cache.stat().st_mtime_ns

    text = "the quick brown fox jumps"
    plain = run(*args, "-p", text, "--json").json
    count = len(plain["prompt_ids"])
    first = result(text)
    assert first["ids"] == plain["ids"] and first["timings"]["cached_tokens"] == 0
    before = written()
    again = result(text)
    assert again["ids"] == plain["ids"] and again["timings"]["cached_tokens"] == count - 1
    assert result(text[:9])["timings"]["cached_tokens"] == len(result(text[:9])["prompt_ids"]) - 1
    assert written() == before  # it holds all of these prompts
    longer = result(text + " over the lazy dog")
    assert longer["timings"]["cached_tokens"] == count
    assert longer["ids"] == run(*args, "-p", text + " over the lazy dog", "--json").json["ids"]
    assert written() != before
    said = run(*args, "-p", text + " over the lazy dog", "--prompt-cache-file", cache).err
    assert f"prompt {len(longer['prompt_ids'])} tokens ({len(longer['prompt_ids']) - 1} from the cache)" in said
    other = result("the quick brown dog")
    assert 10 < other["timings"]["cached_tokens"] < count
    assert result("the quick brown dog", "-ub", 2)["timings"]["cached_tokens"] == len(other["prompt_ids"]) - 1


def test_only_the_prompt(run, model, cache):  # noqa: F811
    cache.touch()  # an empty file, as mktemp makes it, is a new one
    result = run("generate", "-m", model, "-p", "a b c", "-n", 0, "--prompt-cache", cache)
    assert result.code == 0 and result.out == b"\n"
    env = {"LLAMAGPU_PROMPT_CACHE": str(cache)}
    found = run("generate", "-m", model, "-p", "a b c d", "-n", 4, "--json", **env).json
    assert found["timings"]["cached_tokens"] == len(found["prompt_ids"]) - 2
    single = cache.with_name("single")
    assert run("generate", "-m", model, "-p", "", "-n", 1, "--prompt-cache", single).code == 0
    assert run("generate", "-m", model, "-p", "", "-n", 1, "--prompt-cache", single).code == 0 and single.exists()


def test_read_only(run, model, cache):  # noqa: F811
    args = ["generate", "-m", model, "-n", 4, "--prompt-cache-ro", "--json"]
    assert run(*args, "-p", "a b").code == 2
    missing = run(*args, "-p", "a b", "--prompt-cache", cache)
    assert missing.code == 1 and "No such file" in missing.err and not left(cache)
    assert run("generate", "-m", model, "-n", 4, "-p", "a b", "--prompt-cache", cache).code == 0
    raw = cache.read_bytes()
    found = run(*args, "-p", "a b c d", "--prompt-cache", cache)
    assert found.code == 0 and found.json["timings"]["cached_tokens"] > 3
    assert cache.read_bytes() == raw and left(cache) == ["prompt"]


def test_refused_files(run, model, cache):  # noqa: F811
    args = ["generate", "-m", model, "-p", "a b", "-n", 4, "--prompt-cache", cache, "-q"]
    assert run(*args).code == 0
    raw = cache.read_bytes()
    half = "f16" if b'"f32"' in raw else "f32"
    cases = [(raw[:-1], [], 1, "damaged"), (b"text", [], 1, "prompt cache"), (raw, ["-ctk", half], 1, "cache type")]
    for content, more, code, said in [*cases, (raw, ["-c", 4], 5, "context")]:
        cache.write_bytes(content)
        result = run(*args, *more)
        assert (result.code, result.out) == (code, b"") and said in result.err
        cause, remedy = result.err.splitlines()
        assert cause.startswith("error: ") and remedy.startswith("       ")
        assert cache.read_bytes() == content and left(cache) == ["prompt"]


def test_folders_that_cannot_be_written(run, model, cache, monkeypatch):  # noqa: F811
    """Said before the prompt is read."""
    args = ["generate", "-m", model, "-p", "a b", "-n", 4]
    result = run(*args, "--prompt-cache", cache / "none" / "prompt")
    assert (result.code, result.out) == (1, b"") and "no such folder" in result.err
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    result = run(*args, "--prompt-cache", cache)
    assert (result.code, result.out) == (1, b"") and "no permission" in result.err


def test_full_disk(run, model, cache, monkeypatch):  # noqa: F811
    """The text comes all the same; then one line, and nothing is left."""
    args = ["generate", "-m", model, "-p", "a b", "-n", 9, *RANDOM]
    want = run(*args).out
    usage = shutil.disk_usage(cache.parent)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        result = run(*args, "--prompt-cache", cache, "-q")
    assert (result.code, result.out) == (1, want) and "error: no space left" in result.err
    assert len(result.err.splitlines()) == 2 and not left(cache)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # fails in the middle of writing
    try:
        result = run(*args, "--prompt-cache", cache, "-q", "--json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.code == 1 and result.json["text"].encode() + b"\n" == want
    assert os.strerror(errno.EFBIG) in result.err and not left(cache)


def test_interrupted_while_it_saves(run, model, cache, monkeypatch):  # noqa: F811
    plain = Llama.save_prompt

    def save(self: Llama, path: Path, count: int, progress: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        plain(self, path, count, progress)

    monkeypatch.setattr(Llama, "save_prompt", save)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a background job it is ignored
    try:
        result = run("generate", "-m", model, "-p", "a b", "-n", 4, "--prompt-cache", cache)
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.code == 130 and result.out and result.err.endswith("interrupted\n") and not left(cache)


def test_interrupted_while_it_reads(model, cache, tmp_path):
    prompt = tmp_path / "long.txt"
    prompt.write_text("a b " * 900)
    process = start("generate", "-m", model, "-f", prompt, "-n", 9, "-ub", 1, "-v", "--prompt-cache", cache)
    wait_for(process.stderr, b"seed ")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 130 and not left(cache)


def test_interrupted_text(run, model, cache):  # noqa: F811
    """The prompt was read: the next run has it."""
    args = ["-n", 4000, "--ignore-eos", "--top-k", 1, "--temp", 1, "--prompt-cache", cache]
    process = start("generate", "-m", model, "-p", "a b c", *args)
    assert os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 130 and left(cache) == ["prompt"]
    found = run("generate", "-m", model, "-p", "a b c", "-n", 1, "--json", "--prompt-cache", cache)
    assert found.json["timings"]["cached_tokens"] == len(found.json["prompt_ids"]) - 1
