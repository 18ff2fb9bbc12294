"""One function per operation: pick the route, set the constants, bind the buffers, return what to dispatch."""

from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

from llamagpu.engine.weights import Matrix
from llamagpu.files.config import LlamaConfig
from llamagpu.gpu import routes
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.routes import Heads, Route
from llamagpu.gpu.shaders import Const, constants


@dataclass(frozen=True, slots=True)
class Out:
    """Where a linear's results go: the kernel part that takes them, its constants and its buffers."""

    part: str  # out_store | out_add | out_sum | out_swiglu | out_swiglu_i8 | out_qkv | out_logits
    buffers: dict[str, Any]
    consts: dict[str, Const] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Made:
    """What a linear needs to make its own inputs: see the parts inputs_norm and inputs_merge."""

    buffers: dict[str, Any]
    consts: dict[str, Const]
    parts: tuple[str, ...] = ()


def parts_of(
    gpu: Gpu, route: Route, form: str = "", inputs: str = "f32", out: str = "", kv: str = "", score: str = "f32"
) -> tuple[str, ...]:
    """A route's parts by file name."""
    names = ["half_native" if gpu.caps.half else "half_bits"]
    scales = [] if form == "f16" else ["scales"]
    arithmetic = "f32" if inputs.endswith("f32") else "i8"
    record = "record_subgroup" if gpu.caps.subgroup >= 4 else "record_tree"
    for role in route.parts:
        if role in ("weight", "block"):
            names += [*scales, f"{role}_{form}"]
        elif role == "planes":
            names += [*scales, f"planes_{form}"]
        elif role == "dot":
            halves = "dot_f16" if arithmetic == "f32" else "dot_f16_i8"
            dot = [halves] if form == "f16" else [f"planes_{form}", f"dot_{arithmetic}"]
            made = {"i8": ["inputs_made", record], "f32": ["inputs_made_f32"]}[arithmetic]
            kind = inputs.removesuffix("_f32")
            names += [*scales, f"inputs_{kind}", *(made if kind in routes.MADE else []), *dot]
        elif role == "reduce":
            names.append("reduce_subgroup" if subgroups_fit(gpu, route) else "reduce_tree")
        elif role == "out":
            names += [out] + [record] * out.endswith("_i8")
        elif role == "record":
            names.append(record)
        elif role == "tile":
            names.append(form)
        elif role == "spread":
            names.append("spread_subgroup" if gpu.caps.subgroup == routes.vector(gpu.caps) else "spread_plain")
        elif role == "score":
            names.insert(0, f"score_{score}")  # it may enable f16, which stands before everything
        else:
            names.append(f"{role}_{kv}" if role in ("kv", "kv8") else role)
    return tuple(dict.fromkeys(names))


def subgroups_fit(gpu: Gpu, route: Route) -> bool:
    size, own = gpu.caps.subgroup, settings(gpu, route)
    return size >= own.get("TOKENS", 1) * own.get("PAIRS", 1) and own.get("LANES", own["WORKGROUP"]) % size == 0


def settings(gpu: Gpu, route: Route) -> dict[str, int]:
    """The kernel's own tile sizes with the route's tuning on top."""
    lanes = {"WORKGROUP": routes.vector(gpu.caps)} if route.vector else {}
    return constants(route.kernel) | route.consts | lanes


def tuning(gpu: Gpu, route: Route) -> dict[str, Const]:
    """Constants that come from the route: sizes of the workgroup and how it reduces."""
    chosen: dict[str, Const] = dict(route.consts)
    if "reduce" in route.parts:
        own = settings(gpu, route)
        chosen |= {"WORKGROUP": own["WORKGROUP"], "LANES": own.get("LANES", own["WORKGROUP"])}
        if subgroups_fit(gpu, route):
            chosen["SUBGROUP"] = gpu.caps.subgroup
    if route.vector:
        chosen["WORKGROUP"] = settings(gpu, route)["WORKGROUP"]
    return chosen


def at(gpu: Gpu, route: Route, shape: Any, m: int) -> Any:
    """The dispatch's grid: fixed for a plan of one token, else computed from the tokens of the step."""
    grid = partial(route.grid, shape, settings(gpu, route), gpu.caps)
    return grid(1, 0) if m == 1 else grid


def linear(
    gpu: Gpu, x: Any, matrix: Matrix, m: int, out: Out, step: Any, inputs: str = "f32",
    table: tuple[Route, ...] = routes.LINEAR, made: Made | None = None,
) -> list[Dispatch]:  # fmt: skip
    """y = x @ W^T into `out`, part by part. `m` is the most tokens the plan takes.

    With inputs "norm" or "merge" the kernel first makes its inputs from x and what is in `made`; "quads" are f32 in
    an order of their own (see inputs_quads.wgsl)."""
    dispatches: list[Dispatch] = []
    candidates = 0
    for part in matrix.parts:
        shape = part.shape(m, inputs, out.part)
        route = routes.pick(table, shape, gpu.caps)
        consts = part.consts | tuning(gpu, route) | out.consts | {"N": part.n, "ROW0": part.row0}
        if out.part == "out_logits":
            consts["BEST0"] = candidates
            candidates += workgroups(gpu, route, shape)
        # bias and norm are bound where they are not read, too
        buffers = part.buffers | out.buffers | {"x": x, "bias": matrix.bias or step, "step": step, "norm": x}
        if made:
            consts |= made.consts
            buffers |= made.buffers
        parts = (*parts_of(gpu, route, part.form, inputs, out.part), *(made.parts if made else ()))
        dispatches.append(gpu.dispatch(route.kernel, parts, consts, buffers, at(gpu, route, shape, m)))
    return dispatches


def workgroups(gpu: Gpu, route: Route, shape: Any) -> int:
    return prod(route.grid(shape, settings(gpu, route), gpu.caps, 1, 0))


def rows_out(part: str, y: Any, matrix: Matrix) -> Out:
    return Out(part, {"y": y}, {"WIDTH": matrix.n, "BIAS": matrix.bias is not None})


def store(y: Any, matrix: Matrix) -> Out:
    return rows_out("out_store", y, matrix)


def add(y: Any, matrix: Matrix) -> Out:
    return rows_out("out_add", y, matrix)


def sum_to(y: Any, old: Any, matrix: Matrix, up: int = 0) -> Out:
    """The residual stream from one buffer to another, by layer; into the row of the next layer with `up` = 1."""
    return Out("out_sum", {"y": y, "old": old}, {"WIDTH": matrix.n, "BIAS": matrix.bias is not None, "UP": up})


def swiglu(y: Any, matrix: Matrix, quads: bool = False) -> Out:
    """With `quads` in the order that inputs_quads reads."""
    out = rows_out("out_swiglu", y, matrix)
    return replace(out, consts=out.consts | {"QUADS": quads})


def swiglu_i8(y: Any, matrix: Matrix) -> Out:
    return rows_out("out_swiglu_i8", y, matrix)


def qkv(config: LlamaConfig, matrix: Matrix, q: Any, k_cache: Any, v_cache: Any, rope: Any, kv_f32: bool) -> Out:
    consts: dict[str, Const] = {
        "HEADS": config.heads,
        "KV_HEADS": config.kv_heads,
        "HEAD_DIM": config.head_dim,
        "ROPE_DIMS": config.rope_dims,
        "KV_F32": kv_f32,
        "BIAS": matrix.bias is not None,
    }
    return Out("out_qkv", {"y": q, "k_cache": k_cache, "v_cache": v_cache, "rope": rope}, consts)


def head(gpu: Gpu, x: Any, matrix: Matrix, logits: Any, best: Any, step: Any, inputs: str) -> list[Dispatch]:
    """Logits of one row, and the candidates of a greedy choice: by the linear itself where its kernel can."""
    if joins_argmax(gpu, matrix, inputs):
        return linear(gpu, x, matrix, 1, Out("out_logits", {"y": logits, "best": best}), step, inputs)
    return [
        *linear(gpu, x, matrix, 1, store(logits, matrix), step, inputs),
        gpu.dispatch("argmax", (), {"VOCAB": matrix.n}, {"logits": logits, "best": best},
                     (-(-chunks(matrix.n) // constants("argmax")["WORKGROUP"]), 1, 1)),
    ]


def candidates(gpu: Gpu, matrix: Matrix, inputs: str) -> int:
    """How many candidates `head` leaves in `best`."""
    if not joins_argmax(gpu, matrix, inputs):
        return chunks(matrix.n)
    shapes = [part.shape(1, inputs, "out_logits") for part in matrix.parts]
    return sum(workgroups(gpu, routes.pick(routes.LINEAR, shape, gpu.caps), shape) for shape in shapes)


def rows_each(gpu: Gpu, matrix: Matrix, inputs: str) -> int:
    """Of how many logits a candidate is the largest."""
    if not joins_argmax(gpu, matrix, inputs):
        return constants("argmax")["CHUNK"]
    route = routes.pick(routes.LINEAR, matrix.parts[0].shape(1, inputs, "out_logits"), gpu.caps)
    return routes.rows_each(settings(gpu, route))


def joins_argmax(gpu: Gpu, matrix: Matrix, inputs: str) -> bool:
    shapes = [part.shape(1, inputs, "out_logits") for part in matrix.parts]
    fit = all(routes.fits_any(routes.LINEAR, s, gpu.caps) for s in shapes)
    return fit and matrix.bias is None and all(routes.pick(routes.LINEAR, s, gpu.caps).collects for s in shapes)


def chunks(vocab: int) -> int:
    return -(-vocab // constants("argmax")["CHUNK"])


def rms_norm(
    gpu: Gpu, x: Any, weight: Any, y: Any, width: int, eps: float, m: int, step: Any, last: bool = False,
    table: tuple[Route, ...] = routes.NORM,
) -> Dispatch:  # fmt: skip
    """y = x / rms(x) * weight, row by row; `last`: only the step's last row, into row 0."""
    route = routes.pick(table, width, gpu.caps)
    consts: dict[str, Const] = {"WIDTH": width, "EPS": eps, "LAST": last} | tuning(gpu, route)
    buffers = {"x": x, "w": weight, "y": y, "step": step}
    return gpu.dispatch(route.kernel, parts_of(gpu, route), consts, buffers, at(gpu, route, width, 1 if last else m))


def attend(
    gpu: Gpu, config: LlamaConfig, q: Any, k_cache: Any, v_cache: Any, y: Any, m: int, step: Any,
    kv_f32: bool, table: tuple[Route, ...] | None = None, i8: bool = False, splits: int = 1, stats: Any = None,
    reach: int = 1, rough: bool = False, more: dict[str, Const] | None = None,
    parts: tuple[str, ...] = (),
) -> Dispatch:  # fmt: skip
    """Attention of m tokens; the split kernel may leave `splits` partial results for attend_merge. With `rough`
    the kernel for many tokens multiplies in int8 and f16 where it can."""
    table = table or routes.attention(config.heads // config.kv_heads, gpu.caps)
    route = routes.pick(table, config.head_dim, m, gpu.caps)
    consts: dict[str, Const] = {
        "HEADS": config.heads,
        "KV_HEADS": config.kv_heads,
        "HEAD_DIM": config.head_dim,
        "WINDOW": config.sliding_window,
        "SCALE": config.attn_scale,
    }
    buffers = {"x": q, "k_cache": k_cache, "v_cache": v_cache, "y": y, "step": step}
    shape: Any = config.heads
    rough = rough and routes.rough_tile(config.head_dim, gpu.caps)
    if route.kernel == "attend_tile":
        share = routes.tile_share(config.head_dim, rough)
        consts |= {"SHARE": share, "PLACES": routes.tile_places(rough), "I8": i8}
        shape = config.heads, config.kv_heads, share
    if route.kernel == "attend_split":
        size = gpu.caps.subgroup
        strands = routes.strands(config.heads // config.kv_heads, config.head_dim, reach, gpu.caps)
        consts |= {"SUBGROUP": size, "STRANDS": strands, "I8": i8} | routes.teams(config.head_dim, gpu.caps)
        buffers["stats"] = stats or gpu.zeros(m * config.heads * splits * 8, "stats")
        shape = config.kv_heads, splits
    parts = (*parts_of(gpu, route, kv="f32" if kv_f32 else "f16", score="i8" if rough else "f32"), *parts)
    grid = at(gpu, route, shape, m)
    return gpu.dispatch(route.kernel, parts, consts | tuning(gpu, route) | (more or {}), buffers, grid)


def attend_image(
    gpu: Gpu, heads: Heads, q: Any, cache: Any, scored: Any, y: Any, m: int, step: Any, window: int, scale: float,
    more: dict[str, Const] | None = None,
) -> list[Dispatch]:  # fmt: skip
    """Attention over a cache image; for one token in two steps, with the scores in the image `scored` between them."""
    shape = {"HEADS": heads.count, "KV_HEADS": heads.kv, "HEAD_DIM": heads.dim, "WINDOW": window} | (more or {})

    def over(table: tuple[Route, ...], x: Any, to: Any, consts: dict[str, Const]) -> Dispatch:
        route = routes.pick(table, heads, m, gpu.caps)
        buffers = {"x": x, "cache": cache, "y": to, "step": step}
        grid = partial(route.grid, heads, settings(gpu, route), gpu.caps)
        return gpu.dispatch(route.kernel, parts_of(gpu, route), shape | consts | tuning(gpu, route), buffers, grid)

    if m > 1:
        return [over(routes.ATTEND_IMAGE, q, y, {"SCALE": scale})]
    return [over(routes.ATTEND_IMAGE, q, scored, {"SCALE": scale}), over(routes.VALUES_IMAGE, scored, y, {})]


def attend_merge(
    gpu: Gpu, config: LlamaConfig, x: Any, stats: Any, y: Any, splits: int, i8: bool, m: int = 1
) -> Dispatch:
    """The partial results of `splits` splits to the heads."""
    consts: dict[str, Const] = {"HEAD_DIM": config.head_dim, "SPLITS": splits, "I8": i8}
    blocks = config.heads * config.head_dim // 32
    record = "record_subgroup" if gpu.caps.subgroup >= 4 else "record_tree"
    grid = (blocks, 1, 1) if m == 1 else lambda m, pos: (m * blocks, 1, 1)
    return gpu.dispatch("attend_merge", (record,), consts, {"x": x, "stats": stats, "y": y}, grid)


def to_i8(gpu: Gpu, x: Any, y: Any, width: int, m: int, step: Any) -> Dispatch:
    """x as int8 records, for producers that cannot make them themselves."""
    route = routes.TO_I8[0]
    buffers = {"x": x, "y": y, "step": step}
    return gpu.dispatch(route.kernel, parts_of(gpu, route), {"WIDTH": width}, buffers, at(gpu, route, width, m))


def silu_mul(gpu: Gpu, y: Any, up: Any, width: int, m: int, step: Any) -> Dispatch:
    """y = silu(y) * up, in place."""
    route = routes.SILU_MUL[0]
    buffers = {"y": y, "up": up, "step": step}
    return gpu.dispatch(route.kernel, (), {"WIDTH": width}, buffers, at(gpu, route, width, m))


def silu_mul_image(gpu: Gpu, gate: Any, up: Any, y: Any, width: int, m: int) -> Dispatch:
    route = routes.SILU_MUL_IMAGE[0]
    consts: dict[str, Const] = {"WIDTH": width} | tuning(gpu, route)
    return gpu.dispatch(route.kernel, (), consts, {"y": y, "gate": gate, "up": up}, at(gpu, route, width, m))


def embed(
    gpu: Gpu, tokens: Any, matrix: Matrix, y: Any, m: int, table: tuple[Route, ...] = routes.EMBED
) -> list[Dispatch]:
    dispatches = []
    for part in matrix.parts:
        shape = part.shape(m)
        route = routes.pick(table, shape, gpu.caps)
        consts = part.consts | tuning(gpu, route) | {"N": part.n, "ROW0": part.row0}
        buffers = part.buffers | {"tokens": tokens, "y": y}
        parts = parts_of(gpu, route, form=part.form)
        dispatches.append(gpu.dispatch(route.kernel, parts, consts, buffers, at(gpu, route, shape, m)))
    return dispatches


def pick(
    gpu: Gpu, best: Any, count: int, tokens: Any, ring: Any, ring_size: int, step: Any, table: Matrix, x: Any,
    logits: Any = None, sampling: Any = None, run: int = 0,
) -> Dispatch:  # fmt: skip
    """The best candidate, or with `sampling` one drawn from the logits, of which a candidate is the largest of `run`,
    becomes the next token; its embedding goes to x where the table is in one part."""
    kernel = "pick"
    consts: dict[str, Const] = {"CANDIDATES": count, "RING": ring_size}
    buffers = {"best": best, "tokens": tokens, "ring": ring, "step": step, "x": x}
    if sampling is not None:
        kernel, consts["VOCAB"], consts["RUN"] = "sample", table.n, run or constants("argmax")["CHUNK"]
        buffers |= {"logits": logits, "sampling": sampling}
    if not embeds_next(gpu, table):
        return gpu.dispatch(kernel, ("next_none",), consts, buffers, (1, 1, 1))
    part = table.parts[0]
    parts = (*parts_of(gpu, routes.EMBED[0], part.form), "next_embed")
    return gpu.dispatch(kernel, parts, consts | part.consts, buffers | part.buffers, (1, 1, 1))


def embeds_next(gpu: Gpu, table: Matrix) -> bool:
    part = table.parts[0]
    return len(table.parts) == 1 and routes.pick(routes.EMBED, part.shape(1), gpu.caps) is routes.EMBED[0]


def log_prob(gpu: Gpu, logits: Any, targets: Any, out: Any, vocab: int) -> Dispatch:
    buffers = {"logits": logits, "targets": targets, "out": out}
    return gpu.dispatch("log_prob", (), {"VOCAB": vocab}, buffers, lambda m, pos: (m, 1, 1))
