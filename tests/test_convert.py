"""Conversion: the rounding, the files written, what happens when something goes wrong, and what it costs."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, shared_data
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_builder import tiny_llama
from hf_builder import hf_config, hf_folder, hf_weights, write_safetensors
from reference import Reference, assert_close

from llamagpu.errors import BadFile, LlamaGpuError, Unsupported
from llamagpu.files.config import LlamaConfig
from llamagpu.files.gguf_file import GgufFile
from llamagpu.files.packed_file import PackedFile, PackedWriter
from llamagpu.files.quantise import quantise, weights_of
from llamagpu.files.repack import plain_scales, repack
from llamagpu.files.tokenizer import Tokenizer
from llamagpu.tools.convert.convert import convert, open_source, plan


def sample(rows: int = 64, k: int = 256) -> np.ndarray:
    """Weights with outliers, and groups of every awkward kind in front."""
    x = (np.random.default_rng(5).standard_t(4, (rows, k)) * 0.05).astype(np.float32)
    x[0, :32], x[1, :32], x[2, :32] = 0, 0.5, -1e-9
    x[3, :32] = np.tile([2.0, -2.0], 16)  # two of the largest magnitude: the first counts
    return x


def gguf(x: np.ndarray, kind: str) -> np.ndarray:
    return quantize(x, GGMLQuantizationType[kind]).view(np.uint8)


def back(blocks: np.ndarray, kind: str) -> np.ndarray:
    return dequantize(blocks, GGMLQuantizationType[kind])


# Rounding


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "F32"])
def test_plain_rounding_is_ggufs(kind):
    x = sample(256, 1024)
    blocks, error = quantise(kind, x)
    assert np.array_equal(blocks, gguf(x, kind).reshape(len(x), -1))
    assert error == pytest.approx(((back(blocks, kind).astype(np.float64) - x) ** 2).sum(), rel=1e-4)


def test_q6_k():
    x = sample()
    blocks, error = quantise("Q6_K", x)
    y = back(blocks, "Q6_K")
    assert error == pytest.approx(((y.astype(np.float64) - x) ** 2).sum(), rel=1e-3)
    assert ((y - x)[4:] ** 2).sum() < 1e-3 * (x[4:] ** 2).sum()  # 6 bits: plain Q4_0 has 8e-3
    assert np.array_equal(y[0, :32], x[0, :32])


@pytest.mark.parametrize(("kind", "gain"), [("Q4_0", 0.9), ("Q4_1", 0.85)])
@pytest.mark.parametrize("calibrated", [False, True])
def test_search_is_never_worse(kind, gain, calibrated):
    x = sample()
    importance = np.random.default_rng(6).uniform(0.01, 10, x.shape[1]).astype(np.float32) if calibrated else None
    weights = weights_of(x.reshape(-1, 32), importance)
    errors = []
    for best in (False, True):
        blocks, _ = quantise(kind, x, importance, best)
        errors.append((weights * (back(blocks, kind) - x).reshape(-1, 32) ** 2).sum(axis=1))
    assert (errors[1] <= errors[0] * (1 + 1e-5) + 1e-20).all()
    assert errors[1].sum() < gain * errors[0].sum()


def test_search_sees_what_matters():
    """The same weights rounded for two texts: each rounding is the better one for its own."""
    x = sample()
    first, second = (np.where(np.arange(256) % 2 == i, 1, 0.01).astype(np.float32) for i in (0, 1))
    ys = [back(quantise("Q4_0", x, importance, best=True)[0], "Q4_0") for importance in (first, second)]
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
def test_whole_file_equals_gguf(folder, tmp_path, to):
    report = make(folder, tmp_path / "out.gguf", to)
    make(folder, tmp_path / "f16.gguf", "f16")
    file, before = GgufFile(tmp_path / "out.gguf"), GgufFile(tmp_path / "f16.gguf")
    errors = {loss.name: loss.nmse for loss in report.tensors}
    for name, tensor in before.tensors.items():
        found = file.tensors[name]
        assert found.kind == ("F32" if len(tensor.shape) == 1 else "Q8_0" if "blk" not in name else to.upper())
        x = back(tensor.data, tensor.kind).reshape(tensor.shape)
        assert np.array_equal(found.data, gguf(x, found.kind).reshape(-1)), name
        y = back(found.data, found.kind).reshape(tensor.shape)
        assert errors[name] == pytest.approx(((y - x) ** 2).sum() / (x**2).sum(), rel=1e-3, abs=1e-12)
    assert report.bytes_after == (tmp_path / "out.gguf").stat().st_size
    assert report.bits == 8 * report.bytes_after / sum(np.prod(t.shape) for t in before.tensors.values())


def test_gguf_to_gguf(tmp_path):
    """Split and mixed: what is of the wanted type is copied, the output stays, the rest is rounded anew."""
    kinds = {"attn_q": "Q4_0", "token_embd": "Q6_K", "ffn_up": "Q4_K", "ffn_down": "BF16"}

    def kind(name: str) -> str:
        return next((k for part, k in kinds.items() if part in name), "F16")

    path = tiny_llama(tmp_path / "m.gguf", kind=kind, dim=256, ffn=256, heads=4, n_parts=3)
    before = GgufFile(path)
    make(path, tmp_path / "out.gguf", "q4_0")
    after = GgufFile(tmp_path / "out.gguf")
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "output_norm.weight"):
        assert after.tensors[name].kind == before.tensors[name].kind
        assert np.array_equal(after.tensors[name].data, before.tensors[name].data)
    for part in ("ffn_up", "ffn_down", "attn_v"):
        raw, found = before.tensors[f"blk.1.{part}.weight"], after.tensors[f"blk.1.{part}.weight"]
        assert np.array_equal(found.data, gguf(back(raw.data, raw.kind).reshape(raw.shape), "Q4_0").reshape(-1))
    assert "split.count" not in after.metadata and after.metadata["general.file_type"] == 2
    same = set(before.metadata) - {"general.file_type"} - {k for k in before.metadata if k.startswith("split.")}
    assert all(np.array_equal(after.metadata[key], before.metadata[key]) for key in same)


def test_rows_that_do_not_divide(tmp_path):
    report = make(shared_data("tiny/stories260K-f32.gguf"), tmp_path / "out.gguf", "q4_0")
    file = GgufFile(tmp_path / "out.gguf")
    assert file.tensors["blk.0.ffn_down.weight"].kind == "F16"  # 172 columns
    assert file.tensors["blk.0.ffn_up.weight"].kind == "Q4_0"
    assert "5 matrices" in report.notes[0] and "ffn_down" in report.notes[0]
    source = open_source(str(shared_data("tiny/stories260K-f32.gguf")))
    assert "token_embd.weight is Q8_0" in plan(source, "q4_0", "q6_k").notes[1]
    assert len(plan(source, "q8_0", "q6_k").notes) == 1


def test_packed_reads_back(folder, tmp_path):
    """Through this project's reader, and through the format's own package where it is there."""
    make(folder, tmp_path / "out.gguf", "q4_1")
    make(folder, tmp_path / "out.safetensors", "q4_1")
    file, other = PackedFile(tmp_path / "out.safetensors"), GgufFile(tmp_path / "out.gguf")
    assert {n: (t.kind, t.shape) for n, t in file.tensors.items()} == {
        n: (t.kind, t.shape) for n, t in other.tensors.items()
    }
    assert all(np.array_equal(file.metadata[key], value) for key, value in other.metadata.items())
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = safetensors.load_file(tmp_path / "out.safetensors")
    assert arrays["blk.0.qkv.0.words"].shape == (128, 32) and arrays["blk.0.qkv.0.scales"].shape == (128, 2, 2)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_packed_runs_as_gguf(gpu, tmp_path, arch):
    from llamagpu.engine.generate import Llama

    config = hf_config(model_type=arch)
    folder = hf_folder(tmp_path / "m", config, hf_weights(config, biases=True))
    for to, tolerance in (("q4_0", (1e-9, 1e-4)), ("f16", (1e-9, 1e-4))):
        found = []
        for out in (tmp_path / f"{to}.gguf", tmp_path / f"{to}.safetensors"):
            make(folder, out, to)
            llama = Llama(out, device=gpu, context=64, precision="high", kv_type="f32")
            llama.model.prefill([1, 70, 5, 280, 33])
            found.append(llama.model.read_logits())
        assert np.array_equal(*found)
        wanted = Reference(GgufFile(tmp_path / f"{to}.gguf")).forward([1, 70, 5, 280, 33])[-1]
        assert_close(found[0], wanted, *tolerance, what=to)


def test_packed_by_its_name_keeps_the_types(tmp_path):
    """OUT ends in .safetensors and no --to is given: nothing is rounded anew."""
    source = open_source(str(tiny_llama(tmp_path / "m.gguf", kind="Q4_1")))
    kinds = plan(source, None, packed=True).kinds
    assert {kinds[name] for name, tensor in source.tensors.items() if len(tensor.shape) > 1} == {"Q4_1"}


def test_packed_q6_k(gpu, tmp_path):
    """6 bits in the file, as a GPU has them, and int8 again for a CPU adapter: exactly what the GGUF gives."""
    from llamagpu.engine.generate import Llama
    from llamagpu.engine.weights import matrix_jobs, repack_small

    def kind(name: str) -> str:
        return "Q6_K" if any(part in name for part in ("attn_v", "ffn_down", "token_embd")) else "Q4_K"

    paths = tiny_llama(tmp_path / "m.gguf", kind=kind, dim=256, ffn=512, arch="qwen2"), tmp_path / "m.safetensors"
    make(paths[0], paths[1], "packed")
    files = GgufFile(paths[0]), PackedFile(paths[1])
    config = LlamaConfig.from_gguf(files[0].metadata, files[0].tensors)
    for pack, forms in ((repack_small, {"q4", "q6"}), (repack, {"q4", "q8"})):
        found = [[job() for _, job in matrix_jobs(file.tensors, config, pack)] for file in files]
        for (parts, _), (others, _) in zip(*found, strict=True):
            for part, other in zip(parts, others, strict=True):
                assert part.form == other.form and part.form in forms and part.group == other.group
                assert np.array_equal(part.words, other.words) and np.array_equal(part.scales, other.scales)
    logits = []
    for path in paths:
        llama = Llama(path, device=gpu, context=64, precision="high", kv_type="f32")
        llama.model.prefill([1, 70, 5, 280, 33])
        logits.append(llama.model.read_logits())
    assert np.array_equal(*logits)


def test_damaged_packed_files(folder, tmp_path):
    path = tmp_path / "out.safetensors"
    make(folder, path, "packed")
    from llamagpu.files.safetensors_file import read_header

    arrays, _ = read_header(path)
    whole = path.read_bytes()
    place = arrays["blk.1.ffn_down.0.scales"].offset
    path.write_bytes(whole[:place] + b"\xff\xff" + whole[place + 2 :])
    file = PackedFile(path)
    config = LlamaConfig.from_gguf(file.metadata, file.tensors)
    with pytest.raises(BadFile, match=r"ffn_down\.0\.scales"):
        [job() for _, job in file.jobs(config)]
    for old, new in [
        (b"llamagpu packed 2", b"llamagpu packed 9"), (b"blk.1.ffn_down.0.words", b"blk.1.ffn_dowm.0.words"),
        (b'"shape": [64, 48]', b'"shape": [48, 64]'), (b"Q4_0", b"Q4_9"), (b"GGUF", b"GGML"),
    ]:  # fmt: skip
        assert old in whole
        path.write_bytes(whole.replace(old, new, 1))
        with pytest.raises(BadFile):
            [job() for _, job in PackedFile(path).jobs(config)]
    write_safetensors(path, {"x": np.zeros(4, np.float32)})
    with pytest.raises(BadFile, match="not packed"):
        PackedFile(path)


@pytest.mark.parametrize("fast", [False, True], ids=["high", "fast"])
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "f32 scales"])
def test_memory_of_a_packed_file_is_that_of_its_arrays(gpu, tmp_path, monkeypatch, kind, fast):
    """Also of one whose scales are f32, as older ones of K-quants have them, and those made of AWQ."""
    from llamagpu.engine.generate import Llama
    from llamagpu.engine.weights import matrix_jobs, repack_small

    gguf = tiny_llama(tmp_path / "m.gguf", kind="Q4_K" if kind == "f32 scales" else kind, dim=256, ffn=512)
    path = tmp_path / "m.safetensors"
    make(gguf, path, "packed")
    if kind == "f32 scales":
        file, kinds = GgufFile(gguf), PackedFile(path).tensors
        with path.open("wb") as out:
            writer = PackedWriter(out, file.metadata, {n: (t.kind, t.shape) for n, t in kinds.items()})
            for name, tensor in file.tensors.items():
                if len(tensor.shape) == 1:
                    writer.put(name, tensor.data.view(np.float32))
            config = LlamaConfig.from_gguf(file.metadata, file.tensors)
            for label, job in matrix_jobs(file.tensors, config, repack_small):
                parts, bias = job()
                writer.put_matrix(label, ([replace(p, scales=plain_scales(p)) for p in parts], bias))
            writer.finish()
    monkeypatch.setattr(gpu, "caps", replace(gpu.caps, cpu=False))
    before = gpu.allocated_bytes
    llama = Llama(path, device=gpu, context=64, precision="fast" if fast else "high")
    assert 0.97 * (gpu.allocated_bytes - before) <= llama.memory.total <= 1.05 * (gpu.allocated_bytes - before)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_damaged_steps_of_packed_files(tmp_path, kind):
    """Scales of K-quants: bytes of records, of which the first four are two f16."""
    path = tmp_path / "m.safetensors"
    make(tiny_llama(tmp_path / "m.gguf", kind=kind, dim=256, ffn=512), path, "packed")
    file, whole = PackedFile(path), path.read_bytes()
    config, scales = LlamaConfig.from_gguf(file.metadata, file.tensors), file.arrays["blk.1.ffn_down.0.scales"]
    assert scales.shape == (256, 2, 20) and scales.dtype == {"Q4_K": "U8", "Q6_K": "I8"}[kind]
    for at, fine in ((scales.offset + 20, False), (scales.offset + 24, True)):  # a step, a multiple
        path.write_bytes(whole[:at] + b"\xff\xff" + whole[at + 2 :])
        if fine:
            [job() for _, job in PackedFile(path).jobs(config)]
            continue
        with pytest.raises(BadFile, match=r"ffn_down\.0\.scales holds NaN"):
            [job() for _, job in PackedFile(path).jobs(config)]
    for shape in (b"[256, 4, 10]", b"[256, 1, 40]", b"[512, 1, 20]", b"[256, 10, 4]", b"[16, 1, 640]"):
        path.write_bytes(whole.replace(b"[256, 2, 20]", shape))
        with pytest.raises(BadFile, match=r"scales' is missing or damaged"):
            [job() for _, job in PackedFile(path).jobs(config)]


# When something goes wrong


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_nan_and_huge_weights(tmp_path, suffix):
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
        assert left(out.parent) == []


def test_interrupted_and_killed(folder, tmp_path):
    out = tmp_path / "x.gguf"
    out.write_bytes(b"before")
    (tmp_path / ".x.gguf.part").write_bytes(b"of a run that was killed")

    def stop(name: str, done: int, total: int) -> None:
        assert left(tmp_path) == [".x.gguf.part", "x.gguf"] and 0 < done <= total
        if "blk.1" in name:
            raise KeyboardInterrupt

    for to in ("q4_0", "f16"):
        with pytest.raises(KeyboardInterrupt):
            make(folder, out, to, progress=stop)
        assert left(tmp_path) == ["x.gguf"] and out.read_bytes() == b"before"
    make(folder, out, "q4_0")
    assert left(tmp_path) == ["x.gguf"] and out.read_bytes()[:4] == b"GGUF"


KILLED = """
import os, signal, sys
from pathlib import Path
from llamagpu.tools.convert.convert import beside, convert, open_source, original_plan, plan

def stop(name, done, total):
    if "blk.1" in name:
        os.kill(os.getpid(), signal.SIGKILL)

source, out = open_source(sys.argv[1]), Path(sys.argv[2])
with beside(out, "original", source, original_plan(source)):
    if sys.argv[3] == "original":
        with beside(out, "plain", source, original_plan(source), progress=stop):
            pass
    convert(source, out, plan(source, "q4_0"), progress=stop)
"""


@pytest.mark.parametrize("when", ["result", "original"])
def test_killed(folder, tmp_path, when):
    """What SIGKILL leaves behind is no model's name, and the next run removes it."""
    out = tmp_path / "x.gguf"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", KILLED, folder, out, when], env=env, timeout=100)
    assert run.returncode == -signal.SIGKILL
    part = ".x.gguf.part" if when == "result" else ".x.gguf.plain.gguf.part"
    assert left(tmp_path) == [".x.gguf.original.gguf", part]
    again = command(folder, out)
    assert again.returncode == 0, again.stderr
    assert left(tmp_path) == ["x.gguf"]
    make(folder, tmp_path / "whole.gguf", "q4_0")
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_two_runs_for_one_file(folder, tmp_path):
    out = tmp_path / "x.gguf"

    def other(name: str, done: int, total: int) -> None:
        if name == "output.weight":
            make(folder, out, "q4_0")

    with pytest.raises(LlamaGpuError, match="another run"):
        make(folder, out, "q8_0", progress=other)
    assert left(tmp_path) == ["x.gguf"] and GgufFile(out).metadata["general.file_type"] == 2


def test_full_disk(folder, tmp_path, monkeypatch):
    out = tmp_path / "x.gguf"
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(LlamaGpuError, match=r"no space left.*0 MB") as caught:
            make(folder, out, "q4_0")
    assert caught.value.exit_code == 1 and left(tmp_path) == []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))  # fails in the middle of writing
    try:
        with pytest.raises(LlamaGpuError, match="cannot write"):
            make(folder, out, "f16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert left(tmp_path) == []
    with pytest.raises(LlamaGpuError, match="cannot write"):
        make(folder, tmp_path / "nowhere" / "x.gguf", "q4_0")


MEASURE = """
import sys, time, tracemalloc
from pathlib import Path
from llamagpu.tools.convert.convert import convert, open_source, plan
source = open_source(sys.argv[1])
start = time.process_time()
convert(source, Path(sys.argv[2]), plan(source, "q4_0"), threads=1)
used = time.process_time() - start
tracemalloc.start()
convert(source, Path(sys.argv[3]), plan(source, "q4_0"), threads=1)
print(tracemalloc.get_traced_memory()[1], used)
"""


def test_memory_and_speed(tmp_path):
    """60 MB of f16: a few of them in memory at a time, and more than 100 MB in a second of a core."""
    config = hf_config(hidden_size=1024, intermediate_size=4096, num_attention_heads=8, vocab_size=1024)
    config |= {"num_hidden_layers": 2, "tie_word_embeddings": True}
    weights = {k: v.astype(np.float16) for k, v in hf_weights(config).items()}
    folder = hf_folder(tmp_path / "m", config, weights)
    size = sum(array.nbytes for array in weights.values())
    command = [sys.executable, "-c", MEASURE, folder, tmp_path / "x.gguf", tmp_path / "y.gguf"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    memory, seconds = map(float, run.stdout.split())
    assert 0 < memory < 16 << 20, run.stderr  # measured 8 MiB
    assert size / seconds > 50e6  # measured 210 MB/s on a quiet core; half of that when others share its caches


# The command


def command(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess:
    script = [sys.executable, ROOT / "scripts" / "convert.py", *args]
    return subprocess.run(list(map(str, script)), cwd=cwd, capture_output=True, text=True, timeout=100)


def test_command(folder, tmp_path):
    run = command(folder, "--to", "q4_0", "--quality", "best", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert left(tmp_path) == ["model-q4_0.gguf"] and "bits per weight" in run.stdout
    assert "most in" in run.stdout and "Q4_0 blk." in run.stdout
    again = command(folder, "--to", "q4_0", cwd=tmp_path)
    assert again.returncode == 1 and "exists already" in again.stderr and "--force" in again.stderr
    run = command(folder, "model-q4_0.gguf", "--force", "--json", cwd=tmp_path)
    found = json.loads(run.stdout)
    assert found["bytes_after"] == (tmp_path / "model-q4_0.gguf").stat().st_size and found["nmse"] > 0
    assert {t["kind"] for t in found["tensors"]} == {"Q4_0", "Q8_0", "F32"}
    assert command(folder, "x.gguf", "--to", "packed", cwd=tmp_path).returncode == 2
    assert command(folder, "--quality", "fast", "--calibrate", __file__, cwd=tmp_path).returncode == 2
    assert command(tmp_path / "nothing", cwd=tmp_path).returncode == 1
    assert left(tmp_path) == ["model-q4_0.gguf"]


def test_command_refuses(folder, tmp_path):
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
    assert "two chunks of 256" in refused(1, folder, "y.gguf", "--eval", "text")
    assert "two chunks of 256" in refused(1, folder, "y.gguf", "--calibrate", "text")
    assert left(tmp_path) == ["text", "x.safetensors"]


def test_command_measures(gpu, tmp_path):
    """Calibration and evaluation run the model: stories of the kind it was trained on."""
    model = shared_data("tiny/stories260K-f32.gguf")
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a little girl named Lily. She loved to play outside. " * 60)
    run = command(model, tmp_path / "x.gguf", "--calibrate", text, "--eval", text, "--chunks", 2, "--json")
    assert run.returncode == 0, run.stderr
    quality = json.loads(run.stdout)["quality"]
    assert quality["before"]["divergence"] == 0 and quality["before"]["same_top"] == 1
    assert 0 < quality["after"]["divergence"] < 0.1 and 0 < quality["plain"]["divergence"] < 0.1
    for name, path in (("before", model), ("after", tmp_path / "x.gguf")):
        assert quality[name]["perplexity"] == pytest.approx(perplexity(path, text.read_text()), rel=0.01)
    assert left(tmp_path) == ["text", "x.gguf"]


def perplexity(path: Path, text: str) -> float:
    """Of the second halves of two chunks of 512, by the reference."""
    file = GgufFile(path)
    reference, ids = Reference(file), Tokenizer.from_gguf(file.metadata).encode(text, special=False)
    losses = []
    for start in (0, 512):
        chunk = [1, *ids[start + 1 : start + 512]]
        reference.clear()
        logits = reference.forward(chunk)[256:-1]
        logits -= logits.max(axis=1, keepdims=True)
        logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        losses.append(-logs[np.arange(255), chunk[257:]])
    return float(np.exp(np.mean(losses)))


def test_activations_are_those_of_the_reference(gpu):
    from llamagpu.engine.generate import Llama
    from llamagpu.tools.convert.observe import calibrate
    from llamagpu.tools.perplexity import chunks_of

    path = shared_data("tiny/stories260K-f32.gguf")
    text = "Once upon a time there was a dog. " * 20
    llama = Llama(path, device=gpu, context=64, kv_type="f32")
    found = calibrate(llama, text, lambda done, total: None, context=32)
    reference = Reference(GgufFile(path))
    sums: dict[str, np.ndarray] = {}
    linear = reference.linear

    def watch(x: np.ndarray, name: str) -> np.ndarray:
        sums[name] = sums.get(name, 0) + (x**2).sum(axis=0)
        return linear(x, name)

    reference.linear = watch
    chunks = chunks_of(llama.tokenizer, text, 32)
    for ids in chunks:
        reference.clear()
        reference.forward(ids)
    assert set(found) == {f"{name}.weight" for name in sums if name.startswith("blk")}
    for name, mean in found.items():
        wanted = sums[name.removesuffix(".weight")] / (32 * len(chunks))
        assert_close(mean, np.maximum(wanted, 1e-3 * wanted.mean()), 1e-6, 1e-3, name)


@pytest.mark.slow
def test_search_beats_plain_rounding_on_held_out_text(gpu, tmp_path):
    """SmolLM2 from f16 to Q4_0; calibrated on another part of the text than it is measured on."""
    from llamagpu.engine.generate import Llama
    from llamagpu.tools.convert.observe import calibrate, compare
    from llamagpu.tools.models import path

    try:
        model = path("smollm2")
    except LlamaGpuError as error:
        pytest.skip(error.cause)
    text = shared_data("text/wiki.test.raw").read_text("utf-8")
    f16, plain, best, calibrated = (tmp_path / f"{name}.gguf" for name in ("f16", "plain", "best", "calibrated"))
    make(model, f16, "f16")
    llama = Llama(f16, device=gpu, context=512)
    importance = calibrate(llama, text[600_000:606_000], lambda done, total: None)
    for out, options in ((plain, {}), (best, {"best": True}), (calibrated, {"best": True, "importance": importance})):
        make(f16, out, "q4_0", **options)
    found = compare([f16, plain, best, calibrated], text, lambda done, total: None, context=256, most=4)
    print([(round(q.perplexity, 3), round(q.divergence, 4)) for q in found])
    assert found[0].perplexity < found[3].perplexity < found[2].perplexity < found[1].perplexity
    assert found[3].divergence < 0.75 * found[1].divergence
