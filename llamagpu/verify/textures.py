"""The kernels on textures, which only CPU adapters use, each once against float64."""

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine import routes
from llamagpu.engine.ops import Ops, Output
from llamagpu.engine.options import Backend
from llamagpu.engine.page_table import PageTable
from llamagpu.engine.routes import Attention, Epilogue, Linear, Route
from llamagpu.engine.step_inputs import Segment, StepInputs
from llamagpu.engine.weights import Matrix, WeightTarget, upload_matrix
from llamagpu.files.architectures import QkNorm
from llamagpu.files.config import LayerKind
from llamagpu.files.storage import PackedMatrix, Storage
from llamagpu.files.texture_layout import texture_layout
from llamagpu.gpu.buffers import Bindable, Texture
from llamagpu.gpu.device import Gpu
from llamagpu.verify.architecture_kernels import CELLS, POSITION, rotated, rotation_config, rotation_data
from llamagpu.verify.kernels import tuning
from llamagpu.verify.reference import (
    COPIED,
    Answer,
    Array,
    Case,
    Weight,
    attention,
    only,
    ops_at,
    random,
    rms_norm,
    rows_of,
    run,
    silu,
    step_buffer,
)

WEIGHTS = (Weight(Storage.Q4, 72, 576), Weight(Storage.Q8, 72, 576, 16), Weight(Storage.F16, 72, 576))
TARGET = WeightTarget(Backend.TEXTURES, six_bits=False, native_f16=False, int8=False)


def texture_cases(gpu: Gpu) -> Iterator[Case]:
    for route in routes.TEXTURE_LINEAR:
        for weight in WEIGHTS:
            layout = texture_layout(weight.packed().layout)
            for m in (1, 70):
                shape = Linear(m, weight.n, weight.k, layout.group, layout.storage)
                if route.fits(shape, gpu.caps) and (m == 1) == (route.kernel == "linear_texture_gemv"):
                    name = f"{weight.name}, m {m}{tuning(route)}"
                    yield Case(route.kernel, name, partial(linear, gpu, route, weight, m))
    yield Case("rms_norm_texture", "width 576, m 5", partial(norm, gpu))
    for m, position in ((1, 200), (33, 65)):
        kernel = "attend_texture" if m > 1 else "attend_texture_scores"
        yield Case(kernel, f"4 heads of 64, 2 kv, m {m} at {position}", partial(attend, gpu, m, position))
    if gpu.caps.subgroup == routes.vector_lanes(gpu.caps):
        yield Case("attend_texture_decode", "4 heads of 64, 2 kv, 3 sequences", partial(attend_decode, gpu))
    yield Case("embed_texture", WEIGHTS[0].name, partial(embed, gpu), COPIED)
    yield Case("silu_mul_texture", "width 128, m 5", partial(texture_silu_mul, gpu))
    yield Case("scale_texture", "width 128, m 5", partial(texture_scale, gpu))
    yield Case("short_conv_texture", "width 36, 3 taps, m 3", partial(short_conv, gpu))
    yield Case("rotate_texture", "3 heads of 16, 2 kv, m 3", partial(texture_rotate, gpu))


def upload_rows(gpu: Gpu, rows: Array) -> Texture:
    """[m, k] as texels of 4, the last one padded with 0."""
    padded = np.pad(rows.astype(np.float32), ((0, 0), (0, -rows.shape[1] % 4)))
    return gpu.upload_texture(padded.reshape(len(rows), -1, 4), "rows")


def read_rows(gpu: Gpu, texture: Texture) -> NDArray[np.float32]:
    """[height, 4 width]."""
    raw = gpu.read_texture(texture, 0, texture.width, texture.height)
    return raw.view(np.float32).reshape(texture.height, 4 * texture.width)


def texture_matrix(gpu: Gpu, *packed: PackedMatrix, bias: NDArray[np.float32] | None = None) -> Matrix:
    return upload_matrix(gpu, packed, "w", TARGET, bias)


def cache_rows(keys: Array, values: Array, texture_rows: int) -> NDArray[np.float32]:
    """The rows of a KV cache texture, of [kv_heads, capacity, head_dim] each.

    Keys and values of a cell stand side by side in a row. After `texture_rows` rows come the next columns.
    """
    kv_heads, capacity, head_dim = keys.shape
    blocks = -(-capacity // texture_rows)
    cache = np.zeros((blocks * texture_rows, 2, kv_heads, head_dim), np.float32)
    cache[:capacity, 0], cache[:capacity, 1] = keys.swapaxes(0, 1), values.swapaxes(0, 1)
    columns = cache.reshape(blocks, texture_rows, -1)
    return columns.swapaxes(0, 1).reshape(texture_rows, -1)


def linear(gpu: Gpu, route: Route[Linear], weight: Weight, m: int) -> Answer:
    packed, n = weight.packed(), weight.n
    x, y = random("x").standard_normal((m, weight.k)).astype(np.float32), gpu.zeros(m * n * 4, "y")
    output = Output(Epilogue.TEXTURE_TO_BUFFER, {"y": y}, {"WIDTH": n})
    make, matrix = Ops(gpu, step_buffer(gpu, m)), texture_matrix(gpu, packed)
    run(gpu, make.linear(upload_rows(gpu, x), matrix, m, output, table=only(route)), m)
    want = x.astype(np.float64) @ rows_of(packed, np.arange(n)).T
    return gpu.read(y, np.float32, m * n).reshape(m, n), want


def norm(gpu: Gpu) -> Answer:
    x = random("x").standard_normal((5, 576)).astype(np.float32)
    weight = random("w").standard_normal((1, 576)).astype(np.float32)
    y, make = gpu.texture(144, 5, "y"), Ops(gpu, step_buffer(gpu, 5))
    on_device = upload_rows(gpu, x), upload_rows(gpu, weight)
    run(gpu, [make.rms_norm(*on_device, y, 576, 1e-5, 5, table=routes.TEXTURE_NORM)], 5)
    return read_rows(gpu, y), rms_norm(x, weight, 1e-5)


def attend(gpu: Gpu, m: int, position: int) -> Answer:
    heads, kv_heads, head_dim, texture_rows, end = 4, 2, 64, 64, position + m
    rng = random("attend")
    q = rng.standard_normal((m, heads, head_dim)).astype(np.float32)
    k, v = rng.standard_normal((2, kv_heads, end, head_dim)).astype(np.float32)
    cache = upload_rows(gpu, cache_rows(k, v, texture_rows))
    y, scores = gpu.texture(heads * head_dim // 4, m, "y"), gpu.texture(texture_rows, 4 * heads, "scores")
    make = ops_at(gpu, m, position, end)
    shape = Attention(m, heads, kv_heads, head_dim, scale=head_dim**-0.5)
    textures = upload_rows(gpu, q.reshape(m, -1)), cache, scores, y
    run(gpu, make.attend_textures(shape, *textures, {"TEXTURE_ROWS": texture_rows}), m, position)
    return read_rows(gpu, y).reshape(q.shape), attention(q, k, v, position)


def attend_decode(gpu: Gpu) -> Answer:
    """A row of each of three sequences, which share their pages."""
    heads, kv_heads, head_dim, texture_rows, positions = 4, 2, 64, 64, (200, 0, 63)
    rng = random("attend_decode")
    q = rng.standard_normal((3, heads, head_dim)).astype(np.float32)
    k, v = rng.standard_normal((2, kv_heads, 201, head_dim)).astype(np.float32)
    cache, scores = upload_rows(gpu, cache_rows(k, v, texture_rows)), gpu.texture(1, 1, "scores")
    y, step, table = gpu.texture(heads * head_dim // 4, 3, "y"), StepInputs(gpu), PageTable(gpu, 3, 201, 256)
    for slot in range(3):
        table.assign(slot, range(table.pages))
    step.write([Segment(slot, position, [0]) for slot, position in enumerate(positions)], table)
    make = Ops(gpu, step.buffer, table.buffer)
    shape = Attention(3, heads, kv_heads, head_dim, scale=head_dim**-0.5, segments=3)
    textures = upload_rows(gpu, q.reshape(3, -1)), cache, scores, y
    run(gpu, make.attend_textures(shape, *textures, {"TEXTURE_ROWS": texture_rows}), 3)
    want = [attention(q[i : i + 1], k[:, : p + 1], v[:, : p + 1], p) for i, p in enumerate(positions)]
    return read_rows(gpu, y).reshape(q.shape), np.concatenate(want)


def embed(gpu: Gpu) -> Answer:
    packed, ids = WEIGHTS[0].packed(), [0, 71, 3, 3]
    y, step = gpu.texture(144, len(ids), "y"), StepInputs(gpu)
    step.write([Segment(0, 0, ids)])
    make = Ops(gpu, step.buffer)
    run(gpu, make.embed(texture_matrix(gpu, packed), y, len(ids), routes.TEXTURE_EMBED), len(ids))
    return read_rows(gpu, y), rows_of(packed, np.array(ids))


def short_conv(gpu: Gpu) -> Answer:
    """Three rows from position 1 on; the first ones read the inputs of the row before, and where there is none."""
    rng = random("short_conv")
    x, taps, before = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 3, 36), (3, 36), (1, 36)))
    b, c, last = np.moveaxis(x.astype(np.float64), 1, 0)
    cache, y, make = upload_rows(gpu, np.pad(before, ((0, 3), (0, 0)))), gpu.texture(9, 3, "y"), ops_at(gpu, 3, 1, 4)
    bound = upload_rows(gpu, x.reshape(3, -1)), upload_rows(gpu, taps.reshape(1, -1)), cache, y
    run(gpu, make.texture_short_conv(*bound, 36, 3, 3), 3, 1)
    inputs = np.concatenate([np.zeros((1, 36)), before, b * last])
    want = np.array([c[i] * (taps * inputs[i : i + 3]).sum(axis=0) for i in range(3)])
    return np.concatenate([read_rows(gpu, y), read_rows(gpu, cache)]), np.concatenate([want, inputs[1:]])


def texture_silu_mul(gpu: Gpu) -> Answer:
    gate, up = random("silu").standard_normal((2, 5, 128)).astype(np.float32) * 3
    y, make = gpu.texture(32, 5, "y"), Ops(gpu, step_buffer(gpu, 5))
    run(gpu, [make.texture_silu_mul(upload_rows(gpu, gate), upload_rows(gpu, up), y, 128, 5)], 5)
    return read_rows(gpu, y), silu(gate) * up


def texture_scale(gpu: Gpu) -> Answer:
    x = random("scale").standard_normal((5, 128)).astype(np.float32)
    y, make = gpu.texture(32, 5, "y"), Ops(gpu, step_buffer(gpu, 5))
    run(gpu, [make.texture_scale(upload_rows(gpu, x), y, 128, 0.22, 5)], 5)
    return read_rows(gpu, y), x * np.float64(0.22)


def texture_rotate(gpu: Gpu) -> Answer:
    config = rotation_config(QkNorm.HEAD)
    x, weights, rope = rotation_data(config)
    m, make = len(x), ops_at(gpu, len(x), POSITION, CELLS)
    y, cache = gpu.texture(12, m, "q"), upload_rows(gpu, np.zeros((CELLS, 64)))
    bindings: dict[str, Bindable] = {"y": y, "cache": cache, "rope": gpu.upload(rope, "rope")}
    bindings |= {"x": upload_rows(gpu, x.reshape(m, -1)), "w": upload_rows(gpu, weights[None])}
    run(gpu, [make.rotate_texture(config, LayerKind(), bindings, m)], m, POSITION)
    found = read_rows(gpu, cache)[POSITION : POSITION + m].reshape(m, 4, 16)
    queries = read_rows(gpu, y).reshape(m, 3, 16)
    return np.concatenate([queries, found], axis=1), rotated(config, x, weights, rope)
