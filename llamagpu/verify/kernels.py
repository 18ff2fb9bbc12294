"""Linears, norms and attention: every row of the route tables on small shapes, against float64."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from llamagpu.engine import baselines, routes
from llamagpu.engine.kv_cache import head_values
from llamagpu.engine.ops import AttentionBuffers, AttentionMode, Ops, Output, Splits, activation_parts
from llamagpu.engine.options import KvType
from llamagpu.engine.pages import PAGE
from llamagpu.engine.routes import Attention, Epilogue, GridSize, Inputs, Linear, Prologue, Role, Route, RowWise, S
from llamagpu.files.architectures import Activation
from llamagpu.files.storage import Storage
from llamagpu.gpu.caps import Caps
from llamagpu.gpu.device import Gpu
from llamagpu.verify import reference
from llamagpu.verify.reference import (
    F32,
    HALVES,
    REQUANTISED,
    REQUANTISED_HALVES,
    ROUNDED_F16,
    ROUNDED_SUMS,
    ROUNDED_WEIGHTS,
    TWO_HALVES,
    Answer,
    Array,
    Bound,
    Case,
    Floats,
    Weight,
    cache_bytes,
    fits,
    linear_inputs,
    matrix_of,
    only,
    ops_at,
    random,
    read_values,
    round_int8,
    round_kv,
    rows_of,
    run,
    step_buffer,
)


def kernel_cases(gpu: Gpu, quick: bool) -> Iterator[Case]:
    yield from linear_cases(gpu, quick)
    yield from stage_cases(gpu)
    yield from workgroup_epilogue_cases(gpu)
    yield from norm_cases(gpu)
    yield from attention_cases(gpu, quick)


# Linears

Q4_WEIGHT = Weight(Storage.Q4, 71, 576)
EIGHT_SCALES = Weight(Storage.Q4, 71, 768)  # linear_matrix loads the scales of eight blocks at once
STORAGES = (
    Weight(Storage.Q8, 71, 576),
    Weight(Storage.F16, 71, 576),
    Weight(Storage.Q6, 71, 2304, 16, scale_bits=8),
    Weight(Storage.Q4, 66, 256, 32, has_offset=True, scale_bits=8),
    Weight(Storage.Q4, 9, 36, 12, has_offset=True),
    Weight(Storage.BF16, 5, 129),
)
LONG = (
    Weight(Storage.Q4, 31, 8448, 32, has_offset=True, scale_bits=8),
    Weight(Storage.Q6, 30, 8448, 16, scale_bits=8),
)
LONG_SUM = Weight(Storage.Q4, 30, 4096)  # of ffn_down nothing longer is summed on matrix units
WIDE = (Weight(Storage.Q4, 8193, 64), Weight(Storage.Q4, 3073, 64))  # these n have other GEMM tiles

InputMode = tuple[Inputs, Prologue]
INPUT_MODES: dict[InputMode, int] = {  # k must be a multiple of the value
    (Inputs.F32, Prologue.NONE): 1,
    (Inputs.INT8, Prologue.NONE): 32,
    (Inputs.INT8, Prologue.NORM): 576,
    (Inputs.INT8, Prologue.MERGE): 576,
}
INTERLEAVED = (Inputs.INTERLEAVED, Prologue.NONE)
STAGE_MODES = (
    *product((Inputs.INT8, Inputs.F32), (Prologue.NORM, Prologue.SUM_NORM, Prologue.MERGE, Prologue.MERGE_SINKS)),
    INTERLEAVED,
)
STAGES = (
    *((Q4_WEIGHT, mode) for mode in STAGE_MODES),
    *((weight, mode) for weight in LONG for mode in ((Inputs.INT8, Prologue.NORM), INTERLEAVED)),
)
BATCH_STAGES = (
    (Weight(Storage.Q4, 71, 2048), (Inputs.INT8, Prologue.NORM)),
    (Weight(Storage.Q4, 71, 2048), (Inputs.INT8, Prologue.MERGE)),
    *((weight, (Inputs.INT8, Prologue.NONE)) for weight in LONG),
)
COPIED_INPUTS = (Inputs.INT8, Prologue.BLOCKS)


def linear_cases(gpu: Gpu, quick: bool) -> Iterator[Case]:
    """Each row of the table on one shape, each kernel on every storage."""
    table = (*routes.LINEAR, baselines.GEMM_ROWS)
    for weight in (Q4_WEIGHT,) if quick else (Q4_WEIGHT, *STORAGES):
        for mode in (mode for mode, multiple in INPUT_MODES.items() if weight.k % multiple == 0):
            for m in (1,) if mode[1] is not Prologue.NONE else (1, 3, 8, 16, 70):
                fitting = [route for route in table if fits(route, weight.shape(m, *mode), gpu.caps)]
                if m in (3, 8, 16):  # only for kernels that take no more rows
                    fitting = [route for route in fitting if not fits(route, weight.shape(70, *mode), gpu.caps)]
                if weight is not Q4_WEIGHT or quick:
                    fitting = list({route.kernel: route for route in reversed(fitting)}.values())
                for route in distinct(fitting):
                    yield linear_case(gpu, route, weight, mode, m)
    for weight in () if quick else WIDE:
        mode = Inputs.INT8, Prologue.NONE
        shape = weight.shape(70, *mode)
        if routes.fits_any(routes.LINEAR, shape, gpu.caps):  # the tiles take 32 KiB of workgroup memory
            yield linear_case(gpu, routes.select(routes.LINEAR, shape, gpu.caps), weight, mode, 70)
    yield from matrix_cases(gpu, quick)
    yield from skinny_cases(gpu, quick)


def skinny_cases(gpu: Gpu, quick: bool) -> Iterator[Case]:
    """Every k of linear_skinny, into f32 and, gated, into f16 blocks; of Q6_K into f32, without splits.

    Two workgroups take the strips in turn.
    """
    of_all = (route for route in routes.LINEAR if route.kernel == "linear_skinny")
    chosen = [route for route in of_all if routes.has_room_for_skinny(route.consts["TEAMS"], gpu.caps)]
    for route in chosen[: 1 if quick else None]:
        splits = route.consts.get("GRID_SPLIT", 1)
        weight = Weight(Storage.Q4, 192, routes.SKINNY_SLICE * route.consts["TEAMS"] * splits)
        in_turn = replace(route, grid=lambda *_, z=splits: (1, 2, z))
        if "EPILOGUE_ROWS" in route.consts:
            compare = partial(swiglu_blocks, gpu, in_turn, Inputs.F16, 13, Inputs.F16, weight)
            shape = f"{Epilogue.GLU_BLOCKS} {weight.name}, f16 x, m 13, to f16{tuning(route)}"
            yield Case(route.kernel, shape, compare, HALVES)
        else:
            q6 = [Weight(Storage.Q6, 192, weight.k, 16, scale_bits=8)] if splits == 1 else []
            for stored in (weight, *q6):
                yield linear_case(gpu, in_turn, stored, (Inputs.F16, Prologue.NONE), 13)


def matrix_cases(gpu: Gpu, quick: bool) -> Iterator[Case]:
    """Every tile of linear_matrix, whole and split over k, on one storage in two widths, and one tile on all."""
    memory = gpu.caps.shared_bytes
    tiles = [r for r in routes.LINEAR if r.kernel == "linear_matrix" and routes.matrix_tile_bytes(r.consts) <= memory]
    weights = [weight for weight in STORAGES if weight.k % 64 == 0]
    first = {Role.HALVES in route.parts: route for route in reversed(tiles)}  # of f16 and of f32 inputs
    chosen = [(route, Q4_WEIGHT) for route in tiles] + [(r, EIGHT_SCALES) for r in tiles if Role.HALVES in r.parts]
    chosen += [(r, w) for w in (*weights, LONG_SUM) for r in first.values()]
    for route, weight in chosen[: 1 if quick else None] if gpu.caps.matrices else ():
        yield matrix_case(gpu, route, weight)


def matrix_case(gpu: Gpu, route: Route[Linear], weight: Weight) -> Case:
    """Ragged m and n; results of splits come in pairs."""
    even = replace(weight, n=weight.n + weight.n % 2)
    split, m = "GRID_SPLIT" in route.consts, route.consts["TILE_M"] + 5
    inputs = Inputs.F16 if Role.HALVES in route.parts else Inputs.F32
    return linear_case(gpu, route, even if split else weight, (inputs, Prologue.NONE), m)


def linear_case(gpu: Gpu, route: Route[Linear], weight: Weight, mode: InputMode, m: int) -> Case:
    shape = f"{weight.name}, {mode_name(mode)}, m {m}{tuning(route)}"
    bound = linear_bound(gpu, route, weight, mode)
    return Case(route.kernel, shape, partial(linear, gpu, route, weight, mode, m), bound)


def linear_bound(gpu: Gpu, route: Route[Linear], weight: Weight, mode: InputMode) -> Bound:
    if route.kernel == "linear_gemm_int8" and weight.storage.two_bytes:
        return ROUNDED_WEIGHTS
    if route.kernel in ("linear_matrix", "linear_skinny"):
        return HALVES if mode[0] is Inputs.F16 else TWO_HALVES
    return mode_bound(gpu, mode)


def mode_name(mode: InputMode) -> str:
    inputs, prologue = mode
    return f"{inputs} x" if prologue is Prologue.NONE else f"{inputs} x after {prologue}"


def mode_bound(gpu: Gpu, mode: InputMode) -> Bound:
    inputs, prologue = mode
    if inputs is not Inputs.INT8:
        return F32
    if prologue not in (Prologue.NONE, Prologue.BLOCKS):
        return REQUANTISED
    return F32 if gpu.exact_int8_sums else ROUNDED_SUMS


def tuning(route: Route[S]) -> str:
    return "".join(f", {name.lower()} {value}" for name, value in route.consts.items())


def distinct(table: Iterable[Route[S]]) -> Iterable[Route[S]]:
    """Drop routes that give the same kernel: some differ only in the shapes that they fit."""
    return {(route.kernel, str(route.consts)): route for route in table}.values()


def stage_cases(gpu: Gpu) -> Iterator[Case]:
    """Stages of fused decode as separate kernels, of one row and of several, with fewer workgroups than rows need.

    Two shapes have more iterations than the prefetch covers, and lanes that are idle in the last one. Their inputs are
    copied in pieces.
    """
    one = ((weight, mode, 1) for weight, mode in STAGES)
    four = ((weight, mode, 4) for weight, mode in BATCH_STAGES if weight.k % (8 * max(1, gpu.caps.subgroup)) == 0)
    rows = (m for m in routes.FUSED_PREFETCH if m <= gpu.caps.subgroup)
    many = ((weight, COPIED_INPUTS, m) for weight, m in product((Weight(Storage.Q4, 71, 2048), *LONG), rows))
    for weight, mode, m in (*one, *four, *many) if gpu.caps.subgroup >= 4 else ():
        route = routes.fused_linear(weight.shape(m, *mode), GridSize(1, 128), gpu.caps, half_sums=True)
        compare = partial(linear, gpu, replace(route, grid=lambda *_: (3, 1, 1)), weight, mode, m)
        yield Case(route.kernel, f"{weight.name}, {mode_name(mode)}, m {m}", compare, mode_bound(gpu, mode))


def linear(gpu: Gpu, route: Route[Linear], weight: Weight, mode: InputMode, m: int) -> Answer:
    y = gpu.zeros(m * weight.n * 4, "y")
    output = Output(Epilogue.STORE, {"y": y}, {"WIDTH": weight.n})
    want = run_linear(gpu, route, weight, mode, output, m)
    return gpu.read(y, np.float32, want.size).reshape(want.shape), want


def run_linear(gpu: Gpu, route: Route[Linear], weight: Weight, mode: InputMode, output: Output, m: int = 1) -> Floats:
    """Run the linear; return the [m, n] results in float64."""
    shard, packed = weight.upload(gpu)
    given = linear_inputs(gpu, m, weight.k, *mode)
    prologue, make = given.prologue, Ops(gpu, step_buffer(gpu, m))
    if mode == COPIED_INPUTS:
        piece = routes.piece_width(weight.shape(m, *mode), route, half_sums=True, caps=gpu.caps)
        prologue = replace(prologue, consts={"INPUT_WIDTH": piece})
    run(gpu, make.linear(given.x, matrix_of(shard), m, output, given.inputs, prologue, only(route)), m)
    return np.asarray(given.values @ rows_of(packed, np.arange(weight.n)).T)


# Workgroup epilogues: logits with candidates, silu(gate) * up as int8 blocks

WHOLE_BLOCKS = Weight(Storage.Q4, 192, 576)


def workgroup_epilogue_cases(gpu: Gpu) -> Iterator[Case]:
    weight = WHOLE_BLOCKS
    for inputs in (Inputs.F32, Inputs.INT8):
        for route in workgroup_epilogue_routes(gpu, weight.shape(1, inputs, epilogue=Epilogue.LOGITS)):
            shape = f"{Epilogue.LOGITS} {weight.name}, {inputs} x{tuning(route)}"
            yield Case(route.kernel, shape, partial(logits, gpu, route, inputs))
        for m in (1, 4, 8, 30, 70):
            for route in workgroup_epilogue_routes(gpu, weight.shape(m, inputs, epilogue=Epilogue.GLU_BLOCKS))[:1]:
                shape = f"{Epilogue.GLU_BLOCKS} {weight.name}, {inputs} x, m {m}"
                yield Case(route.kernel, shape, partial(swiglu_blocks, gpu, route, inputs, m), REQUANTISED)
    for blocks, bound in ((Inputs.F16, HALVES), (Inputs.INT8, REQUANTISED_HALVES)):
        for m in (16, 70):
            given = replace(weight.shape(m, Inputs.F16, epilogue=Epilogue.GLU_BLOCKS), blocks=blocks)
            if gpu.caps.matrices and routes.tiles_of_blocks(given, gpu.caps):
                route = matrix_tile_route(given, gpu.caps)
                shape = f"{Epilogue.GLU_BLOCKS} {weight.name}, f16 x, m {m}, to {blocks}"
                yield Case(route.kernel, shape, partial(swiglu_blocks, gpu, route, Inputs.F16, m, blocks), bound)


def matrix_tile_route(shape: Linear, caps: Caps) -> Route[Linear]:
    """The route of linear_matrix with the tile of this shape, whether or not its matrix is large enough."""
    rows, columns, *_ = routes.matrix_tile(shape, caps)
    tiles = (r for r in routes.LINEAR if r.kernel == "linear_matrix" and Role.HALVES in r.parts)
    return next(r for r in tiles if (r.consts["TILE_M"], r.consts["TILE_N"]) == (rows, columns))


def workgroup_epilogue_routes(gpu: Gpu, shape: Linear) -> list[Route[Linear]]:
    return list(distinct(r for r in routes.LINEAR if fits(r, shape, gpu.caps) and r.has_workgroup_epilogue))


def logits(gpu: Gpu, route: Route[Linear], inputs: Inputs) -> Answer:
    weight = WHOLE_BLOCKS
    y, candidates = gpu.zeros(weight.n * 4, "y"), gpu.zeros(weight.n * 8, "candidates")
    output = Output(Epilogue.LOGITS, {"y": y, "candidates": candidates})
    want = run_linear(gpu, route, weight, (inputs, Prologue.NONE), output)[0]
    shape = weight.shape(1, inputs, epilogue=Epilogue.LOGITS)
    count = Ops(gpu, y).workgroups(route, shape)
    top = gpu.read(candidates, np.float32, 2 * count)[::2].max()
    return np.append(gpu.read(y, np.float32, weight.n), top), np.append(want, want.max())


def swiglu_blocks(
    gpu: Gpu,
    route: Route[Linear],
    inputs: Inputs,
    m: int,
    blocks: Inputs = Inputs.INT8,
    weight: Weight = WHOLE_BLOCKS,
) -> Answer:
    y = gpu.zeros(m * weight.n, "y")
    output = Output(Epilogue.GLU_BLOCKS, {"y": y}, {"WIDTH": weight.n}, activation_parts(Activation.SILU), blocks)
    want = reference.swiglu(run_linear(gpu, route, weight, (inputs, Prologue.NONE), output, m))
    return read_values(gpu, y, m, weight.n // 2, blocks), want if blocks is Inputs.F16 else round_int8(want)


# Norms


def norm_cases(gpu: Gpu) -> Iterator[Case]:
    for route in (*routes.NORM, *routes.NORM_BLOCKS):
        for width, m in ((576, 5), (2048, 1), (577, 3), (4096, 3)):
            if fits(route, RowWise(width), gpu.caps):
                bound = REQUANTISED if route in routes.NORM_BLOCKS else F32
                yield Case(
                    route.kernel, f"width {width}, m {m}{tuning(route)}", partial(norm, gpu, route, width, m), bound
                )
    to_f16 = partial(norm, gpu, routes.NORM_BLOCKS[-1], 576, 5, Inputs.F16)
    yield Case("rms_norm_blocks", "width 576, m 5, f16", to_f16, ROUNDED_F16)
    yield Case("rms_norm_blocks", "width 576, m 5, 3 splits of x", partial(split_norm, gpu, 576, 5, 3), REQUANTISED)
    yield Case("rms_norm_plain", "width 576, m 5, with mul", partial(two_step_norm, gpu, 576, 5))


def norm_data(width: int, m: int) -> tuple[Array, Array]:
    rng = random("norm")
    x = rng.standard_normal((m, width)).astype(np.float32) * np.float32(3)
    return x, rng.standard_normal(width).astype(np.float32)


def norm(gpu: Gpu, route: Route[RowWise], width: int, m: int, blocks: Inputs = Inputs.INT8) -> Answer:
    x, weight = norm_data(width, m)
    y, make = gpu.zeros(m * width * 4, "y"), Ops(gpu, step_buffer(gpu, m))
    on_device = gpu.upload(x, "x"), gpu.upload(weight, "w")
    run(gpu, [make.rms_norm(*on_device, y, width, 1e-5, m, table=only(route), blocks=blocks)], m)
    want = reference.rms_norm(x, weight, 1e-5)
    if route in routes.NORM_BLOCKS:
        return read_values(gpu, y, m, width, blocks), want if blocks is Inputs.F16 else round_int8(want)
    return gpu.read(y, np.float32, x.size).reshape(x.shape), want


def split_norm(gpu: Gpu, width: int, m: int, splits: int) -> Answer:
    """Of x and the partial sums that a linear before it has left; x gets the sum."""
    x, weight = norm_data(width, m)
    parts = random("splits").standard_normal((splits, m, width)).astype(np.float32)
    y, make = gpu.zeros(m * width * 4, "y"), Ops(gpu, step_buffer(gpu, m))
    on_device = gpu.upload(x, "x"), gpu.upload(weight, "w")
    left = Splits(gpu.upload(parts, "partial sums"), splits, m)
    run(gpu, [make.rms_norm(*on_device, y, width, 1e-5, m, table=routes.NORM_BLOCKS, splits=left)], m)
    total = x + parts.sum(axis=0, dtype=np.float64)
    got = np.stack(
        [read_values(gpu, y, m, width, Inputs.INT8), gpu.read(on_device[0], np.float32, x.size).reshape(x.shape)]
    )
    return got, np.stack([round_int8(reference.rms_norm(total, weight, 1e-5)), total])


def two_step_norm(gpu: Gpu, width: int, m: int) -> Answer:
    x, weight = norm_data(width, m)
    between, y = gpu.zeros(x.nbytes, "between"), gpu.zeros(x.nbytes, "y")
    on_device = gpu.upload(x, "x"), gpu.upload(weight, "w")
    make = Ops(gpu, step_buffer(gpu, m))
    run(gpu, baselines.norm_then_mul(make, *on_device, between, y, width, 1e-5), m)
    return gpu.read(y, np.float32, x.size).reshape(x.shape), reference.rms_norm(x, weight, 1e-5)


# Attention

CAPACITY = 256
ROUNDED_Q8_0 = (1e-5, 1e-2)  # a value near a tie may round differently
INT8_ATTENTION = (2e-4, 3e-2)  # everything in int8; the same for int8 blocks of the results
HALF_ATTENTION = (2e-5, 1e-2)  # queries and weights in f16
HALF_SCORES = (3e-5, 3e-2)  # and scores of some hundred
HEADS = ((4, 2, 64), (2, 1, 128), (2, 1, 48), (2, 2, 6))  # heads, KV heads, head_dim


def attention_cases(gpu: Gpu, quick: bool) -> Iterator[Case]:
    for heads, kv_heads, head_dim in HEADS[: 1 if quick else None]:
        for m, position in ((1, 200), (8, 60), (33, 65)):
            for route in (*routes.ATTEND, baselines.ATTEND_STRIDED):
                bucket = routes.context_bucket(position + m)
                shape = Attention(m, heads, kv_heads, head_dim, scale=head_dim**-0.5, bucket=bucket)
                for kv_type in KvType if head_dim == 64 else (KvType.F16,):
                    if fits(route, shape, gpu.caps) and (m != 8 or route.kernel == "attend_split"):
                        name = f"{heads} heads of {head_dim}, {kv_heads} kv, {kv_type}, m {m} at {position}"
                        compare = partial(attend, gpu, route, shape, position, AttentionMode(kv_type))
                        yield Case(route.kernel, name, compare)
    for route in routes.ATTEND:
        shape = Attention(33, 4, 2, 64, scale=0.125, sinks=True, soft_cap=0.5)
        for splits in (1, 3) if route.kernel == "attend_split" else (1,):
            if fits(route, shape, gpu.caps):
                compare = partial(attend, gpu, route, replace(shape, splits=splits), 60, AttentionMode(KvType.F16))
                yield Case(route.kernel, f"4 heads of 64 with sinks and soft caps, m 33, {splits} splits", compare)
    rows = Attention(33, 4, 2, 96)
    yield Case("store_kv", "2 KV heads of 96, m 33 at 65", partial(store_kv, gpu, rows, 65), ROUNDED_Q8_0)
    for route in routes.ATTEND:
        if route.kernel == "attend_split":
            yield from split_attention_cases(gpu, route)
        for result in (Inputs.F32, Inputs.INT8):
            int8_out = result.blocks
            if route.kernel == "attend_int8":
                mode = AttentionMode(KvType.F16, result)
                heads, kv_heads, head_dim = HEADS[int8_out]  # few cases: software adapters take seconds to compile it
                shape = Attention(33, heads, kv_heads, head_dim, scale=head_dim**-0.5, splits=2 - int8_out, int8=True)
                if fits(route, shape, gpu.caps) and (int8_out or not quick):
                    name = f"heads of {head_dim} in int8, m 33 at 65, {shape.splits} splits, {result}"
                    yield Case("attend_int8", name, partial(attend, gpu, route, shape, 65, mode), INT8_ATTENTION)
    yield from matrix_attention_cases(gpu, quick)


def split_attention_cases(gpu: Gpu, route: Route[Attention]) -> Iterator[Case]:
    """attend_split to every kind of result, itself and by attend_merge."""
    shape = Attention(1, 4, 2, 64, scale=0.125)
    if not fits(route, shape, gpu.caps):
        return
    for result, bound in ((Inputs.F32, F32), (Inputs.INT8, REQUANTISED), (Inputs.F16, ROUNDED_F16)):
        for kernel, splits in (("attend_split", 1), ("attend_merge", 4)):
            compare = partial(attend, gpu, route, replace(shape, splits=splits), 200, AttentionMode(KvType.F16, result))
            yield Case(kernel, f"4 heads of 64 at 200, splits {splits}, {result}", compare, bound)


def matrix_attention_cases(gpu: Gpu, quick: bool = False) -> Iterator[Case]:
    """attend_matrix on both sizes of heads, whole and split, also with scores that grow far."""
    kernels = [route for route in routes.ATTEND if route.kernel == "attend_matrix"]
    modes = ((1, 1, Inputs.F32), (1, 8, Inputs.F16), (2, 8, Inputs.F32))
    cases = [(heads, *mode) for heads in HEADS[:2] for mode in modes]
    for (heads, kv_heads, head_dim), splits, sharpness, result in cases[: 1 if quick else None]:
        shape = Attention(70, heads, kv_heads, head_dim, scale=head_dim**-0.5, splits=splits, half=True)
        for route, half in product(kernels, (False, True) if gpu.caps.half_sums else (False,)):
            workgroup, own = route.consts["WORKGROUP"], replace(shape, half_scores=half)
            if not routes.matrix_attention(own, gpu.caps, workgroup):
                continue
            name = f"{heads} heads of {head_dim}, m 70 at 130, queries times {sharpness}, {splits} splits"
            name += f", workgroups of {workgroup}, scores in {'f16' if half else 'f32'}"
            compare = partial(attend, gpu, route, own, 130, AttentionMode(KvType.F16, result), sharpness)
            yield Case(route.kernel, name, compare, HALF_SCORES if half and sharpness > 1 else HALF_ATTENTION)


def store_kv(gpu: Gpu, shape: Attention, position: int) -> Answer:
    m, heads, d, kv_type = shape.m, shape.kv_heads, shape.head_dim, KvType.Q8_0
    kv = random("store_kv").standard_normal((m, 2, heads, d)).astype(np.float32)
    size = heads * CAPACITY * kv_type.head_bytes(d)
    caches = [gpu.zeros(size, "cache") for _ in range(2)]
    run(gpu, [ops_at(gpu, m, position, CAPACITY).store_kv(shape, gpu.upload(kv, "rows"), *caches)], m, position)
    pages = [gpu.read(cache, np.uint8, size).reshape(-1, PAGE * kv_type.head_bytes(d)) for cache in caches]
    got = np.array([[head_values(page, kv_type, d) for page in cache] for cache in pages])
    cells = got.reshape(2, heads, CAPACITY, d)[:, :, position : position + m]
    return cells, round_kv(kv, kv_type).transpose(1, 2, 0, 3)


def attend(
    gpu: Gpu, route: Route[Attention], shape: Attention, position: int, mode: AttentionMode, sharpness: float = 1
) -> Answer:
    m = shape.m
    rng = random(f"attention {shape.heads, shape.kv_heads, shape.head_dim}")
    q = sharpness * rng.standard_normal((m, shape.heads, shape.head_dim)).astype(np.float32)
    k, v = round_kv(rng.standard_normal((2, shape.kv_heads, CAPACITY, shape.head_dim)), mode.kv_type)
    keys, values = (gpu.upload(cache_bytes(a, mode.kv_type), "cache") for a in (k, v))
    y, partial_sums = gpu.zeros(q.nbytes, "y"), gpu.zeros(q.nbytes * shape.splits, "partial")
    stats = gpu.zeros(m * shape.heads * shape.splits * 8, "stats")
    merges = shape.splits > 1 or (shape.sinks and route.kernel == "attend_split")
    out = partial_sums if merges else y
    int8_kv = gpu.zeros(routes.int8_kv_bytes(shape, CAPACITY), "int8_kv") if shape.int8 else None
    sinks = rng.uniform(-1, 4, shape.heads).astype(np.float32) if shape.sinks else None
    buffers = AttentionBuffers(gpu.upload(q, "q"), keys, values, out, stats, int8_kv)
    on_device = None if sinks is None else gpu.upload(sinks, "sinks")
    buffers = replace(buffers, sinks=on_device)
    make = ops_at(gpu, m, position, CAPACITY)
    dispatches = make.attend(shape, buffers, mode, only(route))
    if merges:
        dispatches.append(make.attend_merge(shape, partial_sums, stats, y, mode.out, on_device))
    run(gpu, dispatches, m, position)
    end = position + m
    want = reference.attention(q, k[:, :end], v[:, :end], position, sinks, shape.soft_cap)
    if mode.out.blocks:
        flat = want.reshape(m, -1)
        return read_values(gpu, y, m, q.size // m, mode.out), flat if mode.out is Inputs.F16 else round_int8(flat)
    return gpu.read(y, np.float32, q.size).reshape(q.shape), want
