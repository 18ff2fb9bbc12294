"""Vulkan calls that fail, by a layer below wgpu: every fault ends in words and a code, and the next load works."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from conftest import ROOT, WGPU
from gguf_builder import tiny_llama

from llamagpu.gpu.guard import GuardedThread

pytestmark = WGPU
FOLDER = ROOT / "tests" / "vulkan_faults"
LOST = "the device went away while it was working (driver reset, sleep, or out of memory)"
# What wgpu reports as out of memory. A submission or a wait that finds no memory loses the device, and the first two
# pipelines are wgpu's own: without them it opens no device.
MEMORY = {("allocate", "memory"), ("pipeline", "memory"), ("device", "memory")}
OWN_PIPELINES = 2


@pytest.fixture(scope="module")
def layer(gpu, tmp_path_factory) -> Path:
    """The compiled layer, with its manifest beside it."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("there is no C compiler for the Vulkan layer")
    if gpu.info["backend_type"] != "Vulkan" or sys.platform != "linux":
        pytest.skip("the layer is for Vulkan on Linux")
    folder = tmp_path_factory.mktemp("layer")
    library = folder / "fault_layer.so"
    command = [compiler, "-std=c11", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, "-o", library, FOLDER / "fault_layer.c"], check=True)
    shutil.copy(FOLDER / "fault_layer.json", folder)
    return library


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """With a context of 16,000 the KV cache needs a second allocation of wgpu's allocator."""
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", context=16000, kv_heads=4, head_dim=64)


def run(layer: Path, *arguments: object, **env: str) -> "subprocess.CompletedProcess[str]":
    """Python with these arguments, and the layer between wgpu and the driver."""
    layers = {"VK_LAYER_PATH": str(layer.parent), "VK_INSTANCE_LAYERS": "VK_LAYER_LLAMAGPU_faults"}
    command = [sys.executable, *map(str, arguments)]
    env = os.environ | layers | {"RUST_BACKTRACE": "0"} | env
    return subprocess.run(command, env=env, capture_output=True, text=True, errors="replace", timeout=1200)


def sweep(layer: Path, model: Path, faults: Any, **env: str) -> None:
    """Run the faults in one process and check what each of them ended in."""
    ended = run(layer, FOLDER / "run_faults.py", layer, model, 16000, json.dumps(faults), **env)
    first, *reports = map(json.loads, ended.stdout.splitlines())
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert min(first["counts"].values()) > 0 and len(reports) > 0
    for report in reports:
        fault = report["call"], report["result"]
        assert report["next"] == first["text"], report
        # the decode loop makes a submission less where the machine is faster, and a GPU has memory of another type
        if not report["fired"] or (report["call"] == "allocate" and "code" not in report):
            assert report["text"] == first["text"], report
        elif fault in MEMORY and not (report["call"] == "pipeline" and report["at"] <= OWN_PIPELINES):
            assert report["code"] == 5 and "memory" in report["cause"] and report["remedy"], report
        else:
            assert report["code"] == 6 and report["cause"] == LOST, report


def test_faults_raise_and_the_next_load_works(layer, model):
    places = {"submit": (1, 0.5), "wait": (1, 0.9), "status": (1, 0.6), "pipeline": (1, 0.8)}
    faults = [(call, at, "lost") for call, chosen in places.items() for at in chosen]
    faults += [("submit", 0.7, "memory"), ("wait", 0.5, "memory"), ("device", 1, "lost")]
    faults += [("allocate", 1, "memory"), ("allocate", 1.0, "memory"), ("pipeline", 0.5, "memory")]
    sweep(layer, model, faults)


def test_faults_of_submissions_ahead(layer, model):
    faults = [("submit", 0.4, "lost"), ("submit", 0.9, "memory"), ("status", 0.8, "lost")]
    sweep(layer, model, faults, LLAMAGPU_TEST_AHEAD="1")


@pytest.mark.slow
@pytest.mark.parametrize("ahead", ["0", "1"])
def test_every_fault(layer, model, ahead):
    sweep(layer, model, "all", LLAMAGPU_TEST_AHEAD=ahead)


MANY = """
import ctypes, os, sys, threading, llamagpu

def generate(lose=False):
    with llamagpu.load(sys.argv[2], context=128, parallel=2) as llama:
        runs = llama.submit("the quick", n=4, max_tokens=60, sampling=llamagpu.Sampling(temperature=0))
        ended = [""] * len(runs)
        next(runs[0])
        if lose:
            submits = ctypes.c_long.in_dll(ctypes.CDLL(sys.argv[1]), "fault_counts").value
            os.environ.update(FAULT_CALL="submit", FAULT_AT=str(submits + 3), FAULT_RESULT="lost")

        def read(i):
            try:
                ended[i] = runs[i].result().finish_reason
            except llamagpu.errors.DeviceLost as error:
                ended[i] = f"{error.exit_code} {error.cause}"

        threads = [threading.Thread(target=read, args=(i,)) for i in range(len(runs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(set(ended))

generate(lose=True)
os.environ["FAULT_AT"] = "0"
generate()
"""


def test_a_lost_device_ends_every_generation(layer, model):
    """Those that run and those that wait, each for its own reader; the next load works."""
    ended = run(layer, "-c", MANY, layer, model)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [str({f"6 {LOST}"}), "{'length'}"]


@pytest.mark.parametrize(
    ("fault", "code", "cause"),
    [
        ({"FAULT_CALL": "submit", "FAULT_AT": "6", "FAULT_RESULT": "lost"}, 6, LOST),
        ({"FAULT_CALL": "allocate", "FAULT_AT": "2", "FAULT_RESULT": "memory"}, 5, "could not allocate"),
    ],
    ids=["lost", "memory"],
)
def test_exit_codes(layer, gpu, model, fault, code, cause):
    if fault["FAULT_CALL"] == "allocate" and not gpu.software:
        pytest.skip("a GPU has memory of another type, which wgpu takes then")
    generate = ["-m", "llamagpu", "generate", "-m", model, "-c", 16000, "-p", "Hello", "-n", 8, "--ignore-eos"]
    ended = run(layer, *generate, **fault)
    *_, cause_line, remedy = ended.stderr.splitlines()
    assert ended.returncode == code, ended.stderr
    assert cause_line.startswith("error: ") and cause in cause_line
    assert remedy.startswith("       ")


def test_an_abort_of_somebody_else_ends_the_process(layer, model):
    code = "import os, sys, llamagpu; llamagpu.load(sys.argv[1], context=64); os.abort()"
    ended = run(layer, "-c", code, model)
    assert ended.returncode == -6, ended.stderr


def interrupt_after(opcodes: int) -> Callable[..., Any]:
    """A trace function that raises KeyboardInterrupt there, once."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal opcodes
        frame.f_trace_opcodes = True
        if event == "opcode":
            opcodes -= 1
            if opcodes == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    return trace


def test_a_ctrl_c_anywhere_in_a_call_leaves_its_thread_working() -> None:
    """Between any two instructions of Python's, those of its library included."""
    thread = GuardedThread("calls", threading.Event())
    thread.call(int)  # starts it
    before, interrupted, answers = sys.gettrace(), 0, []
    try:
        for opcodes in range(1, 10_000):
            try:
                sys.settrace(interrupt_after(opcodes))
                thread.call(time.sleep, 0.001)
                break
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(before)
            other = threading.Thread(target=lambda: answers.append(thread.call(int)), daemon=True)
            other.start()
            other.join(20)
            assert len(answers) == interrupted, f"no call ends after an interrupt behind {opcodes} instructions"
    finally:
        thread.stop()
    assert interrupted > 50
