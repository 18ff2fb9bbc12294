"""Tries a library of Dawn: `python -m llamagpu.verify.dawn_trial PATH` opens every adapter, computes products there
and compares the times of a linear on matrix units and without.

It runs in a child process (see gpu/choice.py), since a library with other struct layouts would crash. Every line that
it prints is the key of an adapter and a Trial.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np

from llamagpu.engine import ops, routes
from llamagpu.engine.ops import Ops
from llamagpu.engine.routes import Inputs
from llamagpu.errors import LlamaGpuError
from llamagpu.files.storage import Storage
from llamagpu.gpu import shaders
from llamagpu.gpu.choice import LIBRARY, Trial, adapter_key
from llamagpu.gpu.dawn import DawnAdapter, dawn_adapters
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.recorder import Plan, Recorder, Step
from llamagpu.gpu.timing import Stopwatch
from llamagpu.verify.reference import (
    HALVES,
    Weight,
    errors,
    linear_inputs,
    matrix_of,
    rows_of,
    run,
    step_buffer,
)

ROWS, WEIGHT = 512, Weight(Storage.Q4, 4096, 4096)  # the linear whose times are compared
FEW_ROWS = routes.SKINNY["TOKENS"]  # for linear_skinny, whose subgroups may have no barriers of their own
PRODUCT = """
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> w: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
@compute @workgroup_size(16, 16)
fn main(@builtin(local_invocation_id) i: vec3<u32>) {
  var sum = 0.0;
  for (var k = 0u; k < 16u; k++) { sum += x[i.y * 16u + k] * (w[k * 16u + i.x] + w[i.x * 16u + k]); }
  y[i.y * 16u + i.x] = sum;
}
"""
MATRICES_16X16 = """
alias Left = subgroup_matrix_left<f16, 16, 16>;
alias Right = subgroup_matrix_right<f16, 16, 16>;
alias Result = subgroup_matrix_result<f32, 16, 16>;
"""
# 128 invocations, a multiple of every subgroup size: its subgroups compute the same
MATRIX_PRODUCT = """
@group(0) @binding(0) var<storage, read> x: array<vec4<u32>, 32>;
@group(0) @binding(1) var<storage, read> w: array<vec4<u32>, 32>;
@group(0) @binding(2) var<storage, read_write> y: array<vec4<u32>, 64>;
var<workgroup> x_tile: array<vec2<u32>, 64>;
var<workgroup> w_tile: array<vec4<u32>, 32>;
var<workgroup> y_tile: array<vec4<u32>, 64>;
@compute @workgroup_size(128)
fn main(@builtin(local_invocation_index) index: u32) {
  if (index < 32u) { x_tile[2u * index] = x[index].xy; x_tile[2u * index + 1u] = x[index].zw; }
  if (index < 32u) { w_tile[index] = w[index]; }
  workgroupBarrier();
  let a = subgroupMatrixLoad<Left, row_major>(&x_tile, 0u, 4u);
  var c = Result();
  c = subgroupMatrixMultiplyAccumulate(a, subgroupMatrixLoad<Right, row_major>(&w_tile, 0u, 2u), c);
  subgroupMatrixStore<row_major>(&y_tile, 0u, c, 4u);
  workgroupBarrier();
  c = subgroupMatrixLoad<Result, row_major>(&y_tile, 0u, 4u);
  workgroupBarrier();
  c = subgroupMatrixMultiplyAccumulate(a, subgroupMatrixLoad<Right, col_major>(&w_tile, 0u, 2u), c);
  subgroupMatrixStore<row_major>(&y_tile, 0u, c, 4u);
  workgroupBarrier();
  if (index < 64u) { y[index] = y_tile[index]; }
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
    right = False
    try:
        with closing(Gpu(adapter)) as gpu:
            wrong = [name for name, exact in products(gpu) if not exact]
            if wrong:
                return Trial(False, why=f"it computes a wrong {wrong[0]}")
            right = True
            why = why_not_faster(gpu)
            return Trial(True, faster=not why, why=why)
    except Exception as error:  # a refused shader, an adapter without memory, ...
        return Trial(right, why=f"{type(error).__name__}: {' '.join(str(error).split())}")


def products(gpu: Gpu) -> Iterator[tuple[str, bool]]:
    """Names of products, and whether they are right."""
    yield "product", product_is_exact(gpu, PRODUCT, np.float32)
    if gpu.caps.matrix:
        yield "product of matrices", product_is_exact(gpu, matrix_product(gpu.caps.matrix), np.float16)
    if routes.can_be_skinny(WEIGHT.shape(FEW_ROWS), gpu.caps):
        yield f"linear of {FEW_ROWS} rows", linear_is_right(gpu, FEW_ROWS)


def matrix_product(matrix: str) -> str:
    """y = x @ w + x @ w^T on these matrices, with all that kernels do with matrices."""
    if matrix == "16x16":
        return MATRICES_16X16 + MATRIX_PRODUCT
    return "\n".join(shaders.split_matrices(shaders.read(f"matrix_{matrix}"), MATRIX_PRODUCT))


def product_is_exact(gpu: Gpu, source: str, inputs: type[np.floating]) -> bool:
    x, w = np.random.default_rng(0).integers(-8, 9, (2, 16, 16))
    buffers = {"x": gpu.upload(x.astype(inputs), "x"), "w": gpu.upload(w.astype(inputs), "w")}
    buffers["y"] = gpu.zeros(4 * x.size, "y")
    Recorder(gpu).submit([Step(Plan([Dispatch(gpu, "trial", source, {}, buffers, (1, 1, 1))]))])
    return bool((gpu.read(buffers["y"], np.float32, x.size).reshape(16, 16) == x @ (w + w.T)).all())


def linear_is_right(gpu: Gpu, m: int) -> bool:
    """Compares the first rows of the matrix with float64."""
    shard, packed = WEIGHT.upload(gpu, keep_scales=True)
    given, matrix, y = linear_inputs(gpu, m, WEIGHT.k, Inputs.F16), matrix_of(shard), gpu.zeros(m * WEIGHT.n * 4, "y")
    run(gpu, Ops(gpu, step_buffer(gpu, m)).linear(given.x, matrix, m, ops.store(y, matrix), Inputs.F16), m)
    rows = np.arange(min(WEIGHT.n, 512))
    got = gpu.read(y, np.float32, m * WEIGHT.n).reshape(m, WEIGHT.n)[:, rows]
    mean, largest = errors(got, given.values @ rows_of(packed, rows).T)
    return mean <= HALVES[0] and largest <= HALVES[1]  # False for NaN


def why_not_faster(gpu: Gpu) -> str:
    """Why Dawn is not faster than wgpu on this adapter: its only gain is matrix units, in prefill. Empty if it is."""
    if gpu.software:
        return "a software adapter has no matrix units"
    if routes.block_inputs([WEIGHT.shape(ROWS)], gpu.caps) is not Inputs.F16:
        return "it has no matrices that there are kernels for"
    matrices, int8 = linear_ms(gpu)
    if matrices < int8:
        return ""
    return f"a linear takes {matrices:.3f} ms on matrices of {gpu.caps.matrix}, {int8:.3f} without"


def linear_ms(gpu: Gpu) -> tuple[float, float]:
    """Milliseconds of a linear on matrices and without, each the best of three: clocks rise meanwhile."""
    (shard, _), watch = WEIGHT.upload(gpu), Stopwatch(gpu)
    matrix, y, make = matrix_of(shard), gpu.zeros(ROWS * WEIGHT.n * 4, "y"), Ops(gpu, step_buffer(gpu, ROWS))
    chosen = routes.block_inputs([WEIGHT.shape(ROWS)], gpu.caps)
    units = [
        make.linear(linear_inputs(gpu, ROWS, WEIGHT.k, inputs).x, matrix, ROWS, ops.store(y, matrix), inputs)
        for inputs in (chosen, Inputs.INT8)
    ]
    times = np.array([[watch.repeated_ns([unit], ROWS) for unit in units] for _ in range(3)])
    best = times.min(axis=0) / 1e6
    return float(best[0]), float(best[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
