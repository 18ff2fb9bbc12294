"""The transformer on the device: buffers, the plan of dispatches for m tokens, prefill and decode. Token ids only."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import wgpu

from llamagpu.engine import ops
from llamagpu.engine.layers import JoinedLayers, layer_stride, stage_fits
from llamagpu.engine.sampler import Sampling
from llamagpu.engine.weights import Layer, Matrix, Weights, joinable
from llamagpu.errors import DeviceLost, DoesNotFit
from llamagpu.files.config import LlamaConfig, rope_table
from llamagpu.gpu import routes
from llamagpu.gpu.device import ALIGN, Dispatch, Gpu, Slice, whole, with_gaps
from llamagpu.gpu.recorder import Plan, Recorder, Step

CHUNK = 512  # most tokens of a prefill step, where the caller does not say: bounds the scratch buffers
LOGIT_BYTES = 64 << 20  # of logits when every position has them
RING = 64  # picked tokens the device keeps: more than AHEAD batches
MOST_RECENT = 256  # tokens a repetition penalty on the device looks back
BATCH = 8  # most decode steps in one submission
AHEAD = 3  # submissions in flight: one runs, one waits for it, one is being handed in
APART = "workgroups that wait for each other did not run at the same time"
TOGETHER = "set LLAMAGPU_JOIN=0"
VISIBLE_S = 0.015  # a batch lasts no longer: text should appear within 50 ms
Progress = Callable[[int, int], None]


class Transformer:
    """One sequence: `history` are the ids whose keys and values are in the cache."""

    layout = "buffers"  # of the cache

    def __init__(
        self,
        gpu: Gpu,
        config: LlamaConfig,
        weights: Weights,
        freq_factors: np.ndarray[Any, Any] | None,
        context: int,
        limit: int | None = None,
        chunk: int = CHUNK,
        kv_f32: bool = False,
        fast: bool = False,
    ) -> None:
        self.gpu, self.config, self.weights = gpu, config, weights
        self.freq_factors = freq_factors
        self.kv_f32 = kv_f32
        # int8 activations, for one token and for many; a file with odd shapes or types stays with f32
        self.fast = fast and suits_i8(config, weights, gpu, 1)
        self.fast_many = fast and suits_i8(config, weights, gpu, CHUNK)
        self.joins_norm = routes.norm_in_linear(config.dim, gpu.caps)
        # attention of many tokens in int8 and f16; biases can make keys so large that int8 does not tell them apart
        self.rough = self.fast_many and all(layer.qkv.bias is None for layer in weights.layers)
        self.limit = limit or context  # the cache starts with room for `context` positions and grows to this
        self.chunk = min(chunk, self.limit)
        self.recorder = Recorder(gpu)
        self.pace = 1  # decode steps in a submission: as many as the last text's went by in VISIBLE_S
        self.history: list[int] = []
        self.plans: dict[tuple[Any, ...], Plan] = {}
        self.activations()
        c, rows = config, self.chunk
        self.logits = gpu.zeros(c.vocab * 4, "logits")  # [vocab] of the last token
        self.tokens = gpu.zeros(rows * 4, "tokens")  # [m] u32 input ids; [0] is what `pick` chose
        self.step = gpu.zeros(16, "step", wgpu.BufferUsage.UNIFORM)  # pos, m, capacity, count
        self.targets = gpu.zeros(rows * 4, "targets")  # [m] u32, for perplexity: the id after each
        self.scores = gpu.zeros(rows * 4, "scores")  # [m] f32, its log probability
        self.best = gpu.zeros(-(-c.vocab // 2) * 8, "best")  # candidates (logit, id), at most one per pair of rows
        # [RING] u32 picked ids, then those a penalty looks at, then the meeting of joined layers
        self.ring = gpu.zeros((RING + MOST_RECENT + 4) * 4, "ring")
        self.sampling = gpu.zeros(32, "sampling", wgpu.BufferUsage.UNIFORM)
        self.meeting = Slice(self.ring, 4 * (RING + MOST_RECENT), 16)  # read back with the tokens
        self.joined = self.join_layers()
        self.capacity = 0
        self.caches: list[tuple[Any, Any]] = []  # by layer: keys, values, [kv_heads, capacity, head_dim]
        self.rope: Any = None  # [capacity, rope_dims/2] (cos, sin)
        self.reserve(context)
        if self.joined and not self.joined.find_crew(self.caches, self.rope, self.recorder):
            self.part_layers()

    def join_layers(self) -> JoinedLayers | None:
        """The layers of one token as one kernel, where that is possible."""
        c, fits = self.config, all(map(stage_fits, self.weights.layers))
        if self.layout != "buffers" or not fits or not joinable(c, self.gpu, self.fast):
            return None
        return JoinedLayers(
            self.gpu, c, self.weights, self.x, self.step, self.meeting, self.kv_f32, self.fast
        )

    def part_layers(self) -> None:
        """From here on every stage is a dispatch of its own, which can be timed."""
        if self.joined:
            self.joined.free()
            self.joined = None
            self.plans.clear()
            self.gpu.write(self.meeting, np.zeros(4, np.uint32))  # a trial may have been given up

    # Memory

    def activations(self) -> None:
        """What the kernels of a step hand to each other."""
        gpu, c, rows = self.gpu, self.config, self.chunk
        # int8 records do without the f32 of the same, but where attention's kernel does not make them
        wide = rows if not (self.fast and self.fast_many) else 1
        rounded = rows if self.fast_many else 1
        attended = wide if routes.attention_records(c.head_dim, c.heads // c.kv_heads, gpu.caps) else rows
        # [m, dim] residual stream, or [layers + 1, dim] with gaps
        self.x = gpu.zeros(max(rows * c.dim * 4, (c.layers + 1) * layer_stride(c.dim)), "x")
        widest = max(c.dim, c.heads * c.head_dim)
        self.h = gpu.zeros(attended * widest * 4, "h")  # [m, dim] normalised; [m, heads, head_dim] attended
        self.q = gpu.zeros(rows * c.heads * c.head_dim * 4, "q")  # [m, heads, head_dim] rotated queries
        self.act = gpu.zeros(wide * c.ffn_dim * 4, "act")  # [m, ffn] silu(gate) * up
        self.h_i8 = gpu.zeros(rounded * widest // 32 * 48, "h_i8")  # [m, dim/32] records: normalised, then attended
        self.act_i8 = gpu.zeros(rounded * c.ffn_dim // 32 * 48, "act_i8")  # [m, ffn/32] records
        self.partial = gpu.zeros(c.heads * routes.MOST_SPLITS * c.head_dim * 4, "partial")  # [heads, splits, head_dim]
        self.stats = gpu.zeros(c.heads * routes.MOST_SPLITS * 8, "stats")  # [heads, splits] (top, total)

    def reserve(self, context: int) -> None:
        """Make room for `context` positions; what the cache holds is kept."""
        if context <= self.capacity:
            return
        self.check_most(context)
        c, gpu, old = self.config, self.gpu, self.capacity
        # whole 16-byte words per head for every kernel, whatever the head_dim
        capacity = -(-context // 4) * 4
        size = c.kv_heads * capacity * c.head_dim * self.kv_bytes
        if size > gpu.caps.binding_bytes:
            most = gpu.caps.binding_bytes // (size // capacity) // 4 * 4
            raise DoesNotFit(
                f"a context of {context} needs {size >> 20} MiB of cache per layer; "
                f"a binding holds {gpu.caps.binding_bytes >> 20}",
                f"use -c {most} or less, or an f16 cache (-ctk f16 -ctv f16)",
            )
        caches = self.new_caches(size)
        rope = gpu.upload(rope_table(c, self.freq_factors, capacity), "rope")
        if old:
            self.copy_caches(caches, old, capacity)
        freed = {id(b := whole(k)): b for pair in self.caches for k in pair} | {0: self.rope} if old else {}
        self.plans.clear()  # and then all at once: a Ctrl-C finds the old cache or the new one, whole
        self.caches, self.rope, self.capacity = caches, rope, capacity
        gpu.free(*freed.values())

    def new_caches(self, size: int) -> list[tuple[Any, Any]]:
        """By layer; one behind the other where layers are joined, as far as a binding reaches."""
        gpu, layers = self.gpu, self.config.layers
        found: list[tuple[Any, Any]] = []
        room = min(gpu.caps.binding_bytes, gpu.limits["max-buffer-size"] - 2 * ALIGN)
        most = max(1, room // size) if self.joined else 1
        for start in range(0, layers, most):
            count = min(most, layers - start)
            found += zip(*(with_gaps(gpu, [size] * count, label) for label in ("k_cache", "v_cache")), strict=True)
        return found

    def check_most(self, context: int) -> None:
        most = routes.most_positions(self.config.head_dim, self.gpu.caps, self.layout == "images")
        if most and context > most:
            cause = f"a context of {context} is more than a CPU adapter can do with this model"
            raise DoesNotFit(cause, f"use -c {most} or less")

    @property
    def kv_bytes(self) -> int:
        return 4 if self.kv_f32 else 2

    def copy_caches(self, caches: list[tuple[Any, Any]], old: int, new: int) -> None:
        encoder = self.gpu.device.create_command_encoder()
        row = self.config.head_dim * self.kv_bytes
        for before, after in zip(self.caches, caches, strict=True):
            for source, target in zip(before, after, strict=True):
                for head in range(self.config.kv_heads):
                    encoder.copy_buffer_to_buffer(
                        source.buffer, source.offset + head * old * row,
                        target.buffer, target.offset + head * new * row, old * row,
                    )  # fmt: skip
        self.gpu.device.queue.submit([encoder.finish()])

    # The cache, out of the device and back

    @property
    def position_bytes(self) -> int:
        c = self.config
        return 2 * c.layers * c.kv_heads * c.head_dim * self.kv_bytes

    @property
    def cache_kind(self) -> dict[str, str]:
        """What the bytes in the cache depend on besides the model and the ids."""
        precision = "fast" if self.fast and self.fast_many else "mixed" if self.fast or self.fast_many else "high"
        return {"cache type": "f32" if self.kv_f32 else "f16", "precision": precision, "layout": self.layout}

    def read_cache(self, count: int) -> Iterator[np.ndarray[Any, Any]]:
        """The bytes of the first `count` positions, a head of a layer at a time."""
        row = self.config.head_dim * self.kv_bytes
        for buffer, offset in self.cache_heads():
            yield self.gpu.read(buffer, np.uint8, count * row, offset)

    def write_cache(self, count: int, take: Callable[[int], np.ndarray[Any, Any]]) -> None:
        """The way back: `take(n)` gives the next n of the bytes that `read_cache` gave."""
        row = self.config.head_dim * self.kv_bytes
        for buffer, offset in self.cache_heads():
            self.gpu.write(buffer, take(count * row), offset)

    def cache_heads(self) -> Iterator[tuple[Any, int]]:
        """Where each head's positions begin: buffer, offset."""
        stride = self.capacity * self.config.head_dim * self.kv_bytes
        for buffer in chain.from_iterable(self.caches):
            for head in range(self.config.kv_heads):
                yield buffer, head * stride

    # Plans

    def plan(self, m: int, pos: int = 0, embed: bool = True) -> Plan:
        """Every dispatch from up to m token ids to the logits of the last one and the candidates of a choice.

        At long contexts attention is split; without `embed` the first embedding is in x (`choose` put it there).
        """
        reach = self.reach(m, pos)
        key = ("plan", m, reach, embed)
        if key not in self.plans:
            h, head = self.normed(1), self.weights.output
            self.plans[key] = Plan(
                [
                    *self.body(m, reach, embed),
                    self.norm(self.weights.output_norm, 1, last=True, x=self.after_layers(m)),
                    *ops.head(self.gpu, h, head, self.logits, self.best, self.step, self.inputs(1)),
                ]
            )
        return self.plans[key]

    def body(self, m: int, reach: int = 0, embed: bool = True) -> list[Dispatch]:
        """From token ids to the residual stream after the last layer; keys and values go into the caches."""
        dispatches = ops.embed(self.gpu, self.tokens, self.weights.token_embd, self.x, m) if embed else []
        if m == 1 and self.joined:
            return dispatches + self.joined.dispatches(self.caches, self.rope)
        for layer, caches in zip(self.weights.layers, self.caches, strict=True):
            dispatches += self.block(layer, *caches, m, reach)
        return dispatches

    def after_layers(self, m: int) -> Any:
        """Where `body` leaves the residual stream."""
        c = self.config
        return Slice(self.x, c.layers * layer_stride(c.dim), 4 * c.dim) if m == 1 and self.joined else self.x

    def block(self, layer: Layer, k_cache: Any, v_cache: Any, m: int, reach: int) -> list[Dispatch]:
        c = self.config
        to_qkv = ops.qkv(c, layer.qkv, self.q, k_cache, v_cache, self.rope, self.kv_f32)
        return [
            *self.norm_linear(layer.attn_norm, layer.qkv, m, to_qkv),
            *self.attend_linear(layer.attn_output, k_cache, v_cache, m, reach),
            *self.feed_forward(layer, m),
        ]

    def norm_linear(self, norm: Any, matrix: Matrix, m: int, out: ops.Out) -> list[Dispatch]:
        """The linear of the normalised residual stream: one dispatch where its kernel can normalise, else two."""
        c, gpu, step, inputs = self.config, self.gpu, self.step, self.inputs(m)
        if inputs == "i8" and m == 1 and self.joins_norm:
            made = ops.Made({"norm": norm}, {"EPS": c.norm_eps})
            return ops.linear(gpu, self.x, matrix, m, out, step, "norm", made=made)
        return [self.norm(norm, m), *ops.linear(gpu, self.normed(m), matrix, m, out, step, inputs)]

    def norm(self, weight: Any, m: int, last: bool = False, x: Any = None) -> Dispatch:
        table = routes.NORM_I8 if self.inputs(m) == "i8" else routes.NORM
        c = self.config
        x = x or self.x
        return ops.rms_norm(self.gpu, x, weight, self.normed(m), c.dim, c.norm_eps, m, self.step, last, table)

    def attend_linear(self, matrix: Matrix, k_cache: Any, v_cache: Any, m: int, reach: int) -> list[Dispatch]:
        """Attention and the linear that takes it back to the residual stream. Of a split context the parts are joined
        by the linear's kernel where that is cheap, else by a dispatch between them."""
        c, gpu, step, inputs = self.config, self.gpu, self.step, self.inputs(m)
        i8, width, h = inputs == "i8", c.heads * c.head_dim, self.normed(m)
        kernel, out = self.attention(m), ops.add(self.x, matrix)
        splits = routes.splits(reach, c.kv_heads, m) if kernel == "attend_split" else 1
        records = i8 and kernel in routes.RECORDING
        found = ops.attend(
            gpu, c, self.q, k_cache, v_cache, self.partial if splits > 1 else h if records else self.h, m, step,
            self.kv_f32, i8=i8, splits=splits, stats=self.stats, reach=reach, rough=self.rough,
        )  # fmt: skip
        if splits > 1 and i8 and m == 1 and routes.merge_in_linear(width, splits):
            made = ops.Made(
                {"stats": self.stats}, {"HEAD_DIM": c.head_dim, "SPLITS": splits}, ("splits_fixed",)
            )
            return [found, *ops.linear(gpu, self.partial, matrix, m, out, step, "merge", made=made)]
        between = []
        if splits > 1:
            between = [ops.attend_merge(gpu, c, self.partial, self.stats, h, splits, i8, m)]
        elif i8 and not records:
            between = [ops.to_i8(gpu, self.h, h, width, m, step)]
        return [found, *between, *ops.linear(gpu, h, matrix, m, out, step, inputs)]

    def feed_forward(self, layer: Layer, m: int) -> list[Dispatch]:
        gpu, step, inputs = self.gpu, self.step, self.inputs(m)
        down, act = layer.ffn_down, self.act_i8 if inputs == "i8" else self.act
        if len(layer.gate_up) == 1:
            joined = layer.gate_up[0]
            out = ops.swiglu_i8(act, joined) if inputs == "i8" else ops.swiglu(act, joined)
            hidden = self.norm_linear(layer.ffn_norm, joined, m, out)
        else:
            hidden = self.gate_and_up(layer, m)
        return [*hidden, *ops.linear(gpu, act, down, m, ops.add(self.x, down), step, inputs)]

    def gate_and_up(self, layer: Layer, m: int) -> list[Dispatch]:
        """For files whose gate and up are of different types: two linears, then silu(gate) * up."""
        gpu, step = self.gpu, self.step
        gate, up = layer.gate_up
        if not hasattr(self, "up"):
            self.up = gpu.zeros(self.chunk * self.config.ffn_dim * 4, "up")  # [m, ffn]
        return [
            self.norm(layer.ffn_norm, m),
            *ops.linear(gpu, self.h, gate, m, ops.store(self.act, gate), step),
            *ops.linear(gpu, self.h, up, m, ops.store(self.up, up), step),
            ops.silu_mul(gpu, self.act, self.up, self.config.ffn_dim, m, step),
        ]

    # Where the activations of a plan live: f32, or int8 records (precision fast)

    def inputs(self, m: int) -> str:
        return "i8" if (self.fast if m == 1 else self.fast_many) else "f32"

    def normed(self, m: int) -> Any:
        return self.h_i8 if self.inputs(m) == "i8" else self.h

    def attention(self, m: int) -> str:
        c = self.config
        return routes.pick(routes.attention(c.heads // c.kv_heads, self.gpu.caps), c.head_dim, m, self.gpu.caps).kernel

    def reach(self, m: int, pos: int) -> int:
        """How far back attention looks, as the first number of positions for which the plan is the same."""
        if self.attention(m) != "attend_split" or (m == 1 and self.joined):
            return 0
        return routes.reach(min(pos + 1, self.config.sliding_window or pos + 1))

    def choose(self, drawn: bool = False) -> Plan:
        """The next input token, chosen on the device: the best candidate, or one drawn as `sampling` says."""
        if ("choose", drawn) not in self.plans:
            head, table = self.weights.output, self.weights.token_embd
            count = ops.candidates(self.gpu, head, self.inputs(1))
            pick = ops.pick(
                self.gpu, self.best, count, self.tokens, self.ring, RING, self.step, table, self.x,
                self.logits, self.sampling if drawn else None, ops.rows_each(self.gpu, head, self.inputs(1)),
            )  # fmt: skip
            self.plans["choose", drawn] = Plan([pick])
        return self.plans["choose", drawn]

    def scoring_plan(self, m: int) -> Plan:
        """From token ids to the log probability of the target after each: logits for all of the m rows."""
        if ("score", m) not in self.plans:
            c, gpu, head, inputs, h = self.config, self.gpu, self.weights.output, self.inputs(m), self.normed(m)
            logits = gpu.zeros(m * c.vocab * 4, "all logits")  # [m, vocab]
            x = self.after_layers(m)
            norm = self.norm(self.weights.output_norm, m, x=x)
            if not all(routes.fits_any(routes.LINEAR, part.shape(m, inputs), gpu.caps) for part in head.parts):
                inputs, h = "f32", gpu.zeros(m * c.dim * 4, "normed")  # f16, which int8 records have no kernel for
                norm = ops.rms_norm(gpu, x, self.weights.output_norm, h, c.dim, c.norm_eps, m, self.step)
            self.plans["score", m] = Plan(
                [
                    *self.body(m, self.reach(m, 0)),
                    norm,
                    *ops.linear(gpu, h, head, m, ops.store(logits, head), self.step, inputs),
                    ops.log_prob(gpu, logits, self.targets, self.scores, c.vocab),
                ]
            )
        return self.plans["score", m]

    # Running

    def room_for(self, tokens: int) -> None:
        """Grow the cache, at least twofold, so that `tokens` more fit; refuse what the limit does not hold."""
        wanted = len(self.history) + tokens
        if wanted > self.limit:
            raise DoesNotFit(
                f"the context holds {self.limit} tokens: {len(self.history)} are in it and {tokens} more were given",
                "use a larger -c, or a shorter prompt",
            )
        if wanted > self.capacity:
            self.reserve(min(self.limit, max(wanted, 2 * self.capacity)))

    def prefill(self, ids: Sequence[int], progress: Progress | None = None) -> None:
        """Append ids to the cache; afterwards `logits` belong to the last of them."""
        self.room_for(len(ids))
        for start in range(0, len(ids), self.chunk):
            chunk = ids[start : start + self.chunk]
            self.run(self.plan(min(self.chunk, routes.width(len(chunk), self.chunk)), len(self.history)), chunk)
            if progress:
                self.gpu.read(
                    self.step, np.uint32, 1
                )  # wait, so that progress is true and Ctrl-C acts between chunks
                progress(start + len(chunk), len(ids))

    def run(self, plan: Plan, ids: Sequence[int]) -> None:
        """One step of a plan over at most a chunk of ids."""
        self.gpu.write(self.tokens, np.array(ids, np.uint32))
        self.gpu.write(self.step, np.array([len(self.history), len(ids), self.capacity, 0], np.uint32))
        self.recorder.submit([(plan, len(ids), len(self.history))])
        self.history += ids

    def read_logits(self) -> np.ndarray[Any, Any]:
        self.need_met()
        return self.gpu.read(self.logits, np.float32, self.config.vocab)

    def need_met(self) -> None:
        """What joined layers compute is wrong once one of their waits has been given up."""
        if self.joined and self.gpu.read(self.meeting, np.uint32, 2)[1]:
            raise DeviceLost(APART, TOGETHER)

    def log_probs(self, ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """Append ids; for each but the last, the log probability the model gave to the id after it."""
        self.room_for(len(ids))
        # logits of all rows exist for a few rows at a time, whatever the chunk
        rows = max(1, min(self.chunk, LOGIT_BYTES // (4 * self.config.vocab)))
        scores = []
        for start in range(0, len(ids), rows):
            chunk = ids[start : start + rows]
            self.gpu.write(
                self.targets, np.array([*ids[start + 1 : start + rows + 1], 0][: len(chunk)], np.uint32)
            )
            self.run(self.scoring_plan(rows), chunk)
            scores.append(self.gpu.read(self.scores, np.float32, len(chunk)))
        self.need_met()
        return np.concatenate(scores)[: len(ids) - 1]

    def truncate(self, length: int) -> None:
        """Forget what stands after `length` tokens."""
        del self.history[length:]

    def sample(self, choose: Callable[[np.ndarray[Any, Any]], int]) -> Iterator[int]:
        """Continue the sequence with tokens that the host chooses from the logits, until the context is full."""
        while True:
            token = choose(self.read_logits())
            yield token
            if len(self.history) == self.limit:
                return
            self.prefill([token])

    def greedy(self, most: int | None = None) -> Iterator[int]:
        """Continue the sequence with the likeliest tokens, at most `most`, until the context is full."""
        return self.go_on(self.choose, most)

    def draw(self, sampling: Sampling, prompt: Sequence[int], most: int | None = None) -> Iterator[int]:
        """Continue the sequence with tokens drawn on the device, at most `most`, until the context is full.
        `sampling` must be one that `draws_on_device`."""
        s = sampling
        seed = np.random.default_rng().integers(1 << 32) if s.seed is None else s.seed
        last_n = s.repeat_last_n if s.repeat_penalty != 1.0 else 0
        cold = s.temperature <= 0  # the likeliest after the penalty
        reals = np.array([1.0 if cold else s.temperature, s.top_p, s.min_p, s.repeat_penalty], np.float32)
        wholes = np.array([1 if cold else s.top_k, int(seed) & 0xFFFFFFFF, last_n, 0], np.uint32)
        self.gpu.write(self.sampling, np.concatenate([reals.view(np.uint32), wholes]))
        if last_n:
            seen = [0xFFFFFFFF] * last_n + list(prompt)  # no token, where the prompt is shorter
            self.gpu.write(self.ring, np.array(seen[-last_n:], np.uint32), offset=4 * RING)
        return self.go_on(lambda: self.choose(drawn=True), most)

    def draws_on_device(self, sampling: Sampling) -> bool:
        head = self.weights.output
        runs = all(part.row0 % 64 == 0 for part in head.parts)  # candidates are runs of 32 or 64 rows
        recent = sampling.repeat_penalty == 1.0 or sampling.repeat_last_n <= MOST_RECENT
        return runs and recent and (sampling.temperature <= 0 or 1 <= sampling.top_k <= 64)

    def go_on(self, choose: Callable[[], Plan], most: int | None) -> Iterator[int]:
        """Tokens that the device chooses and feeds to itself, read back a batch behind: while the consumer gets one
        batch of steps, the next ones run or wait.

        When the consumer stops, the steps ahead of it are dropped: `history` holds what was yielded, less the last.
        """
        # the first choice is from the logits that are there; it moves the position on
        self.gpu.write(self.step, np.array([len(self.history) - 1, 1, self.capacity, 0], np.uint32))
        pending = deque([(self.recorder.submit([(choose(), 1, 0)], self.ring), 1)])
        ahead = len(self.history)  # positions filled or being filled
        end = self.limit if most is None else min(self.limit, ahead + most - 1)
        picked, size, took, last = 0, self.pace, 0.0, time.perf_counter()
        try:
            while True:
                while len(pending) < AHEAD and (steps := min(size, end - ahead)):
                    if ahead + steps > self.capacity:
                        if pending:
                            break  # the cache can grow only when nothing is in flight
                        self.reserve(min(self.limit, 2 * self.capacity))
                        self.gpu.write(self.step, np.array([self.capacity], np.uint32), offset=8)
                    batch = self.recorder.submit(self.steps(ahead, steps, choose()), self.ring, ahead=True)
                    pending.append((batch, steps))
                    ahead += steps
                if not pending:
                    self.truncate(ahead)  # the last token has not been put in
                    return
                result, count = pending.popleft()
                ring = result.wait()
                if ring[RING + MOST_RECENT + 1]:  # as need_met
                    raise DeviceLost(APART, TOGETHER)
                now = time.perf_counter()
                if picked:  # the first choice waited for the prompt
                    took, before = (now - last) / count, took  # a step; of two batches one may have waited for the host
                    size = self.pace = max(1, min(2 * size, BATCH, int(VISIBLE_S / max(took, before))))
                last = now
                for i in range(picked, picked + count):
                    token = int(ring[i % RING])
                    yield token
                    self.history.append(token)
                picked += count
        finally:
            self.recorder.settle()
            for result, _ in pending:
                result.wait()

    def steps(self, pos: int, count: int, choose: Plan) -> list[Step]:
        """`count` decode steps from position `pos` on, each feeding the next on the device."""
        embed = not ops.embeds_next(self.gpu, self.weights.token_embd)
        return [step for p in range(pos, pos + count) for step in ((self.plan(1, p, embed), 1, p), (choose, 1, p))]


def suits_i8(config: LlamaConfig, weights: Weights, gpu: Gpu, m: int) -> bool:
    """Every linear has a kernel for int8 records, and gate and up are one matrix."""

    def runs(matrix: Matrix, out: str = "out_add") -> bool:
        return all(routes.fits_any(routes.LINEAR, part.shape(m, "i8", out), gpu.caps) for part in matrix.parts)

    joined = all(len(layer.gate_up) == 1 for layer in weights.layers)
    matrices = [x for layer in weights.layers for x in (layer.qkv, layer.attn_output, layer.ffn_down)]
    return joined and all(map(runs, matrices)) and all(runs(x.gate_up[0], "out_swiglu_i8") for x in weights.layers)
