"""The naive kernels that the specialised ones are measured against. No model uses them."""

from typing import Any

from llamagpu.engine import ops
from llamagpu.gpu import routes
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.routes import Caps, Grid, Linear, Route


def pairs_and_tokens(s: Linear, c: dict[str, int], caps: Caps, m: int, pos: int) -> Grid:
    x, y, _ = routes.fold(-(-s.n // 2), caps)
    return x, y, m


GEMM_ROWS = Route(
    "linear_gemm_rows",
    lambda s, c: routes.words(s, 8),
    "baseline",
    pairs_and_tokens,
    ("weight", "out", "reduce"),
)
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
