"""The kernels that are neither linear, norm nor attention, each once against float64."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from llamagpu.engine import fused_decode, routes, synthetic
from llamagpu.engine.device_sampler import LOWEST, Candidates, DeviceSampler, SampleKind
from llamagpu.engine.fused_decode import LITMUS_LAYERS, PROBE_SPIN_LIMIT
from llamagpu.engine.ops import Consts, HeadBuffers, Ops, argmax_candidates
from llamagpu.engine.routes import GridSize, Inputs, Linear, Route
from llamagpu.engine.sampler import Sampling
from llamagpu.engine.step_inputs import Segment, StepInputs
from llamagpu.files.storage import Storage
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.recorder import Recorder
from llamagpu.gpu.shaders import constants
from llamagpu.gpu.webgpu import BufferUsage
from llamagpu.verify.architecture_kernels import architecture_cases
from llamagpu.verify.expert_kernels import expert_cases
from llamagpu.verify.kernels import Q4_WEIGHT, norm_data
from llamagpu.verify.reference import (
    COPIED,
    F16_UNIT,
    INT8_BLOCK,
    REQUANTISED,
    ROUNDED_F16,
    Answer,
    Array,
    Case,
    Weight,
    dequantise_blocks,
    fits,
    matrix_of,
    only,
    ops_at,
    random,
    read_blocks,
    read_values,
    round_int8,
    rows_of,
    run,
    step_buffer,
    step_rows,
)

SAMPLED = 300  # tokens


def other_cases(gpu: Gpu) -> Iterator[Case]:
    for route in routes.EMBED:
        for weight in (Q4_WEIGHT, Weight(Storage.F16, 11, 33)):
            if fits(route, weight.shape(1), gpu.caps):
                yield Case(route.kernel, weight.name, partial(embed, gpu, route, weight), COPIED)
    yield Case("to_blocks", "width 576, m 5", partial(quantise, gpu), REQUANTISED)
    yield Case("to_blocks", "width 576, m 5, f16", partial(to_f16, gpu), ROUNDED_F16)
    yield from architecture_cases(gpu)
    yield from expert_cases(gpu)
    yield Case("copy_page", "3 KV heads", partial(copy_page, gpu), COPIED)
    yield Case("check_logits", "vocab 3000", partial(check_logits, gpu), COPIED)
    yield Case("mask_logits", "vocab 3000", partial(mask_logits, gpu), COPIED)
    yield Case("top_logprobs", "4 of 3000", partial(top_logprobs, gpu))
    yield Case("argmax", "vocab 3000", partial(argmax, gpu), COPIED)
    yield Case("greedy", f"candidates, then the row of {Q4_WEIGHT.name}", partial(greedy, gpu), COPIED)
    shares = (4e-2, 0.2)  # 8 more or less of 180
    yield Case("sample", f"top-k 3 of 3000, {SAMPLED} tokens", partial(sample, gpu), shares)
    yield Case("log_prob", "vocab 1025, m 3", partial(log_prob, gpu))
    yield Case("fill_random", "75,000 words", partial(byte_counts, gpu), (1e-2, 0.25))
    yield Case("fill", "16, 8 and 4 vec4s", partial(fill, gpu), COPIED)
    yield Case("copy", "4096 words", partial(copy, gpu), (0.0, 0.0))
    yield Case("peak", "f32 multiply-adds", partial(peak, gpu))
    if gpu.caps.subgroup:  # the barrier checks their size
        yield Case("barrier_litmus", f"{LITMUS_LAYERS} grid barriers", partial(barrier_litmus, gpu), (0.0, 0.0))


def embed(gpu: Gpu, route: Route[Linear], weight: Weight) -> Answer:
    shard, packed = weight.upload(gpu)
    ids, step = [0, weight.n - 1, 3, 3], StepInputs(gpu)
    step.write([Segment(0, 0, ids)])
    y = gpu.zeros(len(ids) * weight.k * 4, "y")
    run(gpu, Ops(gpu, step.buffer).embed(matrix_of(shard), y, len(ids), only(route)), len(ids))
    return gpu.read(y, np.float32, len(ids) * weight.k).reshape(len(ids), -1), rows_of(packed, np.array(ids))


def quantise(gpu: Gpu) -> Answer:
    x, _ = norm_data(576, 5)
    y = gpu.zeros(5 * 18 * INT8_BLOCK.itemsize, "y")
    run(gpu, [Ops(gpu, step_buffer(gpu, 5)).quantise(gpu.upload(x, "x"), y, 576, 5)], 5)
    return dequantise_blocks(read_blocks(gpu, y, 5, 18)), round_int8(x)


def to_f16(gpu: Gpu) -> Answer:
    """A block of values beyond f16, and one beyond a million, which is cut."""
    x, _ = norm_data(576, 5)
    x[2, 64:96] *= 1e5
    x[3, 64:96] *= 1e7
    y = gpu.zeros(5 * 576 * 2, "y")
    run(gpu, [Ops(gpu, step_buffer(gpu, 5)).quantise(gpu.upload(x, "x"), y, 576, 5, blocks=Inputs.F16)], 5)
    largest = F16_UNIT * float(np.finfo(np.float16).max)
    return read_values(gpu, y, 5, 576, Inputs.F16), np.clip(x.astype(np.float64), -largest, largest)


def argmax(gpu: Gpu) -> Answer:
    logits = random("logits").standard_normal(3000).astype(np.float32)
    count, rows = argmax_candidates(3000), constants("argmax")["CANDIDATE_ROWS"]
    candidates = gpu.zeros(8 * count, "candidates")
    run(gpu, [Ops(gpu, step_buffer(gpu, 1)).argmax(gpu.upload(logits, "logits"), candidates, 3000)])
    found = gpu.read(candidates, np.uint32, 2 * count).reshape(-1, 2)
    want = [start + int(logits[start : start + rows].argmax()) for start in range(0, 3000, rows)]
    return np.append(found[:, 0].copy().view(np.float32), found[:, 1]), np.append(logits[want], want)


def greedy(gpu: Gpu) -> Answer:
    """The token of the best candidate, and its embedding."""
    shard, packed = Q4_WEIGHT.upload(gpu)
    candidates = np.array([(0, 5), (0, 70), (0, 3), (0, 33)], np.uint32)
    candidates[:, 0] = np.array([-3.0, 2.0, 2.0, 1.0], np.float32).view(np.uint32)
    x, ring, make = gpu.zeros(Q4_WEIGHT.k * 4, "x"), gpu.zeros(32, "ring"), ops_at(gpu, 1, 0, 2)
    bindings = {"candidates": gpu.upload(candidates, "candidates"), "ring": ring, "x": x}
    run(gpu, [make.sample("greedy", {"CANDIDATES": 4, "RING": 4}, bindings, matrix_of(shard))])
    want = rows_of(packed, np.array([3]))[0]  # the first of the two largest
    return np.append(gpu.read(x, np.float32, Q4_WEIGHT.k), step_rows(gpu, make.step, 1)[0, 2]), np.append(want, 3)


def sample(gpu: Gpu) -> Answer:
    """How often each of the three likeliest tokens is sampled, and that no other is."""
    likeliest, shares = np.array([2999, 7, 1500]), np.array([0.6, 0.3, 0.1])
    values = random("logits").standard_normal(3000).astype(np.float32)
    values[likeliest] = 20 + np.log(shares)
    logits, ring = gpu.upload(values, "logits"), gpu.zeros(SAMPLED * 8, "ring")
    count = argmax_candidates(3000)
    candidates = gpu.zeros(8 * count, "candidates")
    sampler = DeviceSampler(gpu, 1, 3000)
    sampler.configure(0, Sampling(temperature=1.0, top_k=3, top_p=1.0, min_p=0.0, seed=1), ())
    consts: Consts = {"CANDIDATES": count, "RING": SAMPLED, "VOCAB": 3000}
    bindings = {"candidates": candidates, "ring": ring, "logits": logits, "sampling": sampler.settings}
    make = ops_at(gpu, 1, 0, SAMPLED + 1)
    next_token = make.sample("sample", consts, bindings, None)
    run(gpu, [make.argmax(logits, candidates, 3000), *[next_token] * SAMPLED])
    sampled = gpu.read(ring, np.uint32, SAMPLED)
    counts = [int((sampled == token).sum()) for token in likeliest]
    return np.array([*counts, SAMPLED - sum(counts)]), np.array([*(SAMPLED * shares), 0])


def scored(gpu: Gpu, kind: SampleKind) -> tuple[DeviceSampler, Array, Array, Array]:
    """A sampler, its results, the logits before and the logits after it; each third token is masked."""
    before = random("scored").standard_normal((1, 3000)).astype(np.float32) * 4
    sampler, make = DeviceSampler(gpu, 1, 3000), ops_at(gpu, 1, 0, 2)
    sampler.configure(0, Sampling(temperature=0), [], 1, masked=True, logprobs=4)
    mask = np.packbits(np.arange(3008) % 3 > 0, bitorder="little").view(np.int32)
    sampler.write_mask(0, mask)
    head = HeadBuffers(gpu.upload(before, "logits"), gpu.zeros(8 * argmax_candidates(3000), "candidates"), make.step)
    found = Candidates(3000, argmax_candidates(3000), make.argmax_rows)
    sampling = sampler.dispatches(make, kind, head, found, None, None)
    run(gpu, [make.argmax(head.logits, head.candidates, 3000), *sampling])
    words = np.append(
        gpu.read(sampler.ring, np.uint32, sampler.first_change),
        gpu.read(sampler.scores, np.uint32, sampler.scores.size // 4),
    )
    return sampler, words, before[0], gpu.read(head.logits, np.float32, 3000)


def copy_page(gpu: Gpu) -> Answer:
    """The last of 5 pages to the second."""
    caches = random("copy_page").integers(0, 1 << 32, (2, 3, 5, 40), np.uint32)
    k, v = (gpu.upload(cache, "cache") for cache in caches)
    pair = gpu.zeros(16, "pair", BufferUsage.UNIFORM)
    gpu.write(pair, np.array([4, 1], np.uint32))
    bindings = {"k_cache": k, "v_cache": v, "pair": pair}
    run(gpu, [gpu.dispatch("copy_page", (), {"PAGES": 5, "PAGE_VEC4S": 10}, bindings, (3, 2, 1))])
    caches[:, :, 1] = caches[:, :, 4]
    return np.array([gpu.read(cache, np.uint32, 600) for cache in (k, v)]), caches.reshape(2, 600)


def fill(gpu: Gpu) -> Answer:
    """All of y, and x but for its first two vec4s; likewise of their copies."""
    words = [np.arange(size, dtype=np.uint32) for size in (64, 32, 64, 32)]
    buffers = [gpu.upload(data, "words") for data in words]
    consts: Consts = {"X_VEC4S": 16, "Y_VEC4S": 8, "FIRST": 2}
    bindings = dict(zip(("x", "y", "x_copies", "y_copies"), buffers, strict=True))
    run(gpu, [gpu.dispatch("fill", (), consts, bindings, (1, 1, 1))])
    got = [gpu.read(buffer, np.uint32, data.size) for buffer, data in zip(buffers, words, strict=True)]
    for data in words:
        data[8 if data.size == 64 else 0 :] = constants("late_stores")["NOT_STORED"]
    return np.concatenate(got), np.concatenate(words)


def check_logits(gpu: Gpu) -> Answer:
    """Whether the last logit is infinite; of all numbers, first."""
    found = []
    for last in (0.0, np.inf):
        logits, ring, make = np.zeros(3000, np.float32), gpu.zeros(8, "ring"), Ops(gpu, step_buffer(gpu, 1))
        logits[-1] = last
        head = HeadBuffers(gpu.upload(logits, "logits"), ring, make.step)
        run(gpu, [make.check_logits({"VOCAB": 3000, "CHECKS": 1}, {"ring": ring, "logits": head.logits}, head)])
        found.append(gpu.read(ring, np.uint32, 2))
    return np.array(found), np.array([[0, 0], [0, 1]])


def mask_logits(gpu: Gpu) -> Answer:
    """The logits that a mask leaves, and the likeliest token of them."""
    sampler, words, before, after = scored(gpu, SampleKind(greedy=True, masked=True))
    left = np.arange(3000) % 3 > 0
    token, _ = sampler.token(words, 0, 1)
    likeliest = np.where(left, before, LOWEST).argmax()
    return np.append(np.where(left, after, after / LOWEST), token - likeliest), np.append(np.where(left, before, 1), 0)


def top_logprobs(gpu: Gpu) -> Answer:
    sampler, words, before, _ = scored(gpu, SampleKind(greedy=True, logprobs=True))
    token, got = sampler.token(words, 0, 1)[0], sampler.token_scores(words, 0, 1, 4)
    wide = before.astype(np.float64)
    logs, best = wide - np.log(np.exp(wide).sum()), np.argsort(-wide)[:4]
    return np.array([got.logprob, *got.logprobs, *(best - got.ids)]), np.array([logs[token], *logs[best], 0, 0, 0, 0])


def log_prob(gpu: Gpu) -> Answer:
    logits = random("log_prob").standard_normal((3, 1025)).astype(np.float32) * 4
    targets, out = np.array([0, 500, 1024], np.uint32), gpu.zeros(12, "out")
    make = Ops(gpu, step_buffer(gpu, 3))
    run(gpu, [make.log_prob(gpu.upload(logits, "logits"), gpu.upload(targets, "targets"), out, 1025)], 3)
    wide = logits.astype(np.float64)
    return gpu.read(out, np.float32, 3), wide[range(3), targets] - np.log(np.exp(wide).sum(axis=1))


def byte_counts(gpu: Gpu) -> Answer:
    """How often each byte value appears: 1172 times each, 34 more or less."""
    words = gpu.zeros(300_000, "words")
    synthetic.fill_buffer(gpu, Recorder(gpu), words)
    return np.bincount(gpu.read(words, np.uint8, 300_000), minlength=256), np.full(256, 300_000 / 256)


def copy(gpu: Gpu) -> Answer:
    x = random("copy").integers(0, 1 << 32, 4096, np.uint32)
    y = gpu.zeros(x.nbytes, "y")
    run(gpu, [gpu.dispatch("copy", (), {"VEC4S": 1024}, {"x": gpu.upload(x, "x"), "y": y}, (2, 1, 1))])
    return gpu.read(y, np.uint32, 4096), x


def barrier_litmus(gpu: Gpu) -> Answer:
    """With the first grid size whose workgroups run at the same time; with one workgroup where nothing is fused."""
    layers = gpu.upload(np.array([LITMUS_LAYERS, 0, 0, 0], np.uint32), "layers", BufferUsage.UNIFORM)
    sizes = routes.grid_sizes(dim=2048, heads_per_kv=4, caps=gpu.caps) if gpu.caps.grid_barrier else ()
    for grid in (*sizes, GridSize(1, 256)):
        barrier = gpu.upload(np.array([0, 0, PROBE_SPIN_LIMIT, 0], np.uint32), "barrier")
        answers = [fused_decode.barrier_litmus_test(gpu, grid, barrier, layers, seed) for seed in (1, 2, 3)]
        if not gpu.read(barrier, np.uint32, 2)[1]:  # no workgroup timed out
            break
    got, want = map(np.concatenate, zip(*answers, strict=True))
    return got, want


def peak(gpu: Gpu) -> Answer:
    x, y = gpu.upload(np.array([0.5, 1.0, 2.0, 0.0], np.float32), "x"), gpu.zeros(1024, "y")
    run(gpu, [gpu.dispatch("peak", (), {"ITERATIONS": 64}, {"x": x, "y": y}, (1, 1, 1))])
    return gpu.read(y, np.float32, 256), np.full(256, 64.0)
