"""The kernels on images, which only CPU adapters use, each once with its answer in float64."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from llamagpu.engine import ops
from llamagpu.engine.ops import Out
from llamagpu.engine.tiled import upload_tiles
from llamagpu.files.tiles import tile
from llamagpu.gpu import routes
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.routes import Route
from llamagpu.tools.oracle import (
    EXACT,
    Array,
    Case,
    Weight,
    attention,
    only,
    random,
    rms_norm,
    rows_of,
    run,
    silu,
)
from llamagpu.tools.oracle import step_buffer as step_of

WEIGHTS = (Weight("q4", 72, 576), Weight("q8", 72, 576, 16), Weight("f16", 72, 576))


def image_cases(gpu: Gpu) -> Iterator[Case]:
    for route in routes.LINEAR_IMAGE:
        for weight in WEIGHTS:
            form = "tile_f32" if weight.form == "f16" else f"tile_{weight.form}"
            for m in (1, 70):
                shape = routes.Linear(m, weight.n, weight.k, weight.group, form)
                if route.fits(shape, gpu.caps) and (m == 1) == (route.kernel == "linear_image_gemv"):
                    said = f"{weight.name}, m {m}" + "".join(
                        f", {k.lower()} {v}" for k, v in route.consts.items()
                    )
                    yield Case(route.kernel, said, partial(linear, gpu, route, weight, m))
    yield Case("rms_norm_image", "width 576, m 5", partial(norm, gpu))
    for m, pos in ((1, 200), (33, 65)):
        kernel = "attend_image" if m > 1 else "attend_image_scores"
        yield Case(kernel, f"4 heads of 64, 2 kv, m {m} at {pos}", partial(attend, gpu, m, pos))
    yield Case("embed_image", WEIGHTS[0].name, partial(embed, gpu), EXACT)
    yield Case("silu_mul_image", "width 128, m 5", partial(silu_mul, gpu))


def image(gpu: Gpu, values: Array) -> Any:
    """[m, k] as texels of 4."""
    return gpu.upload_image(values.astype(np.float32).reshape(len(values), -1, 4), "image")


def texels(gpu: Gpu, texture: Any) -> Array:
    """[height, 4 width] f32."""
    row = -(-16 * texture.width // 256) * 256  # a copy wants rows of whole 256 bytes
    size = (texture.width, texture.height, 1)
    raw = gpu.device.queue.read_texture({"texture": texture}, {"bytes_per_row": row}, size)
    return np.frombuffer(raw, np.float32).reshape(texture.height, -1)[:, : 4 * texture.width]


def linear(gpu: Gpu, route: Route, weight: Weight, m: int) -> tuple[Any, Any]:
    packed, n = weight.packed(), weight.n
    matrix = upload_tiles(gpu, [tile(packed)], weight.name)
    x, y = random("x").standard_normal((m, weight.k)).astype(np.float32), gpu.zeros(m * n * 4, "y")
    out = Out("image_store", {"y": y}, {"WIDTH": n})
    run(gpu, ops.linear(gpu, image(gpu, x), matrix, m, out, step_of(gpu, m), table=only(route)), m)
    return gpu.read(y, np.float32, m * n).reshape(m, n), x.astype(np.float64) @ rows_of(
        packed, np.arange(n)
    ).T


def norm(gpu: Gpu) -> tuple[Any, Any]:
    x, weight = random("x").standard_normal((5, 576)), random("w").standard_normal((1, 576))
    y = gpu.image(144, 5, "y")
    at = image(gpu, x), image(gpu, weight), y
    run(gpu, [ops.rms_norm(gpu, *at, 576, 1e-5, 5, step_of(gpu, 5), table=routes.NORM_IMAGE)], 5)
    return texels(gpu, y), rms_norm(x.astype(np.float32), weight.astype(np.float32), 1e-5)


def attend(gpu: Gpu, m: int, pos: int) -> tuple[Any, Any]:
    """Keys and values of a position stand side by side in a row; FOLD rows, then the next column."""
    count, kv, d, fold = 4, 2, 64, 64
    rng = random("attend")
    q = rng.standard_normal((m, count, d)).astype(np.float32)
    k, v = rng.standard_normal((2, kv, pos + m, d)).astype(np.float32)
    cache = np.zeros((-(-(pos + m) // fold), fold, 2, kv, d), np.float32)
    for p in range(pos + m):
        cache[p // fold, p % fold] = k[:, p], v[:, p]
    heads, step = routes.Heads(count, kv, d), step_of(gpu, m, pos)
    y, scored = gpu.image(count * d // 4, m, "y"), gpu.image(fold, 4 * count, "scored")
    images = image(gpu, q.reshape(m, -1)), image(gpu, cache.swapaxes(0, 1).reshape(fold, -1)), scored, y
    work = ops.attend_image(gpu, heads, *images, m, step, 0, d**-0.5, {"FOLD": fold})
    run(gpu, work, m, pos)
    return texels(gpu, y).reshape(q.shape), attention(q, k, v, pos)


def embed(gpu: Gpu) -> tuple[Any, Any]:
    packed = WEIGHTS[0].packed()
    ids, y = np.array([0, 71, 3, 3], np.uint32), gpu.image(144, 4, "y")
    matrix = upload_tiles(gpu, [tile(packed)], "table")
    run(gpu, ops.embed(gpu, gpu.upload(ids, "ids"), matrix, y, 4, routes.EMBED_IMAGE), 4)
    return texels(gpu, y), rows_of(packed, ids)


def silu_mul(gpu: Gpu) -> tuple[Any, Any]:
    gate, up = random("silu").standard_normal((2, 5, 128)).astype(np.float32) * 3
    y = gpu.image(32, 5, "y")
    run(gpu, [ops.silu_mul_image(gpu, image(gpu, gate), image(gpu, up), y, 128, 5)], 5)
    return texels(gpu, y), silu(gate.astype(np.float64)) * up
