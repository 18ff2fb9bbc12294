"""The kernels that are neither linear, norm nor attention, each once with its answer in float64."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import wgpu

from llamagpu.engine import ops, synthetic
from llamagpu.engine.layers import RELAY, TRIAL, relayed
from llamagpu.engine.weights import Matrix
from llamagpu.gpu import routes, shaders
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.recorder import Recorder
from llamagpu.gpu.routes import Route
from llamagpu.gpu.shaders import Const
from llamagpu.tools.oracle import (
    EXACT,
    RECORD,
    REQUANTISED,
    Case,
    Weight,
    fits,
    from_records,
    only,
    random,
    rounded,
    rows_of,
    run,
    silu,
    step_buffer,
)
from llamagpu.tools.verify_kernels import PLAIN, Answer, norm_data


def other_cases(gpu: Gpu) -> Iterator[Case]:
    for route in routes.EMBED:
        for weight in (PLAIN, Weight("f16", 11, 33)):
            if fits(route, gpu.caps, weight.shape(1)):
                yield Case(route.kernel, weight.name, partial(embed, gpu, route, weight), EXACT)
    yield Case("to_i8", "width 576, m 5", partial(records, gpu), REQUANTISED)
    yield Case("silu_mul", "width 129, m 5", partial(silu_mul, gpu))
    yield Case("argmax", "vocab 3000", partial(choice, gpu), EXACT)
    yield Case("pick", f"candidates, then the row of {PLAIN.name}", partial(next_embedding, gpu), EXACT)
    yield Case(
        "sample", "top-k 3 of 3000, 300 draws", partial(draws, gpu), (4e-2, 0.2)
    )  # 8 more or less of 180
    yield Case("log_prob", "vocab 1025, m 3", partial(log_prob, gpu))
    yield Case("fill_random", "75,000 words", partial(spread, gpu), (1e-2, 0.25))
    yield Case("copy", "4096 words", partial(copy, gpu), (0.0, 0.0))
    yield Case("peak", "f32 multiply-adds", partial(peak, gpu))
    yield Case("relay", f"{RELAY} meetings of workgroups", partial(relay, gpu), (0.0, 0.0))


def draws(gpu: Gpu) -> Answer:
    """How often each of the three likeliest tokens is drawn, and that no other is."""
    best, at = gpu.zeros(8 * ops.chunks(3000), "best"), step_buffer(gpu, 1)
    likely, shares = np.array([2999, 7, 1500]), np.array([0.6, 0.3, 0.1])
    logits = random("logits").standard_normal(3000).astype(np.float32)
    logits[likely] = 20 + np.log(shares)
    reals, wholes = np.array([1.0, 1.0, 0.0, 1.0], np.float32), np.array([3, 1, 0, 0], np.uint32)
    settings = gpu.upload(
        np.concatenate([reals.view(np.uint32), wholes]), "sampling", wgpu.BufferUsage.UNIFORM
    )
    values, tokens, ring = gpu.upload(logits, "logits"), gpu.zeros(16, "tokens"), gpu.zeros(300 * 4, "ring")
    consts: dict[str, Const] = {"CANDIDATES": ops.chunks(3000), "RING": 300, "VOCAB": 3000}
    buffers = {
        "best": best,
        "tokens": tokens,
        "ring": ring,
        "step": at,
        "logits": values,
        "sampling": settings,
    }
    draw = gpu.dispatch("sample", ("next_none",), consts, buffers, (1, 1, 1))
    run(gpu, [candidates(gpu, values, best, 3000), *[draw] * 300])
    drawn = gpu.read(ring, np.uint32, 300)
    counts = [int((drawn == token).sum()) for token in likely]
    return [*counts, 300 - sum(counts)], [*(300 * shares), 0]


def candidates(gpu: Gpu, logits: Any, best: Any, vocab: int) -> Dispatch:
    own = shaders.constants("argmax")
    grid = (-(-ops.chunks(vocab) // own["WORKGROUP"]), 1, 1)
    return gpu.dispatch("argmax", (), {"VOCAB": vocab}, {"logits": logits, "best": best}, grid)


def embed(gpu: Gpu, route: Route, weight: Weight) -> Answer:
    part, packed = weight.upload(gpu)
    ids = np.array([0, weight.n - 1, 3, 3], np.uint32)
    y = gpu.zeros(len(ids) * weight.k * 4, "y")
    table = Matrix(weight.n, weight.k, (part,))
    run(gpu, ops.embed(gpu, gpu.upload(ids, "tokens"), table, y, len(ids), only(route)), len(ids))
    return gpu.read(y, np.float32, len(ids) * weight.k).reshape(len(ids), -1), rows_of(packed, ids)


def records(gpu: Gpu) -> Answer:
    x, _ = norm_data(576, 5)
    y = gpu.zeros(5 * 18 * RECORD.itemsize, "y")
    run(gpu, [ops.to_i8(gpu, gpu.upload(x, "x"), y, 576, 5, step_buffer(gpu, 5))], 5)
    return from_records(gpu.read(y, RECORD, 5 * 18).reshape(5, -1)), rounded(x)


def silu_mul(gpu: Gpu) -> Answer:
    gate, up = random("silu").standard_normal((2, 5, 129)).astype(np.float32) * 3
    y = gpu.upload(gate, "y")
    run(gpu, [ops.silu_mul(gpu, y, gpu.upload(up, "up"), 129, 5, step_buffer(gpu, 5))], 5)
    return gpu.read(y, np.float32, 645).reshape(5, 129), silu(gate.astype(np.float64)) * up


def choice(gpu: Gpu) -> Answer:
    logits = random("logits").standard_normal(3000).astype(np.float32)
    count = ops.chunks(3000)
    best = gpu.zeros(8 * count, "best")
    run(gpu, [candidates(gpu, gpu.upload(logits, "logits"), best, 3000)])
    found = gpu.read(best, np.uint32, 2 * count).reshape(-1, 2)
    size = shaders.constants("argmax")["CHUNK"]
    want = [start + int(logits[start : start + size].argmax()) for start in range(0, 3000, size)]
    return np.append(found[:, 0].copy().view(np.float32), found[:, 1]), np.append(logits[want], want)


def next_embedding(gpu: Gpu) -> Answer:
    part, packed = PLAIN.upload(gpu)
    best = np.array([(0, 5), (0, 70), (0, 3), (0, 33)], np.uint32)
    best[:, 0] = np.array([-3.0, 2.0, 2.0, 1.0], np.float32).view(np.uint32)
    x, tokens, ring = gpu.zeros(576 * 4, "x"), gpu.zeros(16, "tokens"), gpu.zeros(16, "ring")
    at, table = step_buffer(gpu, 1), Matrix(71, 576, (part,))
    run(gpu, [ops.pick(gpu, gpu.upload(best, "best"), 4, tokens, ring, 4, at, table, x)])
    want = rows_of(packed, np.array([3]))[0]  # of the two largest the first
    return np.append(gpu.read(x, np.float32, 576), gpu.read(tokens, np.uint32, 1)), np.append(want, 3)


def log_prob(gpu: Gpu) -> Answer:
    logits = random("log_prob").standard_normal((3, 1025)).astype(np.float32) * 4
    targets, out = np.array([0, 500, 1024], np.uint32), gpu.zeros(12, "out")
    run(gpu, [ops.log_prob(gpu, gpu.upload(logits, "l"), gpu.upload(targets, "t"), out, 1025)], 3)
    wide = logits.astype(np.float64)
    return gpu.read(out, np.float32, 3), wide[range(3), targets] - np.log(np.exp(wide).sum(axis=1))


def spread(gpu: Gpu) -> Answer:
    """How often each byte value appears: 1172 times each, 34 more or less."""
    words = gpu.read(synthetic.filled(gpu, Recorder(gpu), 300_000, 0, "words"), np.uint8, 300_000)
    return np.bincount(words, minlength=256), np.full(256, 300_000 / 256)


def copy(gpu: Gpu) -> Answer:
    x = random("copy").integers(0, 1 << 32, 4096, np.uint32)
    y = gpu.zeros(x.nbytes, "y")
    run(gpu, [gpu.dispatch("copy", (), {"QUADS": 1024}, {"x": gpu.upload(x, "x"), "y": y}, (2, 1, 1))])
    return gpu.read(y, np.uint32, 4096), x


def relay(gpu: Gpu) -> Answer:
    """The first crew that runs at the same time; one alone where layers are not joined."""
    count = gpu.upload(np.array([RELAY, 0, 0, 0], np.uint32), "layers", wgpu.BufferUsage.UNIFORM)
    for crew in (*(routes.crews(2048, gpu.caps) if gpu.caps.join else ()), routes.Crew(1, 256)):
        meeting = gpu.upload(np.array([0, 0, TRIAL, 0], np.uint32), "meeting")
        answers = [relayed(gpu, crew, meeting, count, seed) for seed in (1, 2, 3)]
        if not gpu.read(meeting, np.uint32, 2)[1]:
            break
    got, want = map(np.concatenate, zip(*answers, strict=True))
    return got, want


def peak(gpu: Gpu) -> Answer:
    x, y = gpu.upload(np.array([0.5, 1.0, 2.0, 0.0], np.float32), "x"), gpu.zeros(1024, "y")
    run(gpu, [gpu.dispatch("peak", (), {"ROUNDS": 64}, {"x": x, "y": y}, (1, 1, 1))])
    return gpu.read(y, np.float32, 256), np.full(256, 64.0)
