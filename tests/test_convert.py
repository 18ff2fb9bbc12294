"""Conversion: rounding, the files that are written, errors and interruptions, memory and speed, the command."""

import json
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize
from gguf_builder import tiny_llama
from hf_builder import hf_config, hf_folder, hf_weights, write_safetensors
from one_sequence import load_one
from package_data import default_model, english_text
from reference import Reference, assert_close
from safetensors.numpy import load_file

from llamagpu.cli.convert import own_remedies
from llamagpu.convert.convert import convert, open_source, plan
from llamagpu.convert.gguf_header import encode_header
from llamagpu.convert.output import repack_q6
from llamagpu.convert.packed_writer import PackedWriter
from llamagpu.convert.quantise import error_weights, quantise
from llamagpu.engine.engine import Engine
from llamagpu.engine.options import Backend, KvType
from llamagpu.engine.sequence import Sequence
from llamagpu.errors import BadFile, DeviceLost, DoesNotFit, LlamaGpuError, Unsupported
from llamagpu.files.config import ModelConfig
from llamagpu.files.gguf_file import GgufFile, read_metadata
from llamagpu.files.matrices import LoadedMatrix, matrix_sources
from llamagpu.files.packed_file import PackedFile
from llamagpu.files.repack import repack
from llamagpu.files.safetensors_file import read_header
from llamagpu.files.storage import PackedMatrix, Storage, expand_scales, from_q6
from llamagpu.files.tokenizer import Tokenizer
from llamagpu.llama import Llama
from llamagpu.perplexity import chunks_of

IDS = [1, 70, 5, 280, 33]


def sample(rows: int = 64, k: int = 256) -> np.ndarray:
    """Weights with outliers, and groups that are hard to round in front."""
    x = (np.random.default_rng(5).standard_t(4, (rows, k)) * 0.05).astype(np.float32)
    x[0, :32], x[1, :32], x[2, :32] = 0, 0.5, -1e-9
    x[3, :32] = np.tile([2.0, -2.0], 16)  # two of the largest magnitude: the first counts
    return x


def gguf_blocks(x: np.ndarray, ggml_type: str) -> np.ndarray:
    return quantize(x, GGMLQuantizationType[ggml_type]).view(np.uint8)


def gguf_floats(blocks: np.ndarray, ggml_type: str) -> np.ndarray:
    return dequantize(blocks, GGMLQuantizationType[ggml_type])


def logits(engine: Engine, ids: list[int]) -> np.ndarray:
    engine.prefill(Sequence(), ids)
    return engine.read_logits()


# Rounding


@pytest.mark.parametrize("ggml_type", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16", "F32"])
def test_plain_rounding_equals_that_of_gguf(ggml_type):
    x = sample(256, 1024)
    blocks, error = quantise(ggml_type, x)
    assert np.array_equal(blocks, gguf_blocks(x, ggml_type).reshape(len(x), -1))
    assert error == pytest.approx(((gguf_floats(blocks, ggml_type).astype(np.float64) - x) ** 2).sum(), rel=1e-4)


def test_q6_k_rounding_reports_its_error():
    x = sample()
    blocks, error = quantise("Q6_K", x)
    y = gguf_floats(blocks, "Q6_K")
    assert error == pytest.approx(((y.astype(np.float64) - x) ** 2).sum(), rel=1e-3)
    assert ((y - x)[4:] ** 2).sum() < 1e-3 * (x[4:] ** 2).sum()  # 6 bits: plain Q4_0 has 8e-3
    assert np.array_equal(y[0, :32], x[0, :32])


@pytest.mark.parametrize(("ggml_type", "gain"), [("Q4_0", 0.9), ("Q4_1", 0.85)])
@pytest.mark.parametrize("calibrated", [False, True])
def test_search_is_never_worse_than_plain_rounding(ggml_type, gain, calibrated):
    x = sample()
    importance = np.random.default_rng(6).uniform(0.01, 10, x.shape[1]).astype(np.float32) if calibrated else None
    weights = error_weights(x.reshape(-1, 32), importance)
    errors = []
    for best in (False, True):
        blocks, _ = quantise(ggml_type, x, importance, best)
        errors.append((weights * (gguf_floats(blocks, ggml_type) - x).reshape(-1, 32) ** 2).sum(axis=1))
    assert (errors[1] <= errors[0] * (1 + 1e-5) + 1e-20).all()
    assert errors[1].sum() < gain * errors[0].sum()


def test_search_favours_important_columns():
    """The same weights, rounded for two sets of important columns: each rounding is better for its own set."""
    x = sample()
    first, second = (np.where(np.arange(256) % 2 == i, 1, 0.01).astype(np.float32) for i in (0, 1))
    ys = [gguf_floats(quantise("Q4_0", x, importance, best=True)[0], "Q4_0") for importance in (first, second)]
    for importance, own, other in ((first, *ys), (second, *ys[::-1])):
        assert (importance * (own - x) ** 2).sum() < 0.9 * (importance * (other - x) ** 2).sum()


# Files


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    config = hf_config()
    return hf_folder(tmp_path_factory.mktemp("hf") / "model", config, hf_weights(config))


def make(source: Path | str, out: Path, to: str | None, keep_output: str = "q8_0", **options):
    opened = open_source(str(source))
    return convert(opened, out, plan(opened, to, keep_output, out.suffix == ".safetensors"), **options)


@pytest.mark.parametrize("to", ["q4_0", "q4_1", "q8_0"])
def test_every_tensor_of_a_file_equals_what_gguf_gives(folder, tmp_path, to):
    report = make(folder, tmp_path / "out.gguf", to)
    make(folder, tmp_path / "f16.gguf", "f16")
    file, before = GgufFile(tmp_path / "out.gguf"), GgufFile(tmp_path / "f16.gguf")
    errors = {loss.name: loss.nmse for loss in report.tensors}
    for name, tensor in before.tensors.items():
        found = file.tensors[name]
        wanted = "F32" if len(tensor.shape) == 1 else "Q8_0" if "blk" not in name else to.upper()
        assert found.ggml_type == wanted
        x = gguf_floats(tensor.data, tensor.ggml_type).reshape(tensor.shape)
        assert np.array_equal(found.data, gguf_blocks(x, found.ggml_type).reshape(-1)), name
        y = gguf_floats(found.data, found.ggml_type).reshape(tensor.shape)
        assert errors[name] == pytest.approx(((y - x) ** 2).sum() / (x**2).sum(), rel=1e-3, abs=1e-12)
    assert report.bytes_after == (tmp_path / "out.gguf").stat().st_size
    assert report.bits == 8 * report.bytes_after / sum(np.prod(t.shape) for t in before.tensors.values())


def test_split_gguf_to_gguf_copies_what_has_the_type_already(tmp_path):
    """Tensors of the wanted type and quantised output tensors are copied; the rest is rounded anew."""
    types = {"attn_q": "Q4_0", "token_embd": "Q6_K", "ffn_up": "Q4_K", "ffn_down": "BF16"}

    def ggml_type(name: str) -> str:
        return next((found for part, found in types.items() if part in name), "F16")

    path = tiny_llama(tmp_path / "m.gguf", ggml_type=ggml_type, dim=256, ffn=256, heads=4, n_parts=3)
    before = GgufFile(path)
    make(path, tmp_path / "out.gguf", "q4_0")
    after = GgufFile(tmp_path / "out.gguf")
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "output_norm.weight"):
        assert after.tensors[name].ggml_type == before.tensors[name].ggml_type
        assert np.array_equal(after.tensors[name].data, before.tensors[name].data)
    for tensor in ("ffn_up", "ffn_down", "attn_v"):
        raw, found = before.tensors[f"blk.1.{tensor}.weight"], after.tensors[f"blk.1.{tensor}.weight"]
        x = gguf_floats(raw.data, raw.ggml_type).reshape(raw.shape)
        assert np.array_equal(found.data, gguf_blocks(x, "Q4_0").reshape(-1))
    assert "split.count" not in after.metadata and after.metadata["general.file_type"] == 2
    same = set(before.metadata) - {"general.file_type"} - {k for k in before.metadata if k.startswith("split.")}
    assert all(np.array_equal(after.metadata[key], before.metadata[key]) for key in same)


def test_rows_that_do_not_divide_into_groups_get_another_type(tmp_path):
    path = tiny_llama(tmp_path / "m.gguf", ffn=172, layers=5)
    report = make(path, tmp_path / "out.gguf", "q4_0")
    file = GgufFile(tmp_path / "out.gguf")
    assert file.tensors["blk.0.ffn_down.weight"].ggml_type == "F16"  # 172 columns
    assert file.tensors["blk.0.ffn_up.weight"].ggml_type == "Q4_0"
    assert "5 matrices" in report.notes[0] and "ffn_down" in report.notes[0]
    source = open_source(str(path))
    assert "token_embd.weight is Q8_0" in plan(source, "q4_0", "q6_k").notes[1]
    assert len(plan(source, "q8_0", "q6_k").notes) == 1


def test_header_holds_every_type_of_value(tmp_path):
    """Also empty arrays and lone surrogates, which gguf's own writer refuses."""
    arrays = {f"array.{code}": np.arange(3).astype(code) for code in "BbHhIifQqd?"}
    scalars = {"u32": 7, "u64": 1 << 40, "i32": -7, "f32": 0.5, "yes": True, "no": False, "text": "Grüße", "empty": ""}
    metadata = {"general.architecture": "llama", **scalars, **arrays}
    metadata |= {"strings": ["a", "\u2581b", ""], "tokenizer.ggml.merges": [], "none": np.zeros(0, np.float32)}
    path = tmp_path / "header.gguf"
    path.write_bytes(encode_header(metadata | {"surrogate": "a\udce4"}, [("x", "Q4_0", (3, 64)), ("y", "F32", (5,))]))
    raw = path.read_bytes()
    found = read_metadata(path, raw)
    assert list(found) == [*metadata, "surrogate"] and found.pop("surrogate").startswith("a\ufffd")
    for key, value in metadata.items():
        assert type(found[key]) is type(value) and np.array_equal(found[key], value), key
        assert not isinstance(value, np.ndarray) or found[key].dtype == value.dtype
    path.write_bytes(raw + bytes(128 + 32))  # the data: 108 bytes and 20
    reader = GGUFReader(path)
    types = {name: [part.name for part in field.types] for name, field in reader.fields.items()}
    assert types["u32"] == ["UINT32"] and types["u64"] == ["UINT64"] and types["i32"] == ["INT32"]
    assert types["f32"] == ["FLOAT32"] and types["yes"] == ["BOOL"] and types["array.H"] == ["ARRAY", "UINT16"]
    assert [(t.name, t.tensor_type.name, t.data_offset - len(raw)) for t in reader.tensors] == [
        ("x", "Q4_0", 0),
        ("y", "F32", 128),
    ]


def test_packed_file_holds_the_metadata_and_tensors_of_the_gguf(folder, tmp_path):
    """Read by this project, and by the safetensors package."""
    make(folder, tmp_path / "out.gguf", "q4_1")
    make(folder, tmp_path / "out.safetensors", "q4_1")
    file, other = PackedFile(tmp_path / "out.safetensors"), GgufFile(tmp_path / "out.gguf")
    assert {n: (t.ggml_type, t.shape) for n, t in file.tensors.items()} == {
        n: (t.ggml_type, t.shape) for n, t in other.tensors.items()
    }
    assert all(np.array_equal(file.metadata[key], value) for key, value in other.metadata.items())
    arrays = load_file(tmp_path / "out.safetensors")
    assert arrays["blk.0.qkv.0.words"].shape == (128, 32) and arrays["blk.0.qkv.0.scales"].shape == (128, 2, 2)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_packed_file_gives_the_logits_of_the_gguf(gpu, tmp_path, arch):
    config = hf_config(model_type=arch)
    folder = hf_folder(tmp_path / "m", config, hf_weights(config, biases=True))
    for to in ("q4_0", "f16"):
        found = []
        for out in (tmp_path / f"{to}.gguf", tmp_path / f"{to}.safetensors"):
            make(folder, out, to)
            llama = Llama(out, device=gpu, context=64, precision="high", kv_type="f32")
            found.append(logits(llama.loaded.engine, IDS))
        assert np.array_equal(*found)
        wanted = Reference(GgufFile(tmp_path / f"{to}.gguf")).forward(IDS)[-1]
        assert_close(found[0], wanted, 1e-9, 1e-4, what=to)


def test_bf16_keeps_weights_beyond_f16(gpu, tmp_path):
    config = hf_config()
    weights = {name: values * 2**21 if "down_proj" in name else values for name, values in hf_weights(config).items()}
    folder = hf_folder(tmp_path / "m", config, weights)
    with pytest.raises(Unsupported, match="too large for F16") as error:
        make(folder, tmp_path / "f16.gguf", "f16")
    assert "--to bf16" in error.value.remedy
    found = []
    for out in (tmp_path / "m.gguf", tmp_path / "m.safetensors"):
        make(folder, out, "bf16")
        for backend in Backend:
            found.append(logits(load_one(gpu, out, backend=backend, kv_type=KvType.F32).engine, IDS))
    assert np.array_equal(found[0], found[2]) and np.array_equal(found[1], found[3])
    wanted = Reference(GgufFile(tmp_path / "m.gguf")).forward(IDS)[-1]
    for each in found[:2]:
        assert_close(each, wanted, 1e-9, 1e-4)


def test_packed_output_without_a_target_type_keeps_the_types(tmp_path):
    """OUT ends in .safetensors and no --to is given: nothing is rounded anew."""
    source = open_source(str(tiny_llama(tmp_path / "m.gguf", ggml_type="Q4_1")))
    types = plan(source, None, packed=True).ggml_types
    assert {types[name] for name, tensor in source.tensors.items() if len(tensor.shape) > 1} == {"Q4_1"}


def read_config(file: GgufFile | PackedFile) -> ModelConfig:
    return ModelConfig.from_gguf(file.metadata, file.tensors)


def load_all(file: PackedFile) -> dict[str, LoadedMatrix]:
    return {source.label: source.load() for source in file.matrix_sources(read_config(file))}


def assert_same_matrix(found: PackedMatrix, wanted: PackedMatrix) -> None:
    assert found.layout == wanted.layout
    assert np.array_equal(found.words, wanted.words) and np.array_equal(found.scales, wanted.scales)


def test_packed_files_with_odd_row_counts_are_refused(tmp_path):
    """Kernels compute rows in pairs: one must not have its rows in two shards."""
    path = tmp_path / "out.safetensors"
    make(tiny_llama(tmp_path / "m.gguf", ggml_type=lambda name: "Q8_0" if "attn_v" in name else "Q4_0"), path, "packed")
    file = PackedFile(path)
    sources = file.matrix_sources(read_config(file))
    assert any(len(source.rows) == 2 for source in sources)
    for shard, more in ((0, -1), (1, 1)):
        for array in ("words", "scales"):
            stored = file.arrays[f"blk.0.qkv.{shard}.{array}"]
            rows, *rest = stored.shape
            file.arrays[f"blk.0.qkv.{shard}.{array}"] = replace(stored, shape=(rows + more, *rest))
    with pytest.raises(BadFile, match=r"'blk.0.qkv' is missing or damaged"):
        file.matrix_sources(read_config(file))


def test_packed_file_stores_q6_k_in_6_bits(gpu, tmp_path):
    """Converted back to int8, as on a CPU adapter, matrices and logits are exactly those of the GGUF."""

    def ggml_type(name: str) -> str:
        return "Q6_K" if any(part in name for part in ("attn_v", "ffn_down", "token_embd")) else "Q4_K"

    paths = (
        tiny_llama(tmp_path / "m.gguf", ggml_type=ggml_type, dim=256, ffn=512, arch="qwen2"),
        tmp_path / "m.safetensors",
    )
    make(*paths, "packed")
    file, packed = GgufFile(paths[0]), load_all(PackedFile(paths[1]))
    storages = set()
    for pack in (repack_q6, repack):
        for source in matrix_sources(file.tensors, read_config(file), pack):
            for found, wanted in zip(packed[source.label].matrices, source.load().matrices, strict=True):
                storages.add(found.layout.storage)
                as_wanted = from_q6(found) if wanted.layout.storage is Storage.Q8 else found
                assert_same_matrix(as_wanted, wanted)
    assert storages == {Storage.Q4, Storage.Q6}
    models = [Llama(path, device=gpu, context=64, precision="high", kv_type="f32") for path in paths]
    assert np.array_equal(*(logits(llama.loaded.engine, IDS) for llama in models))


def test_damaged_packed_files_are_refused(folder, tmp_path):
    path = tmp_path / "out.safetensors"
    make(folder, path, "packed")
    arrays, _ = read_header(path)
    sound = path.read_bytes()
    offset = arrays["blk.1.ffn_down.0.scales"].offset
    path.write_bytes(sound[:offset] + b"\xff\xff" + sound[offset + 2 :])
    with pytest.raises(BadFile, match=r"ffn_down\.0\.scales"):
        load_all(PackedFile(path))
    for old, new in [
        (b"llamagpu packed 2", b"llamagpu packed 9"),
        (b"blk.1.ffn_down.0.words", b"blk.1.ffn_dowm.0.words"),
        (b'"shape": [64, 48]', b'"shape": [48, 64]'),
        (b"Q4_0", b"Q4_9"),
        (b"GGUF", b"GGML"),
    ]:
        assert old in sound
        path.write_bytes(sound.replace(old, new, 1))
        with pytest.raises(BadFile):
            load_all(PackedFile(path))
    write_safetensors(path, {"x": np.zeros(4, np.float32)})
    with pytest.raises(BadFile, match="not packed"):
        PackedFile(path)


def write_with_f32_scales(gguf: Path, path: Path) -> None:
    """A packed file with f32 scales: those of AWQ, and of K-quants in the first version of the format."""
    file = GgufFile(gguf)
    with path.open("wb") as out:
        writer = PackedWriter(out, file.metadata, {n: (t.ggml_type, t.shape) for n, t in file.tensors.items()})
        for name, tensor in file.tensors.items():
            if len(tensor.shape) == 1:
                writer.put(name, tensor.data.view(np.float32))
        for source in matrix_sources(file.tensors, read_config(file)):
            loaded = source.load()
            expanded = [
                PackedMatrix(replace(m.layout, scale_bits=32), m.words, expand_scales(m)) for m in loaded.matrices
            ]
            writer.put_matrix(source.label, LoadedMatrix(expanded, loaded.bias))
        writer.finish()


@pytest.mark.parametrize("precision", ["high", "fast"])
@pytest.mark.parametrize("scales", ["Q4_K", "Q6_K", "f32"])
def test_memory_plan_of_a_packed_file_is_what_is_allocated(gpu, tmp_path, monkeypatch, scales, precision):
    """On buffers, as on a GPU, whatever the adapter."""
    gguf = tiny_llama(tmp_path / "m.gguf", ggml_type="Q4_K" if scales == "f32" else scales, dim=256, ffn=512)
    path = tmp_path / "m.safetensors"
    if scales == "f32":
        write_with_f32_scales(gguf, path)
    else:
        make(gguf, path, "packed")
    monkeypatch.setattr(gpu, "caps", replace(gpu.caps, cpu=False))
    before = gpu.allocated_bytes
    llama = Llama(path, device=gpu, context=64, precision=precision)
    assert llama.memory.weights > 0
    assert abs(gpu.allocated_bytes - before - llama.memory.total) < 1024


@pytest.mark.parametrize("ggml_type", ["Q4_K", "Q6_K"])
def test_damaged_super_block_scales_are_refused(tmp_path, ggml_type):
    """A super-block is two f16, which must be finite, and sub-scales, which may have any value."""
    path = tmp_path / "m.safetensors"
    make(tiny_llama(tmp_path / "m.gguf", ggml_type=ggml_type, dim=256, ffn=512), path, "packed")
    scales, sound = PackedFile(path).arrays["blk.1.ffn_down.0.scales"], path.read_bytes()
    assert scales.shape == (256, 2, 20) and scales.dtype == {"Q4_K": "U8", "Q6_K": "I8"}[ggml_type]
    second = scales.offset + 20

    def damage(at: int) -> PackedFile:
        path.write_bytes(sound[:at] + b"\xff\xff" + sound[at + 2 :])
        return PackedFile(path)

    with pytest.raises(BadFile, match=r"ffn_down\.0\.scales holds NaN"):
        load_all(damage(second))
    load_all(damage(second + 4))
    for shape in (b"[256, 4, 10]", b"[256, 1, 40]", b"[512, 1, 20]", b"[256, 10, 4]", b"[16, 1, 640]"):
        path.write_bytes(sound.replace(b"[256, 2, 20]", shape))
        with pytest.raises(BadFile, match=r"scales' is missing or damaged"):
            load_all(PackedFile(path))


# Errors and interruptions


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_nan_and_huge_weights_are_refused(tmp_path, suffix):
    out = tmp_path / "out" / f"x.{suffix}"
    out.parent.mkdir()
    config = hf_config()
    for value, error, message in ((np.nan, BadFile, "value 130 is NaN"), (1e9, Unsupported, "1e+09")):
        weights = hf_weights(config)
        weights["model.layers.1.mlp.up_proj.weight"][2, 2] = value
        folder = hf_folder(tmp_path / "m", config, weights)
        with pytest.raises(error) as caught:
            make(folder, out, "q4_0")
        assert "blk.1.ffn_up.weight" in caught.value.cause and message in caught.value.cause
        assert files_in(out.parent) == []


def test_interrupted_run_leaves_the_old_file(folder, tmp_path):
    out = tmp_path / "x.gguf"
    out.write_bytes(b"before")
    (tmp_path / ".x.gguf.part").write_bytes(b"of a run that was killed")

    def stop(name: str, done: int, total: int) -> None:
        assert files_in(tmp_path) == [".x.gguf.part", "x.gguf"] and 0 < done <= total
        if "blk.1" in name:
            raise KeyboardInterrupt

    for to in ("q4_0", "f16"):
        with pytest.raises(KeyboardInterrupt):
            make(folder, out, to, progress=stop)
        assert files_in(tmp_path) == ["x.gguf"] and out.read_bytes() == b"before"
    make(folder, out, "q4_0")
    assert files_in(tmp_path) == ["x.gguf"] and out.read_bytes()[:4] == b"GGUF"


KILLED = """
import os, signal, sys
from pathlib import Path
from llamagpu.convert.convert import convert, open_source, original_plan, plan, temporary_model

def stop(name, done, total):
    if "blk.1" in name:
        os.kill(os.getpid(), signal.SIGKILL)

source, out = open_source(sys.argv[1]), Path(sys.argv[2])
with temporary_model(out, "original", source, original_plan(source)):
    if sys.argv[3] == "plain":
        with temporary_model(out, "plain", source, original_plan(source), progress=stop):
            pass
    convert(source, out, plan(source, "q4_0"), progress=stop)
"""


@pytest.mark.parametrize("when", ["result", "plain"])
def test_files_of_a_killed_run_are_hidden_and_the_next_run_deletes_them(folder, tmp_path, when):
    out = tmp_path / "x.gguf"
    run = subprocess.run([sys.executable, "-c", KILLED, folder, out, when], timeout=100)
    assert run.returncode == -signal.SIGKILL
    part = ".x.gguf.part" if when == "result" else ".x.gguf.plain.gguf.part"
    assert files_in(tmp_path) == [".x.gguf.original.gguf", part]
    again = command(folder, out)
    assert again.returncode == 0, again.stderr
    assert files_in(tmp_path) == ["x.gguf"]
    make(folder, tmp_path / "whole.gguf", "q4_0")
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_of_two_runs_for_one_file_the_later_one_wins(folder, tmp_path):
    out = tmp_path / "x.gguf"

    def other(name: str, done: int, total: int) -> None:
        if name == "output.weight":
            make(folder, out, "q4_0")

    with pytest.raises(LlamaGpuError, match="another run"):
        make(folder, out, "q8_0", progress=other)
    assert files_in(tmp_path) == ["x.gguf"] and GgufFile(out).metadata["general.file_type"] == 2


def test_full_disk_leaves_no_file(folder, tmp_path, monkeypatch):
    out = tmp_path / "x.gguf"
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(LlamaGpuError, match=r"no space left.*0 MB") as caught:
            make(folder, out, "q4_0")
    assert caught.value.exit_code == 1 and files_in(tmp_path) == []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))  # fails in the middle of writing
    try:
        with pytest.raises(LlamaGpuError, match="cannot write"):
            make(folder, out, "f16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files_in(tmp_path) == []
    with pytest.raises(LlamaGpuError, match="cannot write"):
        make(folder, tmp_path / "nowhere" / "x.gguf", "q4_0")


MEASURE = """
import sys, time, tracemalloc
from pathlib import Path
from llamagpu.convert.convert import convert, open_source, plan
source = open_source(sys.argv[1])
def used():
    start = time.process_time()
    convert(source, Path(sys.argv[2]), plan(source, "q4_0"), threads=1)
    return time.process_time() - start
fastest = min(used() for _ in range(3))  # others may share the core
tracemalloc.start()
convert(source, Path(sys.argv[3]), plan(source, "q4_0"), threads=1)
print(tracemalloc.get_traced_memory()[1], fastest)
"""


def test_conversion_streams_and_is_fast_enough(tmp_path):
    """Converting 60 MB of f16 holds a few of them in memory, and a core converts more than 50 MB/s."""
    config = hf_config(hidden_size=1024, intermediate_size=4096, num_attention_heads=8, vocab_size=1024)
    config |= {"num_hidden_layers": 2, "tie_word_embeddings": True}
    weights = {k: v.astype(np.float16) for k, v in hf_weights(config).items()}
    folder = hf_folder(tmp_path / "m", config, weights)
    size = sum(array.nbytes for array in weights.values())
    command = [sys.executable, "-c", MEASURE, folder, tmp_path / "x.gguf", tmp_path / "y.gguf"]
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    memory, seconds = map(float, run.stdout.split())
    assert 0 < memory < 16 << 20, run.stderr  # measured 8 MiB
    assert size / seconds > 50e6  # measured 210 MB/s on a quiet core; half of that when others share its caches


# The command


def command(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess:
    script = [sys.executable, ROOT / "scripts" / "convert.py", *args]
    return subprocess.run(list(map(str, script)), cwd=cwd, capture_output=True, text=True, timeout=100)


def test_command_writes_a_file_and_a_report(folder, tmp_path):
    run = command(folder, "--to", "q4_0", "--quality", "best", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert files_in(tmp_path) == ["model-q4_0.gguf"] and "bits per weight" in run.stdout
    assert "most in" in run.stdout and "Q4_0 blk." in run.stdout
    again = command(folder, "--to", "q4_0", cwd=tmp_path)
    assert again.returncode == 1 and "exists already" in again.stderr and "--force" in again.stderr
    run = command(folder, "model-q4_0.gguf", "--force", "--json", cwd=tmp_path)
    found = json.loads(run.stdout)
    assert found["bytes_after"] == (tmp_path / "model-q4_0.gguf").stat().st_size and found["nmse"] > 0
    assert {t["ggml_type"] for t in found["tensors"]} == {"Q4_0", "Q8_0", "F32"}
    assert command(folder, "x.gguf", "--to", "packed", cwd=tmp_path).returncode == 2
    assert command(folder, "--quality", "fast", "--calibrate", __file__, cwd=tmp_path).returncode == 2
    assert command(tmp_path / "nothing", cwd=tmp_path).returncode == 1
    assert files_in(tmp_path) == ["model-q4_0.gguf"]


def test_command_shows_progress_on_a_terminal_and_restores_the_cursor(folder, tmp_path):
    controller, terminal = pty.openpty()
    output = bytearray()

    def collect() -> None:
        while data := read_terminal(controller):
            output.extend(data)

    reader = threading.Thread(target=collect)
    reader.start()
    script = [sys.executable, ROOT / "scripts" / "convert.py", folder, tmp_path / "x.gguf"]
    env = os.environ | {"TERM": "xterm"}
    run = subprocess.run(list(map(str, script)), env=env, stdout=subprocess.PIPE, stderr=terminal, timeout=100)
    os.close(terminal)
    reader.join(timeout=100)
    os.close(controller)
    assert run.returncode == 0, output
    assert b"output_norm.weight" in output and b"kB" in output
    assert output.rfind(b"\x1b[?25h") > output.find(b"\x1b[?25l") >= 0  # shown again after it was hidden


def read_terminal(controller: int) -> bytes:
    try:
        return os.read(controller, 1 << 16)
    except OSError:  # EIO: the other end is closed
        return b""


def test_command_refuses_what_it_cannot_do(folder, tmp_path):
    def refused(code: int, *args: object) -> str:
        run = command(*args, cwd=tmp_path)
        assert run.returncode == code and run.stderr.count("error:") == 1, run.stderr
        return run.stderr

    assert "name it x.gguf\n" in refused(2, folder, "x")
    assert "name it x.gguf\n" in refused(2, folder, "x.bin", "--to", "q8_0")
    shard = folder / "model.safetensors"
    before = shard.read_bytes()
    assert "is the source" in refused(2, folder, shard, "--force") and shard.read_bytes() == before
    make(folder, tmp_path / "x.safetensors", None)
    assert "packed already" in refused(4, tmp_path / "x.safetensors", "y.gguf")
    (tmp_path / "text").write_text("too short")
    short = refused(1, folder, "y.gguf", "--eval", "text")
    assert "two chunks of 256" in short and "-c" not in short
    assert "give a Hugging Face folder, a GGUF file," in refused(1, "nothing/x.gguf")
    offline = refused(1, "hf:nobody/nothing", "--offline")
    assert "as SOURCE" in offline and "-m" not in offline.split()
    assert "two chunks of 256" in refused(1, folder, "y.gguf", "--calibrate", "text")
    assert files_in(tmp_path) == ["text", "x.safetensors"]


@pytest.mark.parametrize("error", [DoesNotFit("too large", "use -c 64 or less"), DeviceLost("gone", "a smaller -c")])
def test_remedies_are_those_of_convert(error):
    with pytest.raises(type(error)) as raised, own_remedies():
        raise error
    assert "--calibrate" in raised.value.remedy and "-c " not in raised.value.remedy
    assert raised.value.__notes__ == [raised.value.remedy]  # what a traceback shows


@pytest.mark.parametrize(
    ("before", "to", "warned"),
    [
        ("Q4_1", "q4_0", True),
        ("Q4_0", "q4_1", True),
        ("Q6_K", "q4_0", True),
        ("Q4_0", "q4_0", False),
        ("Q8_0", "q4_0", False),
        ("F16", "q4_0", False),
        ("Q4_1", "q8_0", False),
        ("Q4_1", "packed", False),
    ],
)
def test_rounding_again_to_four_bits_gets_a_warning(tmp_path, before, to, warned):
    source = open_source(str(tiny_llama(tmp_path / "m.gguf", dim=256, ffn=256, ggml_type=before)))
    planned = plan(source, to)
    assert len(planned.warnings) == warned
    if warned:
        assert f"are {before} already: rounding them again to {to.upper()}" in planned.warnings[0]


def test_the_warning_comes_before_the_work_and_in_the_report(tmp_path):
    path = tiny_llama(tmp_path / "m.gguf", ggml_type="Q4_1")
    run = command(path, "out.gguf", "--json", cwd=tmp_path)
    assert run.returncode == 0 and "warning: " in run.stderr and "rounding them again" in run.stderr
    assert "rounding them again" in json.loads(run.stdout)["notes"][0]
    assert f"converting m ({path.stat().st_size / 1e6:,.0f} MB) to " in run.stderr
    assert json.loads(run.stdout)["bytes_before"] == path.stat().st_size
    for quiet in ([], ["-q"]):  # as text once, on stderr or in the report
        run = command(path, "out.gguf", "--force", *quiet, cwd=tmp_path)
        assert ("warning: " in run.stderr) == (not quiet) and (run.stdout + run.stderr).count(
            "rounding them again"
        ) == 1


def test_command_calibrates_and_evaluates(gpu, tmp_path):
    model = tiny_llama(tmp_path / "m.gguf", context=512)
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a little girl named Lily. She loved to play outside. " * 60)
    run = command(model, tmp_path / "x.gguf", "--calibrate", text, "--eval", text, "--chunks", 2, "--json")
    assert run.returncode == 0, run.stderr
    quality = json.loads(run.stdout)["quality"]
    assert quality["before"]["divergence"] == 0 and quality["before"]["same_top"] == 1
    assert 0 < quality["after"]["divergence"] < 0.1 and 0 < quality["plain"]["divergence"] < 0.1
    for name, path in (("before", model), ("after", tmp_path / "x.gguf")):
        assert quality[name]["perplexity"] == pytest.approx(perplexity(path, text.read_text()), rel=0.01)
    assert files_in(tmp_path) == ["m.gguf", "text", "x.gguf"]


def perplexity(path: Path, text: str) -> float:
    """The reference's values for the second halves of two chunks of 512."""
    file = GgufFile(path)
    reference, ids = Reference(file), Tokenizer.from_gguf(file.metadata).encode(text, special=False)
    losses = []
    for start in (0, 512):
        chunk = [1, *ids[start + 1 : start + 512]]
        reference.clear()
        scores = reference.forward(chunk)[256:-1]
        scores -= scores.max(axis=1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        losses.append(-logs[np.arange(255), chunk[257:]])
    return float(np.exp(np.mean(losses)))


@pytest.mark.parametrize("backend", ["adapter", "buffers"])
def test_calibration_gives_the_mean_squares_of_the_reference(gpu, tmp_path, monkeypatch, backend):
    """On the backend that the adapter gets, and on buffers."""
    from llamagpu.convert.calibrate import calibrate

    if backend == "buffers":
        monkeypatch.setattr(gpu, "caps", replace(gpu.caps, cpu=False))
    path = tiny_llama(tmp_path / "m.gguf")
    text = "once upon a time there was a dog. " * 6
    found = calibrate(path, text, lambda done, total: None, gpu, context=32)
    file = GgufFile(path)
    reference = Reference(file)
    sums: dict[str, np.ndarray] = {}
    linear = reference.linear

    def traced(x: np.ndarray, name: str) -> np.ndarray:
        sums[name] = sums.get(name, 0) + (x**2).sum(axis=0)
        return linear(x, name)

    reference.linear = traced
    chunks = chunks_of(Tokenizer.from_gguf(file.metadata), text, 32)
    for ids in chunks:
        reference.clear()
        reference.forward(ids)
    assert set(found) == {f"{name}.weight" for name in sums if name.startswith("blk")}
    for name, mean in found.items():
        wanted = sums[name.removesuffix(".weight")] / (32 * len(chunks))
        assert_close(mean, np.maximum(wanted, 1e-3 * wanted.mean()), 1e-6, 1e-3, name)


@pytest.mark.slow
def test_search_beats_plain_rounding_on_held_out_text(gpu, tmp_path):
    """SmolLM2 from f16 to Q4_0, calibrated on one section of the text and measured on another."""
    from llamagpu.convert.calibrate import calibrate, compare

    model, text = default_model(), english_text()
    f16, nearest, best, calibrated = (tmp_path / f"{name}.gguf" for name in ("f16", "plain", "best", "calibrated"))
    make(model, f16, "f16")
    importance = calibrate(f16, text[300_000:306_000], lambda done, total: None, gpu)
    for out, options in ((nearest, {}), (best, {"best": True}), (calibrated, {"best": True, "importance": importance})):
        make(f16, out, "q4_0", **options)
    found = compare([f16, nearest, best, calibrated], text, lambda done, total: None, context=256, most=4)
    print([(round(q.perplexity, 3), round(q.divergence, 4)) for q in found])
    assert found[0].perplexity < found[3].perplexity < found[2].perplexity < found[1].perplexity
    assert found[3].divergence < 0.75 * found[1].divergence
