"""Embedding kernels against float64, and the f16 conversions that weights go through."""

from dataclasses import dataclass

import numpy as np
import pytest
from kernel_cases import GUARD, Steps, fill, on_gpus, only, run, runs, upload
from reference import assert_close

from llamagpu.engine import routes
from llamagpu.engine.ops import Ops
from llamagpu.engine.step_inputs import Segment
from llamagpu.engine.weights import Matrix
from llamagpu.files.storage import Storage
from llamagpu.gpu import shaders
from llamagpu.verify.reference import COPIED, Weight, fits

Q4, Q6, Q8, F16, BF16 = Storage.Q4, Storage.Q6, Storage.Q8, Storage.F16, Storage.BF16


@dataclass(frozen=True)
class Embedding:
    """A table in shards."""

    shards: tuple[Weight, ...]

    first = main = True

    @property
    def name(self) -> str:
        return "+".join(weight.name.replace(" ", "-") for weight in self.shards)

    def fits(self, route, caps) -> bool:
        return all(fits(route, weight.shape(1), caps) for weight in self.shards)


TWO_STORAGES = Embedding((Weight(Q4, 14, 64), Weight(Q8, 58, 64, has_offset=True, scale_bits=32)))
EMBED = runs(
    routes.EMBED,
    (
        TWO_STORAGES,
        Embedding((Weight(Q6, 40, 256, 16, scale_bits=8),)),
        Embedding((Weight(Q4, 40, 576, has_offset=True),)),  # more than one workgroup of values
        Embedding((Weight(Q8, 7, 32, 8), Weight(F16, 1, 32))),
        Embedding((Weight(F16, 6, 33), Weight(BF16, 5, 33))),
        Embedding((Weight(Q4, 9, 96, 3), Weight(Q8, 9, 96, 3, has_offset=True))),
    ),
    at_minimum=lambda case: case is TWO_STORAGES,
)


@on_gpus(EMBED)
def test_embed(any_gpu, route, case):
    """The tokens of rows that belong to different sequences."""
    gpu, table = any_gpu, only(any_gpu, route, case)
    starts = np.cumsum([0, *(weight.n for weight in case.shards)]).tolist()
    uploads = [upload(gpu, weight, row0) for weight, row0 in zip(case.shards, starts, strict=False)]
    w, k = np.concatenate([w for _, w in uploads]), case.shards[0].k
    matrix = Matrix(len(w), k, tuple(shard for shard, _ in uploads))
    # the edges of every shard, one id twice
    ids = [*(start - 1 for start in starts[1:]), *starts[:-1], len(w) - 1, len(w) // 2]
    y, step = gpu.zeros((len(ids) + 1) * k * 4, "y"), Steps(gpu, slots=2)
    make = Ops(gpu, step.buffer)
    for m in (1, 2, len(ids)):
        step.write(*(Segment(slot, 5, tokens) for slot, tokens in ((1, ids[: m // 2]), (0, ids[m // 2 : m])) if tokens))
        fill(gpu, y, len(ids) + 1, k)
        plan = make.embed(matrix, y, 1 if m == 1 else len(ids), table)
        assert {dispatch.kernel for dispatch in plan} == {route.kernel}
        run(gpu, plan, m)
        got = gpu.read(y, np.float32, (len(ids) + 1) * k).reshape(-1, k)
        assert_close(got[:m], w[ids[:m]], *COPIED, f"{m} rows")
        assert (got[m:] == GUARD).all()


# f16 conversions

CONVERSIONS = """
@group(0) @binding(0) var<storage, read> words: array<u32>;
@group(0) @binding(1) var<storage, read> numbers: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read_write> decoded: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read_write> encoded: array<u32>;
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < arrayLength(&words)) { decoded[id.x] = unpack_f16(words[id.x]); }
  if (id.x < arrayLength(&numbers)) { encoded[id.x] = pack_f16(numbers[id.x]); }
}
"""


def convert(gpu, part: str, f16s: np.ndarray, f32s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f16 as f32 and f32 as f16, by a kernel part; both of even length."""
    pipeline = gpu.pipeline(shaders.read(part) + CONVERSIONS, part)
    decoded, encoded = gpu.zeros(f16s.size * 4, "decoded"), gpu.zeros(f32s.size * 2, "encoded")
    buffers = gpu.upload(f16s, "words"), gpu.upload(f32s, "numbers"), decoded, encoded
    entries = [{"binding": i, "resource": {"buffer": buffer}} for i, buffer in enumerate(buffers)]
    group = gpu.device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
    encoder = gpu.device.create_command_encoder()
    work = encoder.begin_compute_pass()
    work.set_pipeline(pipeline)
    work.set_bind_group(0, group)
    work.dispatch_workgroups(-(-max(f16s.size, f32s.size) // 128))
    work.end()
    gpu.device.queue.submit([encoder.finish()])
    return gpu.read(decoded, np.float32, f16s.size), gpu.read(encoded, np.float16, f32s.size)


@pytest.mark.parametrize("part", ["f16_bits", "f16_native"])
def test_f16_conversions(any_gpu, part):
    """Every finite f16 both ways, and what lies between two of them: to the nearer, a tie to the even.

    WGSL leaves the rounding open, and SwiftShader cuts off what does not fit into a subnormal.
    """
    if part == "f16_native" and not any_gpu.caps.native_f16:
        pytest.skip("the adapter does not convert f16 itself")
    f16s = np.arange(65536, dtype=np.uint16).view(np.float16)
    f16s = f16s[np.isfinite(f16s)]
    exact = f16s.astype(np.float32)
    up = np.sort(np.abs(exact))[::2]  # +0 and -0, 2^-24, ... 65504
    middle = (up[1:] + up[:-1]) / 2  # exact in f32
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))
    near = np.concatenate([below, middle, above])
    beyond = np.array([65505, 65519, 65520, 1e6, 3e38, 1e-8, 2e-8, 2.9e-8], np.float32)
    f32s = np.concatenate([exact, near, -near, beyond, -beyond]).astype(np.float32)
    f32s = np.resize(f32s, -(-f32s.size // 4) * 4)
    decoded, encoded = convert(any_gpu, part, f16s, f32s)
    assert (decoded.view(np.uint32) == exact.view(np.uint32)).all()
    want = np.clip(f32s, -65504, 65504).astype(np.float16)
    steps = np.abs(encoded.view(np.int16).astype(np.int32) - want.view(np.int16))
    wrong = steps > ((np.abs(f32s) < 2.0**-14) & (part == "f16_native"))
    assert not wrong.any(), list(zip(f32s[wrong][:5], encoded[wrong][:5], strict=True))
