"""The kernels of experts against float64."""

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine import ops, routes
from llamagpu.engine.ops import Choices, Ops
from llamagpu.engine.routes import ExpertLinear, Inputs, Route
from llamagpu.engine.weights import Matrix
from llamagpu.files.architectures import Activation
from llamagpu.files.storage import Storage, dequantize
from llamagpu.gpu.device import Gpu
from llamagpu.verify.architecture_kernels import gated
from llamagpu.verify.reference import (
    INT8_BLOCK,
    REQUANTISED,
    Answer,
    Case,
    Floats,
    Weight,
    dequantise_blocks,
    fits,
    linear_inputs,
    only,
    random,
    read_blocks,
    round_int8,
    run,
    step_buffer,
)

EXPERTS, USED = 6, 3
WEIGHT, RAGGED = Weight(Storage.Q4, 64, 160), Weight(Storage.BF16, 9, 33)  # of one expert


def expert_cases(gpu: Gpu) -> Iterator[Case]:
    yield Case("top_experts", "3 of 130, m 2", partial(top, gpu, 130, 3, True, 2))
    yield Case("sum_experts", "3 of 6, width 129, m 3", partial(total, gpu, 129, 3))
    yield Case("group_experts", "3 of 6, m 20", partial(group, gpu, 20))
    for route in routes.EXPERT_LINEAR:
        for weight, inputs, m in ((WEIGHT, Inputs.F32, 2), (WEIGHT, Inputs.INT8, 20), (RAGGED, Inputs.F32, 2)):
            name = f"{weight.name}, {inputs} x, m {m}, {route.needs}"
            if fits(route, shape_of(weight, inputs, m), gpu.caps):
                yield Case(route.kernel, name, partial(linear, gpu, route, weight, inputs, m))
    for route in routes.EXPERT_LINEAR:
        if "int8 results" in route.needs and route.consts["WORKGROUP"] <= gpu.caps.invocations:
            for activation in Activation:
                compare = partial(hidden, gpu, route, 2, activation)
                yield Case(route.kernel, f"{activation}, {route.needs}", compare, REQUANTISED)


def shape_of(weight: Weight, inputs: Inputs, m: int) -> ExpertLinear:
    return ExpertLinear(weight.shape(m, inputs), EXPERTS, USED, routes.groups_experts(m))


def choose(gpu: Gpu, m: int) -> tuple[Choices, NDArray[np.uint32], NDArray[np.float32]]:
    """Random choices on the device, the experts [m, USED], and their weights. Half of the tokens choose the same."""
    rng = random("choices")
    experts = np.array([rng.permutation(EXPERTS)[:USED] for _ in range(m)], np.uint32)
    experts[: m // 2] = experts[0]
    weights = rng.uniform(0, 1, (m, USED)).astype(np.float32)
    chosen = gpu.upload(np.stack([experts, weights.view(np.uint32)], axis=2), "chosen")
    groups = gpu.zeros(16 * routes.expert_tiles(m, USED, EXPERTS) + 4 * m * USED, "groups")
    return Choices(EXPERTS, USED, chosen, groups), experts, weights


def top(gpu: Gpu, experts: int, used: int, whole: bool, m: int) -> Answer:
    """[m, used, (expert, weight)], of logits many of which are equal."""
    logits = np.rint(random("logits").standard_normal((m, experts)) * 6).astype(np.float32) / np.float32(2)
    chosen, make = gpu.zeros(8 * m * used, "chosen"), Ops(gpu, step_buffer(gpu, m))
    run(gpu, [make.top_experts(gpu.upload(logits, "x"), Choices(experts, used, chosen, chosen), whole, m)], m)
    got = gpu.read(chosen, np.uint32, 2 * m * used).reshape(m, used, 2)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :used]
    shares = np.exp(logits.astype(np.float64))
    shares /= shares.sum(axis=1, keepdims=True)
    want = np.take_along_axis(shares, order, axis=1)
    want = want / want.sum(axis=1, keepdims=True) if whole else want
    weights = np.ascontiguousarray(got[..., 1]).view(np.float32)
    return np.stack([got[..., 0], weights], axis=2), np.stack([order, want], axis=2)


def total(gpu: Gpu, width: int, m: int) -> Answer:
    choices, _, weights = choose(gpu, m)
    x = random("x").standard_normal((m, USED, width)).astype(np.float32)
    before = random("y").standard_normal((m, width)).astype(np.float32)
    y, make = gpu.upload(before, "y"), Ops(gpu, step_buffer(gpu, m))
    run(gpu, [make.sum_experts(gpu.upload(x, "x"), y, width, choices, m)], m)
    want = before + (x * weights[..., None].astype(np.float64)).sum(axis=1)
    return gpu.read(y, np.float32, before.size).reshape(m, width), want


def group(gpu: Gpu, m: int) -> Answer:
    """How often each choice is in a tile of its expert."""
    choices, experts, _ = choose(gpu, m)
    run(gpu, [Ops(gpu, step_buffer(gpu, m)).group_experts(choices, m)], m)
    tiles = routes.expert_tiles(m, USED, EXPERTS)
    words = gpu.read(choices.groups, np.uint32, 4 * tiles + m * USED)
    found = np.zeros(m * USED)
    for expert, first, count, _ in words[: 4 * tiles].reshape(-1, 4):
        listed = words[4 * tiles :][first : first + count]
        found[listed] += experts.reshape(-1)[listed] == expert
    return found, np.ones(m * USED)


def upload(gpu: Gpu, weight: Weight) -> tuple[Matrix, Floats, Floats]:
    """Experts in two shards; all of them as [EXPERTS, n, k], and their biases [EXPERTS, n]."""
    counts = 2, EXPERTS - 2
    parts = [Weight(weight.storage, count * weight.n, weight.k, weight.group) for count in counts]
    uploads = [part.upload(gpu, row0) for part, row0 in zip(parts, (0, parts[0].n), strict=True)]
    shards = tuple(shard for shard, _ in uploads)
    values = np.concatenate([dequantize(packed) for _, packed in uploads])
    bias = random("bias").uniform(-9, 9, (EXPERTS, weight.n)).astype(np.float32)
    matrix = Matrix(weight.n, weight.k, shards, gpu.upload(bias, "bias"), EXPERTS, USED)
    return matrix, values.reshape(EXPERTS, weight.n, weight.k), bias.astype(np.float64)


def linear(
    gpu: Gpu, route: Route[ExpertLinear], weight: Weight, inputs: Inputs, m: int, own_inputs: bool = False
) -> Answer:
    choices, experts, _ = choose(gpu, m)
    matrix, w, bias = upload(gpu, weight)
    given = linear_inputs(gpu, m * (USED if own_inputs else 1), weight.k, inputs)
    y, make = gpu.zeros(4 * m * USED * weight.n, "y"), Ops(gpu, step_buffer(gpu, m))
    groups = [make.group_experts(choices, m)] if routes.groups_experts(m) else []
    output = ops.store(y, matrix)
    found = make.expert_linear(given.x, matrix, m, output, choices, inputs, own_inputs, only(route))
    run(gpu, [*groups, *found], m)
    x = given.values.reshape(m, -1, weight.k).repeat(1 if own_inputs else USED, axis=1)
    want = np.einsum("mejk,mek->mej", w[experts], x) + bias[experts]
    return gpu.read(y, np.float32, want.size).reshape(want.shape), want


def hidden(gpu: Gpu, route: Route[ExpertLinear], m: int, activation: Activation) -> Answer:
    """Gate and up, their product as int8 blocks."""
    choices, experts, _ = choose(gpu, m)
    matrix, w, bias = upload(gpu, WEIGHT)
    given = linear_inputs(gpu, m, WEIGHT.k, Inputs.INT8)
    blocks = WEIGHT.n // 64
    y, make = gpu.zeros(m * USED * blocks * INT8_BLOCK.itemsize, "y"), Ops(gpu, step_buffer(gpu, m))
    output = ops.glu_blocks(y, matrix, activation)
    run(gpu, make.expert_linear(given.x, matrix, m, output, choices, Inputs.INT8, table=only(route)), m)
    results = (np.einsum("mejk,mk->mej", w[experts], given.values) + bias[experts]).reshape(-1, WEIGHT.n)
    want = gated(results[:, ::2], results[:, 1::2], activation)
    return dequantise_blocks(read_blocks(gpu, y, m * USED, blocks)), round_int8(want)
