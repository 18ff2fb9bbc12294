"""Dawn, the other implementation of WebGPU: its binding on SwiftShader, its trial, and which of the two is used.

`scripts/test --portability dawn` installs the library and SwiftShader. Mesa's lavapipe may be too old for Dawn.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("wgpu")
from composed import ADAPTERS, DAWN, compose_all
from conftest import open_gpu
from gguf_builder import tiny_llama
from one_sequence import load_one
from test_model import CACHE_BOUNDS, assert_close, reference_of, token_ids

from llamagpu.engine import routes
from llamagpu.engine.options import KvType
from llamagpu.errors import DeviceLost, DoesNotFit, NoAdapter
from llamagpu.files.storage import Storage
from llamagpu.gpu import choice, dawn, shaders
from llamagpu.gpu.buffers import BufferRange
from llamagpu.gpu.caps import MATRICES, Library
from llamagpu.gpu.choice import LIBRARY, Trial, adapter_key, choose_adapter, same_in_dawn, trials
from llamagpu.gpu.device import Gpu, map_device_lost
from llamagpu.gpu.recorder import Plan, Recorder, Step
from llamagpu.gpu.timing import Stopwatch
from llamagpu.gpu.webgpu import GPUError, GPUValidationError
from llamagpu.llama import PARALLEL
from llamagpu.verify import dawn_trial
from llamagpu.verify.others import other_cases
from llamagpu.verify.reference import Weight, errors

SWIFTSHADER = Path(sys.prefix) / "portability/usr/lib/chromium/vk_swiftshader_icd.json"
NODE_ARCH = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), "none")
NODE_LIBRARY = DAWN / f"dist/{sys.platform}-{NODE_ARCH}/dawn.node"


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        return dawn.library_path()
    except NoAdapter:
        if NODE_LIBRARY.is_file():
            return NODE_LIBRARY
        pytest.skip("no library of Dawn: `scripts/test --portability dawn` installs one")


@pytest.fixture(scope="module")
def gpu(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpu]:
    """On SwiftShader where it is installed; on a GPU it is not."""
    settings = {"LLAMAGPU_CACHE": str(tmp_path_factory.mktemp("cache")), "LLAMAGPU_BACKEND": "dawn"}
    if SWIFTSHADER.is_file() and "VK_ICD_FILENAMES" not in os.environ:
        settings |= {"VK_ICD_FILENAMES": str(SWIFTSHADER), "VK_DRIVER_FILES": str(SWIFTSHADER)}
    with closing(open_gpu(LLAMAGPU_DAWN=str(library), **settings)) as found:
        yield found


# The binding


def test_buffers(gpu: Gpu) -> None:
    data = np.arange(1, 513, dtype=np.uint32)
    source, target = gpu.upload(data, "source"), gpu.zeros(4096, "target")
    first, second = BufferRange(source, 0, 1024), BufferRange(target, 2048, 1024)
    gpu.copy([(first, second)])
    gpu.clear([BufferRange(source, 1024, 512)])
    want = np.concatenate([data[:256], np.zeros(128, np.uint32), data[384:]])
    np.testing.assert_array_equal(gpu.read(source, np.uint32, 512), want)
    np.testing.assert_array_equal(gpu.gather([second, first]).view(np.uint32), np.tile(data[:256], 2))
    assert not gpu.read(target, np.uint32, 512).any()
    gpu.free(source, target)


def test_textures(gpu: Gpu) -> None:
    data = np.arange(1, 7 * 5 * 4 + 1, dtype=np.uint32).reshape(7, 5, 4)
    source, target = gpu.upload_texture(data, "source"), gpu.texture(5, 9, "target", np.uint32)
    gpu.copy_texels([((source, 1, 2), (target, 2, 3))], 3, 4)
    want = np.zeros((9, 5, 4), np.uint32)
    want[3:7, 2:5] = data[2:6, 1:4]
    np.testing.assert_array_equal(gpu.read_texture(target, 0, 5, 9).view(np.uint32), want.reshape(-1))
    gpu.free(source, target)


def test_kernels(gpu: Gpu) -> None:
    assert gpu.info["library"] == "dawn" and not gpu.caps.coherent
    chosen = {"copy", "argmax", "embed_any", "add_rms_norm", "rotate"}
    cases = [case for case in other_cases(gpu) if case.kernel in chosen]
    assert {case.kernel for case in cases} == chosen
    for case in cases:
        nmse, worst = errors(*case.compare())
        assert nmse <= case.bound[0] and worst <= case.bound[1], case


def test_a_model(gpu: Gpu, tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf", heads=4, kv_heads=2, ggml_type="Q4_0", tied=False)
    run, ids = load_one(gpu, path), token_ids(6)
    reference = reference_of(run, path)
    for start, end in ((0, 5), (5, 6)):
        want = reference.forward(ids[start:end])[-1]
        assert_close(run.logits_after(ids[start:end]), want, *CACHE_BOUNDS[KvType.F32], f"tokens {start} to {end}")


def test_timestamps(gpu: Gpu) -> None:
    x, y = gpu.zeros(1 << 20, "x"), gpu.zeros(1 << 20, "y")
    copy = gpu.dispatch("copy", (), {"VEC4S": 1 << 16}, {"x": x, "y": y}, (256, 1, 1))
    watch = Stopwatch(gpu)
    assert watch.timestamps and watch.recorder.timestamps
    assert watch.pass_ns([Step(Plan([copy]))]) > 0
    times, _ = watch.dispatches_ns([Step(Plan([copy, copy]))])
    assert len(times) == 3 and (np.diff(times) >= 0).all() and times[-1] > times[0]


def another(gpu: Gpu, library: Path) -> Gpu:
    """Of the same adapter. Each adapter opens once."""
    return Gpu(next(a for a in dawn.dawn_adapters(library) if a.info["device"] == gpu.name))


def test_errors(gpu: Gpu, library: Path) -> None:
    """On a device of its own: after one has had no memory, Dawn validates its calls."""
    with closing(another(gpu, library)) as own:
        with pytest.raises(GPUValidationError, match="nonsense"):
            own.pipeline("fn nonsense", "k")
        with pytest.raises(GPUError):
            own.device.create_buffer(size=1 << 60, usage=128)
        with pytest.raises(DoesNotFit):
            own.zeros(1 << 60, "large")
        assert not own.read(own.zeros(16, "b"), np.uint32, 4).any()  # the device works on


@pytest.mark.parametrize("setting, validates", [("", False), ("LLAMAGPU_UNCHECKED=0", True), ("LLAMAGPU_SAFE=1", True)])
def test_recorded_calls_are_validated_on_request(
    gpu: Gpu, library: Path, monkeypatch: pytest.MonkeyPatch, setting: str, validates: bool
) -> None:
    for name in ("LLAMAGPU_UNCHECKED", "LLAMAGPU_SAFE"):
        monkeypatch.delenv(name, raising=False)
    if setting:
        monkeypatch.setenv(*setting.split("="))
    with closing(another(gpu, library)) as own:
        encoder, buffer = own.device.create_command_encoder(), own.zeros(16, "b")
        encoder.copy_buffer_to_buffer(buffer, 0, buffer, 8, 4)  # within one buffer: not allowed, and harmless
        with pytest.raises(GPUValidationError) if validates else nullcontext():
            encoder.finish()


def test_a_lost_device(gpu: Gpu, library: Path) -> None:
    """As DeviceLost wherever it is met first."""
    for use in (
        lambda lost: lost.zeros(16, "b"),
        lambda lost: lost.read(lost.status, np.uint32, 1),
        lambda lost: lost.wait_idle(),
        lambda lost: Recorder(lost).submit([]),
    ):
        lost = another(gpu, library)
        lost.device.destroy()
        with pytest.raises(DeviceLost), map_device_lost():
            use(lost)
        lost.close()


@pytest.mark.parametrize("matrix", MATRICES)
def test_matrices_compile(library: Path, matrix: str) -> None:
    """On Dawn's null backend, which runs nothing."""
    (adapter,) = dawn.dawn_adapters(library, dawn.NULL_BACKEND)
    native = adapter.open(sorted(adapter.features), {}, True, threading.Event())
    product = dawn_trial.matrix_product(matrix)
    module = native.create_module(product, "matrices")
    native.device.create_compute_pipeline(layout="auto", compute={"module": module, "entry_point": "main"})
    kernels = compose_all(ADAPTERS[f"matrices of {matrix}"], ["tiny"])
    composed = [source for source in kernels if "subgroup_matrix" in source]
    assert all((f"Right8 = subgroup_matrix_right<f16, 8, {matrix[:-2]}>" in s) == (matrix != "16x16") for s in composed)
    expected = {"linear_matrix", "attend_matrix"} | ({"linear_skinny"} if matrix == "16x16" else set())
    assert {kernels[source] for source in composed} == expected
    for source in composed:
        native.create_module(source, kernels[source])
    with pytest.raises(GPUValidationError, match="row_minor"):
        native.create_module(product.replace("row_major>", "row_minor>"), "matrices")


@pytest.mark.parametrize("barrier", ["workgroup", "none"])
@pytest.mark.parametrize("strip", ["strip_q4", "strip_q6"])
def test_skinny_compiles(library: Path, strip: str, barrier: str) -> None:
    """With the epilogues of a layer. No matrix of the tiny model is large enough."""
    (adapter,) = dawn.dawn_adapters(library, dawn.NULL_BACKEND)
    native = adapter.open(sorted(adapter.features), {}, True, threading.Event())
    consts = {"K": 4096, "N": 4096, "TEAMS": 16, "WORKGROUP": 512, "TOKENS": 16}
    epilogues = (
        (("epilogue_qkv", "kv_store_f16"), {}),
        (("epilogue_add",), {"WIDTH": 4096}),
        (("epilogue_glu_blocks", "activation_silu", "blocks_f16"), {"WIDTH": 4096, "EPILOGUE_ROWS": 32}),
        (("epilogue_partial",), {"GRID_SPLIT": 2, "SPLIT_ROWS": 16}),
    )
    for epilogue, own in epilogues:
        parts = ("f16_native", strip, f"subgroup_barrier_{barrier}", *epilogue)
        native.create_module(shaders.compose("linear_skinny", parts, consts | own), "linear_skinny")


def test_released_when_the_modules_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end the interpreter sets the names of modules to None, before it frees the last objects."""
    released: list[Any] = []
    functions = SimpleNamespace(
        BufferRelease=released.append, QueueRelease=released.append, DeviceRelease=released.append,
        DeviceGetQueue=lambda handle: "queue",
    )  # fmt: skip
    device = dawn.Device(functions, "device", dawn.Faults(threading.Event()))
    buffer = dawn.Resource(device, "Buffer", "buffer")
    monkeypatch.setattr(dawn, "ending", None)
    buffer.__del__()
    device.__del__()
    assert released == ["buffer", "queue", "device"]


def test_directives() -> None:
    assert dawn.with_directives("// subgroupAdd\nfn f() {}") == "// subgroupAdd\nfn f() {}"
    assert dawn.with_directives("let x = subgroupAdd(y);").startswith("enable subgroups; let")
    matrices = dawn.with_directives("alias A = subgroup_matrix_left<f16, 8, 8>;").partition(" alias")[0]
    wanted = {"enable subgroups", "enable f16", "enable chromium_experimental_subgroup_matrix", ""}
    assert {word.strip() for word in matrices.split(";")} == wanted


# The trial


def test_the_trial(gpu: Gpu, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has passed for the device that is open; a wrong product would be told."""
    few = routes.can_be_skinny(dawn_trial.WEIGHT.shape(16), gpu.caps)
    names = ["product", *["product of matrices"] * bool(gpu.caps.matrix), *["linear of 16 rows"] * few]
    assert list(dawn_trial.products(gpu)) == [(name, True) for name in names]
    monkeypatch.setattr(dawn_trial, "products", lambda gpu: [("product", False)])
    adapter = next(a for a in dawn.dawn_adapters(library) if a.info["device"] == gpu.name)
    assert dawn_trial.try_adapter(adapter) == Trial(False, why="it computes a wrong product")


def test_matrices_must_be_faster(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are compared on GPUs with matrices alone."""
    with monkeypatch.context() as small:
        small.setattr(dawn_trial, "ROWS", 1)
        small.setattr(dawn_trial, "WEIGHT", Weight(Storage.Q4, 64, 64))
        assert all(ms > 0 for ms in dawn_trial.linear_ms(gpu))
    times = [(2.0, 1.0)]
    monkeypatch.setattr(dawn_trial, "linear_ms", lambda gpu: times.pop())
    for facts, why in (({"cpu": True}, "a software adapter has no matrix units"), ({"matrix": ""}, "no matrices that")):
        caps = replace(ADAPTERS["matrices of 8x8"], **facts)
        assert why in dawn_trial.why_not_faster(SimpleNamespace(caps=caps, software=caps.cpu))
    units = SimpleNamespace(caps=ADAPTERS["matrices of 8x8"], software=False)
    assert dawn_trial.why_not_faster(units) == "a linear takes 2.000 ms on matrices of 8x8, 1.000 without"
    times.append((1.0, 2.0))
    assert dawn_trial.why_not_faster(units) == ""


@pytest.fixture
def crashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that has every function, all of which crash."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("there is no C compiler for the library")
    names = [name for name, _ in dawn.ffi.typeof("Functions").fields]
    code = "#include <stdlib.h>\n" + "".join(f"void *wgpu{name}(void) {{ abort(); }}\n" for name in names)
    (tmp_path / "crash.c").write_text(code)
    path = tmp_path / "libcrash.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(tmp_path / "crash.c")], check=True)
    monkeypatch.setenv("LLAMAGPU_DAWN", str(path))
    monkeypatch.setenv("LLAMAGPU_CACHE", str(tmp_path / "cache"))
    return path


def test_a_library_that_crashes(crashing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried once, in another process, and not used."""
    (trial,) = trials(crashing).values()
    assert not trial.right and trial.why == "its trial ended with code -6"
    monkeypatch.setattr(subprocess, "run", lambda *args, **more: pytest.fail("it is tried again"))
    monkeypatch.setenv("LLAMAGPU_BACKEND", "dawn")
    with pytest.raises(NoAdapter, match=r"libcrash\.so\) is not used: its trial ended with code -6"):
        choose_adapter(None)
    with pytest.raises(NoAdapter, match="ended with code -6"):
        same_in_dawn(adapter_of("wgpu"), [], choice.list_adapters)


@pytest.mark.parametrize("what", ["no file", "no library"])
def test_a_bad_path(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "libdawn.so"
    if what == "no library":
        path.write_text("no library")
    monkeypatch.setenv("LLAMAGPU_DAWN", str(path))
    monkeypatch.setenv("LLAMAGPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LLAMAGPU_BACKEND", "dawn")
    with pytest.raises(NoAdapter, match="there is no file" if what == "no file" else "has not the functions of Dawn"):
        choose_adapter(None)


# The choice


def adapter_of(library: str, kind: str = "DiscreteGPU", **facts: Any) -> Any:
    info = {"library": library, "version": "1", "adapter_type": kind, "backend_type": "Vulkan", "vendor_id": 1}
    info |= {"device_id": 2, "device": "GPU", "description": "driver"} | facts
    return SimpleNamespace(info=info)


@pytest.mark.parametrize(
    "ours, theirs, trial, why",
    [
        ({}, {}, Trial(True, True), ""),
        ({}, {}, Trial(True, False, "no subgroup matrices"), "not faster on this adapter: no subgroup matrices"),
        ({}, {}, Trial(False, False, "it crashed"), "not right on this adapter: it crashed"),
        ({}, {"device_id": 3}, Trial(True, True), "Dawn does not offer this adapter"),
        ({"kind": "CPU"}, {}, Trial(True, True), "a software adapter has no matrix units"),
    ],
)
def test_where_dawn_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ours: Any, theirs: Any, trial: Trial, why: str
) -> None:
    adapter, other = adapter_of("wgpu", **ours), adapter_of("dawn", **theirs)
    found = {LIBRARY: Trial(True), adapter_key(other.info): trial}
    monkeypatch.setattr(choice, "trials", lambda path, again=False: found)
    monkeypatch.setenv("LLAMAGPU_DAWN", str(tmp_path / "library"))
    (tmp_path / "library").touch()
    listed = {Library.WGPU: [adapter, adapter_of("wgpu")], Library.DAWN: [other]}
    if why:
        with pytest.raises(NoAdapter, match=why):
            same_in_dawn(adapter, listed[Library.WGPU], listed.__getitem__)
    else:
        assert same_in_dawn(adapter, listed[Library.WGPU], listed.__getitem__) is other
        monkeypatch.delenv("LLAMAGPU_BACKEND", raising=False)
        chosen = {n: choose_adapter(None, listed.__getitem__, n) for n in (1, 2, 3, PARALLEL)}
        assert chosen[1] == chosen[PARALLEL] == (other, "Dawn's matrix units are faster")
        assert chosen[2] == chosen[3] == (adapter, "auto takes wgpu for 2 and 3 sequences")
        monkeypatch.setenv("LLAMAGPU_BACKEND", "dawn")
        with pytest.raises(NoAdapter, match="Dawn finds no adapter with all that it needs"):
            choose_adapter(None, (listed | {Library.DAWN: []}).__getitem__)
        with pytest.raises(NoAdapter, match="no WebGPU adapter was found"):
            choose_adapter(None, lambda library: [])
        with pytest.raises(NoAdapter, match="does not offer"):  # a second GPU of the same kind
            same_in_dawn(listed[Library.WGPU][1], listed[Library.WGPU], listed.__getitem__)


def test_trials_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that no trial knows has the library tried again; a broken file too."""
    path, runs = tmp_path / "library", []
    path.write_bytes(b"library")
    monkeypatch.setenv("LLAMAGPU_DAWN", str(path))
    monkeypatch.setenv("LLAMAGPU_CACHE", str(tmp_path / "cache"))
    known = {LIBRARY: Trial(True)}
    monkeypatch.setattr(choice, "run_trials", lambda path: runs.append(path) or dict(known))
    info = adapter_of("dawn").info
    other = path.with_suffix(".node")  # is loaded in another way
    other.write_bytes(b"library")
    assert dawn.library_digest(path) != dawn.library_digest(other)
    assert trials(path) == trials(path) == known and len(runs) == 1
    assert choice.adapter_trial(info) == Trial(False, why="its trial did not find this adapter") and len(runs) == 2
    known[adapter_key(info)] = Trial(True, True)
    assert choice.adapter_trial(info) == choice.adapter_trial(info) == Trial(True, True) and len(runs) == 3
    (file,) = (tmp_path / "cache/dawn").iterdir()
    assert json.loads(file.read_text())[LIBRARY] == {"right": True, "faster": False, "why": ""}
    file.write_text('{"library": 1}')
    assert trials(path) == known and len(runs) == 4
    known[adapter_key(info)] = Trial(False, why="no memory")
    trials(path, again=True)
    assert not choice.adapter_trial(info).right and len(runs) == 5
    os.utime(file, (0, 0))
    assert not choice.adapter_trial(info).right and len(runs) == 6  # failures are kept for a day
