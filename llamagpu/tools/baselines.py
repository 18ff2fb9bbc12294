"""The naive kernels that the specialised ones are measured against. Where tiles pay, no model uses them."""

from dataclasses import replace
from typing import Any

from llamagpu.engine import ops
from llamagpu.gpu import routes
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.routes import Grid, Route

IN_ROUTE = next(r for r in routes.LINEAR if r.kernel == "linear_gemm_rows")
GEMM_ROWS = replace(IN_ROUTE, fits=lambda s, c: routes.words(s, 8), needs="baseline")
ATTEND_STRIDED = Route(
    "attend_strided", lambda head_dim, m, c: head_dim % 4 == 0 and head_dim <= 256, "baseline",
    lambda heads, c, caps, m, pos: (heads, m, 1), ("kv",),
)  # fmt: skip
NORM_PLAIN = Route("rms_norm_plain", lambda width, c: width % 4 == 0, "baseline", routes.rows, ("reduce",))
KERNELS = {"linear_gemm_rows", "attend_strided", "rms_norm_plain", "mul", "copy", "peak"}


def norm_then_mul(
    gpu: Gpu, x: Any, weight: Any, between: Any, y: Any, width: int, eps: float
) -> list[Dispatch]:
    """x / rms(x) into `between`, then times the weight into y: what rms_norm does in one."""

    def grid(m: int, pos: int) -> Grid:
        return m, 1, 1

    consts = {"WIDTH": width, "EPS": eps} | ops.tuning(gpu, NORM_PLAIN)
    return [
        gpu.dispatch("rms_norm_plain", ops.parts_of(gpu, NORM_PLAIN), consts, {"x": x, "y": between}, grid),
        gpu.dispatch("mul", (), {"WIDTH": width}, {"x": between, "w": weight, "y": y}, grid),
    ]
