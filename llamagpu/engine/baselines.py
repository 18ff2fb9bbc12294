"""Naive kernels, the baselines of the specialised ones. Routes never select them."""

from llamagpu.engine import routes
from llamagpu.engine.ops import Consts, Ops
from llamagpu.engine.routes import Attention, Linear, Role, Route, RowWise
from llamagpu.gpu.buffers import Buffer
from llamagpu.gpu.caps import Grid
from llamagpu.gpu.device import Dispatch

GEMM_ROWS: Route[Linear] = Route(
    "linear_gemm_rows",
    lambda s, c: routes.word_aligned(s, 8),
    "baseline",
    routes.workgroup_per_pair_grid,
    (*routes.WEIGHT_PARTS, Role.REDUCE),
)
ATTEND_STRIDED: Route[Attention] = Route(
    "attend_strided",
    lambda s, c: s.head_dim % 4 == 0 and s.head_dim <= 256,
    "baseline",
    lambda s, c, caps, rows, position: (s.heads, rows, 1),
    (Role.KV4, Role.PAGES),
)
NORM_PLAIN: Route[RowWise] = Route(
    "rms_norm_plain", lambda s, c: s.width % 4 == 0, "baseline", routes.row_grid, (Role.REDUCE,)
)
KERNELS = {"linear_gemm_rows", "attend_strided", "rms_norm_plain", "mul", "copy", "peak"}


def norm_then_mul(
    ops: Ops, x: Buffer, weight: Buffer, normed: Buffer, y: Buffer, width: int, eps: float
) -> list[Dispatch]:
    """Two dispatches: normed = x / rms(x), then y = normed * weight. rms_norm does both in one."""

    def grid(rows: int, position: int) -> Grid:
        return rows, 1, 1

    consts: Consts = {"WIDTH": width, "EPS": eps} | ops.tuning(NORM_PLAIN)
    dispatch = ops.gpu.dispatch
    return [
        dispatch("rms_norm_plain", ops.parts(NORM_PLAIN), consts, {"x": x, "y": normed}, grid, shape=RowWise(width)),
        dispatch("mul", (), {"WIDTH": width}, {"x": normed, "w": weight, "y": y}, grid, shape=RowWise(width)),
    ]
