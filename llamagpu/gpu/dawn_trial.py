"""Tries a library of Dawn: `python -m llamagpu.gpu.dawn_trial PATH` opens every adapter and computes a product there.

It runs in a child process (see choice.py), since a library with other struct layouts would crash. Every line that it
prints is the key of an adapter and a Trial.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np

from llamagpu.errors import LlamaGpuError
from llamagpu.gpu.caps import Caps
from llamagpu.gpu.choice import LIBRARY, Trial, adapter_key
from llamagpu.gpu.dawn import DawnAdapter, dawn_adapters
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.recorder import Plan, Recorder, Step

SIDE = 16
LANES = 128  # of a workgroup, a multiple of every subgroup size: its subgroups compute the same

BINDINGS = """
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> w: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
"""
PRODUCT = """
@compute @workgroup_size(SIDE, SIDE)
fn main(@builtin(local_invocation_id) i: vec3<u32>) {
  var sum = 0.0;
  for (var k = 0u; k < SIDE; k++) { sum += x[i.y * SIDE + k] * w[k * SIDE + i.x]; }
  y[i.y * SIDE + i.x] = sum;
}
"""
MATRIX_PRODUCT = """
alias A = subgroup_matrix_left<f16, SIDE, SIDE>;
alias B = subgroup_matrix_right<f16, SIDE, SIDE>;
var<workgroup> a: array<f16, SIDE * SIDE>;
var<workgroup> b: array<f16, SIDE * SIDE>;
@compute @workgroup_size(LANES)
fn main(@builtin(local_invocation_index) lane: u32) {
  for (var i = lane; i < SIDE * SIDE; i += LANES) { a[i] = f16(x[i]); b[i] = f16(w[i]); }
  workgroupBarrier();
  var sum = subgroup_matrix_result<f32, SIDE, SIDE>();
  sum = subgroupMatrixMultiplyAccumulate(
    subgroupMatrixLoad<A, row_major>(&a, 0u, SIDE), subgroupMatrixLoad<B, row_major>(&b, 0u, SIDE), sum);
  subgroupMatrixStore<row_major>(&y, 0u, sum, SIDE);
}
"""


def main(path: Path) -> None:
    try:
        adapters = dawn_adapters(path)
    except LlamaGpuError as error:
        return report(LIBRARY, Trial(False, why=error.cause))
    report(LIBRARY, Trial(True))
    for adapter in adapters:
        key = adapter_key(adapter.info)
        report(key, Trial(False))  # if it crashes now
        report(key, try_adapter(adapter))


def report(key: str, trial: Trial) -> None:
    print(json.dumps([key, asdict(trial)]), flush=True)


def try_adapter(adapter: DawnAdapter) -> Trial:
    try:
        with closing(Gpu(adapter)) as gpu:
            wrong = [name for name, right in products(gpu) if not right]
            if wrong:
                return Trial(False, why=f"it computes a wrong {wrong[0]}")
            return Trial(
                True,
                faster=is_faster(gpu.caps),
                why="" if is_faster(gpu.caps) else "it has no matrices that there are kernels for",
            )
    except Exception as error:  # a refused shader, an adapter without memory, ...
        return Trial(False, why=f"{type(error).__name__}: {' '.join(str(error).split())}")


def is_faster(caps: Caps) -> bool:
    """Whether Dawn is faster than wgpu on this adapter. Its only gain is matrix units, in prefill."""
    return caps.matrices


def products(gpu: Gpu) -> Iterator[tuple[str, bool]]:
    """Names of products of small integers, and whether they are exact."""
    yield "product", product_is_exact(gpu, PRODUCT, SIDE)
    if gpu.caps.matrix:
        yield "product of matrices", product_is_exact(gpu, MATRIX_PRODUCT, gpu.caps.matrix)


def product_is_exact(gpu: Gpu, source: str, side: int) -> bool:
    x, w = np.random.default_rng(0).integers(-8, 9, (2, side, side)).astype(np.float32)
    buffers = {"x": gpu.upload(x, "x"), "w": gpu.upload(w, "w"), "y": gpu.zeros(x.nbytes, "y")}
    consts = f"const SIDE = {side}u;\nconst LANES = {LANES}u;\n"
    Recorder(gpu).submit([Step(Plan([Dispatch(gpu, "trial", consts + BINDINGS + source, {}, buffers, (1, 1, 1))]))])
    return bool((gpu.read(buffers["y"], np.float32, side * side).reshape(side, side) == x @ w).all())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
