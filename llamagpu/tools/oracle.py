"""What kernels are measured against: random weights and inputs, and each operation in numpy float64."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import wgpu

from llamagpu.engine.weights import Part, to_q6, upload_part
from llamagpu.files.config import LlamaConfig
from llamagpu.files.repack import Packed, dequantize, take_rows
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.recorder import Plan, Recorder
from llamagpu.gpu.routes import Caps, Linear, Route

Array = np.ndarray[Any, Any]
Bound = tuple[float, float]  # normalised mean squared error, largest error over largest value

# f32 sums of some thousand products: 1e-13 and 1e-6 seen; the rest is room for other orders of adding, and
# for an exp and inverseSqrt that are a few ulp off.
F32 = (1e-10, 1e-5)
EXACT = (1e-13, 3e-7)  # one product and one sum in f32
# int8 made of f32 sums: a value between two steps may fall to the other one, 1/127 of the largest away
REQUANTISED = (1e-5, 5e-3)
INT8 = (5e-4, 5e-2)  # int8 activations against exact ones

Compare = Callable[[], tuple[Any, Any]]  # what the device gives, what it should


@dataclass(frozen=True, slots=True)
class Case:
    kernel: str
    shape: str
    compare: Compare
    bound: Bound = F32


RECORD = np.dtype(
    [("even", "i1", 16), ("odd", "i1", 16), ("scale", "f4", 4)]
)  # 32 activations of precision fast


def errors(got: Array, want: Array) -> Bound:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = np.abs(got - want)
    mean = (error**2).sum() / max((want**2).sum(), 1e-300)
    return float(mean), float(error.max() / max(np.abs(want).max(), 1e-300))


def random(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix to be made: [n, k] in a storage form."""

    form: str  # "q4" | "q6" | "q8" | "f16"
    n: int
    k: int
    group: int = 32
    pair: bool = False
    scale: str = "f2"  # or "f4"; or "i1", multiples of a step as K-quants have them

    @property
    def name(self) -> str:
        group = "" if self.form == "f16" else f"/{self.group}{'+' * self.pair}{' by 256' * (self.scale == 'i1')}"
        return f"{self.form}{group} {self.n}x{self.k}"

    def shape(self, m: int, inputs: str = "f32", out: str = "out_store") -> Linear:
        return Linear(m, self.n, self.k, self.k if self.form == "f16" else self.group, self.form, inputs, out)

    def packed(self) -> Packed:
        """As `repack` gives it, where q6 comes as q8."""
        rng, n, k = random(self.name), self.n, self.k
        if self.form == "f16":
            words = np.zeros((n, k + k % 2), np.float16)
            words[:, :k] = 0.05 * rng.standard_normal((n, k), np.float32)
            return Packed("f16", n, k, k, words, None)
        scales = 0.01 * rng.standard_normal((n, k // self.group, 1 + self.pair))
        scales[..., 1:] *= 10
        if self.form == "q4":
            words = rng.integers(0, 256, (n, k // 2), np.uint8)
        else:
            most = 32 if self.form == "q6" else 128
            words = rng.integers(-most, most, (n, k), np.int8)
        made = step_records(rng, n, k, self.group, self.pair) if self.scale == "i1" else scales.astype(self.scale)
        return Packed("q4" if self.form == "q4" else "q8", n, k, self.group, words, made)

    def upload(self, gpu: Gpu, row0: int = 0) -> tuple[Part, Packed]:
        packed = self.packed()
        return upload_part(gpu, to_q6(packed) if self.form == "q6" else packed, row0, self.name), packed


def step_records(rng: np.random.Generator, n: int, k: int, group: int, pair: bool) -> Array:
    """Scales of K-quants (see repack.Packed): any multiples of random steps."""
    made = rng.integers(0, 256, (n, k // 256, 4 + 256 // group * (1 + pair)), np.uint8)
    steps = rng.standard_normal((n, k // 256, 2)) * (1e-4, 1e-3 * pair)
    made[..., :4] = steps.astype(np.float16).view(np.uint8)
    return made if pair else made.view(np.int8)


def rows_of(packed: Packed, rows: Array) -> Array:
    """These rows as float64."""
    return dequantize(take_rows(packed, rows))


# int8 records: what a linear of precision "fast" reads, and what the kernels before it write


def to_records(x: Array) -> Array:
    """[m, k] -> [m, k/32] records: scale = (d, d * sum of the first 16, of the last 16, of all)."""
    blocks = x.astype(np.float64).reshape(len(x), -1, 32)
    d = np.abs(blocks).max(axis=2, keepdims=True) / 127
    ints = np.rint(blocks / np.where(d == 0, 1, d)).astype(np.int8)
    made = np.zeros(ints.shape[:2], RECORD)
    made["even"], made["odd"] = ints[..., ::2], ints[..., 1::2]
    low, high = ints[..., :16].sum(axis=2), ints[..., 16:].sum(axis=2)
    made["scale"] = d * np.stack([np.ones_like(low), low, high, low + high], axis=2)
    return made


def from_records(made: Array) -> Array:
    ints = np.stack([made["even"], made["odd"]], axis=-1).astype(np.float64)
    return (ints.reshape(*made.shape, 32) * made["scale"][..., :1].astype(np.float64)).reshape(len(made), -1)


def rounded(x: Array) -> Array:
    """What is left of activations that went through int8."""
    return from_records(to_records(x))


# Operations in float64


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * weight)


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-np.clip(x, -700, None))))


def attention(q: Array, k: Array, v: Array, pos: int) -> Array:
    """q [m, heads, d] from position pos on, k and v [kv_heads, n, d] -> [m, heads, d]; causal."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    share = q.shape[1] // len(k)
    hidden = np.arange(k.shape[1]) > pos + np.arange(len(q))[:, None]
    out = np.empty_like(q)
    for head in range(q.shape[1]):
        scores = np.where(hidden, -np.inf, q[:, head] @ k[head // share].T / np.sqrt(q.shape[2]))
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights @ v[head // share] / weights.sum(axis=1, keepdims=True)
    return out


# Running kernels by hand


def heads_config(heads: int, kv_heads: int, head_dim: int) -> LlamaConfig:
    """Only what attention asks for."""
    return LlamaConfig(
        arch="llama", name="", layers=1, dim=heads * head_dim, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, ffn_dim=32, vocab=1, context=1, rope_theta=1e4, rope_dims=head_dim,
        rope_scaling="none", rope_factor=1.0, rope_orig_context=1, yarn_ext_factor=1.0, yarn_attn_factor=1.0,
        yarn_beta_fast=32.0, yarn_beta_slow=1.0, neox=False, norm_eps=1e-5, sliding_window=0, tied=True,
    )  # fmt: skip


def step_buffer(gpu: Gpu, m: int, pos: int = 0, capacity: int = 0) -> Any:
    return gpu.upload(np.array([pos, m, capacity, 0], np.uint32), "step", wgpu.BufferUsage.UNIFORM)


def run(gpu: Gpu, dispatches: Sequence[Dispatch], m: int = 1, pos: int = 0) -> None:
    Recorder(gpu).submit([(Plan(dispatches), m, pos)])


def fits(route: Route, caps: Caps, *facts: object) -> bool:
    """Rows made for a CPU are right on a GPU and the other way round: both are run everywhere."""
    return any(route.fits(*facts, replace(caps, cpu=cpu)) for cpu in (False, True))


def only(route: Route) -> tuple[Route, ...]:
    """A table in which this row always wins."""
    return (replace(route, fits=lambda *_: True),)
