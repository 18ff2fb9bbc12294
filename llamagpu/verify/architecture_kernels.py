"""The kernels that some architectures have beside Llama's, each once against float64."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine import synthetic
from llamagpu.engine.ops import Ops, QkvBuffers
from llamagpu.engine.options import KvType
from llamagpu.files.architectures import Activation, QkNorm
from llamagpu.files.config import LayerKind, ModelConfig, Rope
from llamagpu.gpu.device import Gpu
from llamagpu.verify.reference import (
    F32,
    ROUNDED_F16,
    Answer,
    Array,
    Case,
    Floats,
    ops_at,
    random,
    rms_norm,
    run,
    silu,
    step_buffer,
)

ROWS, WIDTH = 3, 129
POSITION, CELLS = 40, 64  # of rotate


def architecture_cases(gpu: Gpu) -> Iterator[Case]:
    shape = f"width {WIDTH}, m {ROWS}"
    for activation in Activation:
        yield Case("glu_mul", f"{activation}, {shape}", partial(glu_mul, gpu, activation))
    yield Case("add_rms_norm", shape, partial(add_norm, gpu))
    yield Case("sum_rms_norm", f"width {WIDTH}", partial(sum_norm, gpu))
    yield Case("scale", shape, partial(scale, gpu))
    yield Case("soft_cap", shape, partial(soft_cap, gpu))
    for kv_type, bound in ((KvType.F16, ROUNDED_F16), (KvType.F32, F32)):
        convolved = f"width 36, 3 taps, m {ROWS}, {kv_type} cache"
        yield Case("short_conv", convolved, partial(short_conv, gpu, kv_type), bound)
    for qk_norm in (QkNorm.HEAD, QkNorm.ROW):
        yield Case("rotate", f"3 heads of 16, 2 kv, norm by {qk_norm}, m {ROWS}", partial(rotate, gpu, qk_norm))


def rows(name: str) -> NDArray[np.float32]:
    return random(name).standard_normal((ROWS, WIDTH)).astype(np.float32) * np.float32(3)


def gated(gate: Floats, up: Floats, activation: Activation) -> Floats:
    """activation(gate) * up."""
    if activation is Activation.SILU:
        return silu(gate) * up
    if activation is Activation.SWIGLU_OAI:
        return silu(1.702 * np.minimum(gate, 7)) / 1.702 * (np.clip(up, -7, 7) + 1)
    return np.asarray(0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up)


def glu_mul(gpu: Gpu, activation: Activation) -> Answer:
    gate, up = rows("gate"), rows("up")
    y, make = gpu.upload(gate, "y"), Ops(gpu, step_buffer(gpu, ROWS))
    run(gpu, [make.glu_mul(y, gpu.upload(up, "up"), WIDTH, activation, ROWS)], ROWS)
    want = gated(gate.astype(np.float64), up.astype(np.float64), activation)
    return gpu.read(y, np.float32, gate.size).reshape(gate.shape), want


def add_norm(gpu: Gpu) -> Answer:
    x, before, weight = rows("x"), rows("y"), rows("w")[0]
    y, make = gpu.upload(before, "y"), Ops(gpu, step_buffer(gpu, ROWS))
    run(gpu, [make.add_norm(gpu.upload(x, "x"), gpu.upload(weight, "w"), y, WIDTH, 1e-5, ROWS)], ROWS)
    return gpu.read(y, np.float32, x.size).reshape(x.shape), before + rms_norm(x, weight, 1e-5)


def sum_norm(gpu: Gpu) -> Answer:
    x, residual, weight = rows("x")
    on_device = gpu.upload(x, "x"), gpu.upload(weight, "w"), gpu.upload(residual, "residual")
    y, make = gpu.zeros(4 * WIDTH, "y"), Ops(gpu, step_buffer(gpu, 1))
    run(gpu, [make.sum_norm(*on_device, y, WIDTH, {"EPS": 1e-5})])
    return gpu.read(y, np.float32, WIDTH), residual + rms_norm(x, weight, 1e-5)


def scale(gpu: Gpu) -> Answer:
    x = rows("x")
    y, make = gpu.upload(x, "y"), Ops(gpu, step_buffer(gpu, ROWS))
    run(gpu, [make.scale(y, WIDTH, 0.22, ROWS)], ROWS)
    return gpu.read(y, np.float32, x.size).reshape(x.shape), x * np.float64(0.22)


def soft_cap(gpu: Gpu) -> Answer:
    x, step = rows("x"), step_buffer(gpu, ROWS)
    y, make = gpu.upload(x, "y"), Ops(gpu, step, logit_soft_cap=2.0)
    run(gpu, [make.soft_cap(y, WIDTH, step, ROWS)], ROWS)
    return gpu.read(y, np.float32, x.size).reshape(x.shape), 2 * np.tanh(x.astype(np.float64) / 2)


def short_conv(gpu: Gpu, kv_type: KvType) -> Answer:
    """Three rows; the first ones read inputs of before from the cache, where this leaves theirs."""
    kind, rng = LayerKind(rope=Rope.NONE, is_conv=True), random("short_conv")
    config = replace(synthetic.synthetic_config("tiny"), dim=36, head_dim=6, conv_taps=3)
    shapes, dtype = ((ROWS, 3, 36), (3, 36), (2, 3, CELLS, 6)), np.float16 if kv_type is KvType.F16 else np.float32
    x, taps, before = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    cache = before.astype(dtype)
    y, (k, v) = gpu.zeros(4 * ROWS * 36, "y"), (gpu.upload(half, "cache") for half in cache)
    bound = gpu.upload(x, "x"), gpu.upload(taps, "w"), (k, v), y
    make = ops_at(gpu, ROWS, POSITION, CELLS)
    run(gpu, [make.short_conv(config, kind, *bound, kv_type, ROWS)], ROWS, POSITION)
    b, c, last = np.moveaxis(x.astype(np.float64), 1, 0)
    own = b * last  # of the row itself: not yet rounded
    cells = np.moveaxis(cache.astype(np.float64), 2, 0).reshape(CELLS, 36)
    cells[POSITION : POSITION + ROWS] = own.astype(np.float32).astype(dtype)
    seen = [sum(taps[j] * cells[POSITION + i + j - 2] for j in range(2)) for i in range(ROWS)]
    want = [c[i] * (seen[i] + taps[2] * own[i]) for i in range(ROWS)]
    left = np.stack([gpu.read(half, dtype, 3 * CELLS * 6).reshape(3, CELLS, 6) for half in (k, v)])
    got = gpu.read(y, np.float32, ROWS * 36).reshape(ROWS, 36)
    return np.concatenate([got, np.moveaxis(left, 2, 0).reshape(CELLS, 36)]), np.concatenate([want, cells])


def rotation_config(qk_norm: QkNorm) -> ModelConfig:
    config = replace(synthetic.synthetic_config("tiny"), heads=3, kv_heads=2, head_dim=16, rope_dims=8)
    return replace(config, qk_norm=qk_norm, temperature=0.1, rope_orig_context=16)


def rotation_data(config: ModelConfig) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Rows q | k | v, the weights of the norms, the table of rotations."""
    rng = random("rotate")
    x = rng.standard_normal((ROWS, 7, 16)).astype(np.float32) * np.float32(3)
    weights = rng.uniform(0.5, 1.5, sum(config.qk_norm_widths)).astype(np.float32)
    angle = rng.uniform(0, 6, (CELLS, 4))
    return x, weights, np.stack([np.cos(angle), np.sin(angle)], axis=2).astype(np.float32)


def rotated(config: ModelConfig, x: Array, weights: Array, rope: Array) -> Floats:
    """[m, q | k | v heads, head_dim] in float64."""
    want, axes = x.astype(np.float64), (1, 2) if config.qk_norm is QkNorm.ROW else (2,)
    positions = POSITION + np.arange(ROWS)
    for heads, own in zip((slice(0, 3), slice(3, 5)), np.split(weights, [config.qk_norm_widths[0]]), strict=True):
        rms = np.sqrt(np.square(want[:, heads]).mean(axis=axes, keepdims=True) + config.norm_eps)
        want[:, heads] *= own.reshape(-1, 16) / rms
    cos, sin = np.moveaxis(rope[positions, None].astype(np.float64), 3, 0)
    a, b = want[:, :5, 0:8:2].copy(), want[:, :5, 1:8:2].copy()
    want[:, :5, 0:8:2], want[:, :5, 1:8:2] = a * cos - b * sin, a * sin + b * cos
    growth = np.log(1 + positions // config.rope_orig_context)
    want[:, :3] *= (1 + config.temperature * growth)[:, None, None]
    return want


def rotate(gpu: Gpu, qk_norm: QkNorm) -> Answer:
    config = rotation_config(qk_norm)
    x, weights, rope = rotation_data(config)
    q, k, v = (gpu.zeros(4 * size, "out") for size in (ROWS * 48, 2 * CELLS * 16, 2 * CELLS * 16))
    make, buffers = ops_at(gpu, ROWS, POSITION, CELLS), QkvBuffers(q, k, v, gpu.upload(rope, "rope"))
    bound = gpu.upload(x, "x"), gpu.upload(weights, "norm")
    run(gpu, [make.rotate(config, LayerKind(), *bound, buffers, KvType.F32, ROWS)], ROWS, POSITION)
    cells = [gpu.read(cache, np.float32, 2 * CELLS * 16).reshape(2, CELLS, 16) for cache in (k, v)]
    found = [cache[:, POSITION : POSITION + ROWS].swapaxes(0, 1) for cache in cells]
    queries = gpu.read(q, np.float32, ROWS * 48).reshape(ROWS, 3, 16)
    return np.concatenate([queries, *found], axis=1), rotated(config, x, weights, rope)
