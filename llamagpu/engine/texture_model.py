"""The texture backend: the model on a CPU adapter (llvmpipe), with weights, activations and KV cache in textures.

On llvmpipe a lane reads 16 bytes from a texture in 2 ns and from a buffer in 36 ns (Mesa 22.3, Neoverse-N1: it reads a
buffer in a loop over the lanes, with a branch for each). Kernels on buffers are ten times slower.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine import ops, routes
from llamagpu.engine.device_sampler import Candidates, SampleKind
from llamagpu.engine.kv_cache import TextureKvCache
from llamagpu.engine.model import Model, PlanKey
from llamagpu.engine.ops import NO_PROLOGUE, Consts, Output, PrologueSpec, attention_shape, tagged
from llamagpu.engine.options import Settings
from llamagpu.engine.routes import Epilogue, Prologue
from llamagpu.engine.weights import Layer, Matrix, Weights
from llamagpu.files.architectures import Activation
from llamagpu.files.config import CONV, CONV_IN, CONV_OUT, ModelConfig
from llamagpu.gpu.buffers import Bindable, Texture
from llamagpu.gpu.caps import Caps
from llamagpu.gpu.device import Dispatch, Gpu


def suits_textures(config: ModelConfig, caps: Caps) -> bool:
    """Whether the architecture has only what kernels on textures can do."""
    c = config
    soft_caps = c.attn_soft_cap or c.logit_soft_cap
    plain = c.norms_before and not c.norms_after and not soft_caps and not c.experts
    taps_fit = c.conv_taps * c.dim // 4 <= caps.texture_side
    return plain and taps_fit and c.activation is Activation.SILU


class TextureModel(Model):
    """The residual stream alternates between two textures: a kernel cannot read and write the same one."""

    cache: TextureKvCache

    def __init__(
        self, gpu: Gpu, config: ModelConfig, weights: Weights, cache: TextureKvCache, settings: Settings
    ) -> None:
        super().__init__(gpu, config, weights, cache, settings)
        self.int8_decode = self.int8_prefill = False
        c, rows = config, settings.chunk
        self.x = gpu.texture(c.dim // 4, rows, "x")  # [m, dim] residual stream, into a layer and out of it
        self.mid = gpu.texture(c.dim // 4, rows, "mid")  # [m, dim] between attention and feed forward
        self.h = gpu.texture(max(c.dim, c.q_width) // 4, rows, "h")  # [m, dim] normalised; attended
        self.q = gpu.texture(c.q_width // 4, rows, "q")  # [m, heads, head_dim] rotated queries
        self.act = gpu.texture(c.ffn_dim // 4, rows, "act")  # [m, ffn] silu(gate) * up
        # [m, q | k | v] before `rotate_texture`, [m, b | c | x] before a short convolution
        self.raw = gpu.texture(c.raw_width // 4, rows, "raw") if c.raw_width else None
        self.gate: Texture | None = None  # [m, ffn] each, where gate and up have different types
        self.up: Texture | None = None
        if any(len(layer.gate_up) > 1 for layer in weights.layers):
            self.gate, self.up = (gpu.texture(c.ffn_dim // 4, rows, name) for name in ("gate", "up"))
        self._dispatches: dict[tuple[int, int], list[Dispatch]] = {}  # by rows and segments

    def scratch(self) -> list[Bindable]:
        own = [self.x, self.mid, self.h, self.q, self.raw, self.act, self.gate, self.up]
        return [*super().scratch(), *(texture for texture in own if texture is not None)]

    # Plans: of one row of each segment, else of any number of rows

    def plan_width(self, rows: int, segments: int = 1) -> int:
        return min(rows, segments + 1)

    def context_bucket(self, width: int, position: int, segments: int = 1) -> int:
        """The context bucket: the grid of one row's scores is fixed, so each doubling of the context has a plan."""
        if width > 1:
            return 0
        return routes.score_workgroups(position, routes.vector_lanes(self.gpu.caps))

    def step_dispatches(self, key: PlanKey, position: int) -> list[Dispatch]:
        shape = key.width, key.segments
        if shape not in self._dispatches:
            self._dispatches[shape] = [*self.layer_dispatches(*shape), *self.head(key.segments)]
        found = self._dispatches[shape]
        if key.width > 1:
            return found
        return [replace(dispatch, grid=dispatch.grid_for(1, position)) for dispatch in found]

    def layer_dispatches(self, rows: int, segments: int = 1) -> list[Dispatch]:
        c, scale = self.config, self.config.stored_embedding_scale
        into = self.x if scale == 1 else self.mid
        embed = self.ops.embed(self.weights.token_embd, into, rows, routes.TEXTURE_EMBED)
        if scale != 1:
            embed.append(self.ops.texture_scale(into, self.x, c.dim, scale, rows))
        dispatches = tagged(embed, "embedding", None)
        for i, (layer, texture) in enumerate(zip(self.weights.layers, self.cache.textures, strict=True)):
            dispatches += self.layer(i, layer, texture, rows, segments)
        return dispatches

    def layer(self, i: int, layer: Layer, cache: Texture, m: int, segments: int) -> list[Dispatch]:
        is_conv = self.config.kinds[i].is_conv
        mixed = self.short_conv(i, layer, cache, m) if is_conv else self.attend(i, layer, cache, m, segments)
        to_mid = Output(Epilogue.TEXTURE_ADD, {"base": self.x, "y": self.mid})
        to_x = Output(Epilogue.TEXTURE_ADD, {"base": self.mid, "y": self.x})
        out = CONV_OUT if is_conv else "attn_output"
        return [
            *mixed,
            *tagged(self.linear(self.h, layer.attn_output, m, to_mid), out, i),
            *self.feed_forward(i, layer, m),
            *tagged(self.linear(self.act, layer.ffn_down, m, to_x), "ffn_down", i),
        ]

    def short_conv(self, i: int, layer: Layer, cache: Texture, m: int) -> list[Dispatch]:
        """A short convolution in the place of attention."""
        c = self.config
        assert self.raw is not None and layer.conv is not None
        to_raw = Output(Epilogue.TEXTURE_STORE, {"y": self.raw})
        conv = self.ops.texture_short_conv(self.raw, layer.conv, cache, self.h, c.dim, c.conv_taps, m)
        linear = self.norm_linears(i, "attn_norm", self.x, layer.attn_norm, [(CONV_IN, layer.qkv, to_raw)], m)
        return [*linear, *tagged(conv, CONV, i)]

    def attend(self, i: int, layer: Layer, cache: Texture, m: int, segments: int) -> list[Dispatch]:
        c, kind = self.config, self.config.kinds[i]
        consts: Consts = ops.head_consts(c) | {"ROPE_DIMS": ops.rope_dims(c, kind)}
        buffers: dict[str, Bindable] = {"y": self.q, "cache": cache, "rope": self.cache.rope(kind)}
        to_qkv, rotate = Output(Epilogue.TEXTURE_QKV, buffers, consts), list[Dispatch]()
        if c.rotates_apart:
            assert self.raw is not None
            to_qkv = Output(Epilogue.TEXTURE_STORE, {"y": self.raw})
            unused = layer.attn_norm
            assert unused is not None
            bound = buffers | {"x": self.raw, "w": layer.qk_norm or unused}
            rotate = [self.ops.rotate_texture(c, kind, bound, m)]
        shape = attention_shape(c, m, segments=segments, kind=kind)
        attention = self.ops.attend_textures(shape, self.q, cache, self.cache.scores, self.h)
        return [
            *self.norm_linears(i, "attn_norm", self.x, layer.attn_norm, [("qkv", layer.qkv, to_qkv)], m),
            *tagged(rotate, "rotate", i),
            *tagged(attention, "attention", i),
        ]

    def head(self, segments: int) -> list[Dispatch]:
        """From the last row of each segment to its logits and the candidates of sampling."""
        matrix = self.weights.output
        norm = self.norm(self.x, self.weights.output_norm, segments, last_rows=True)
        step = self.step if segments == 1 else self.head_step
        bindings = {"y": self.logits, "step": step.buffer}
        output = Output(Epilogue.TEXTURE_TO_BUFFER, bindings, {"WIDTH": matrix.n})
        linear = [ops.fixed_grid(d, segments) for d in self.linear(self.h, matrix, segments, output)]
        argmax = self.ops.argmax(self.logits, self.candidates, matrix.n, segments)
        return [
            *tagged([norm], "output_norm", None),
            *tagged(linear, "output", None),
            *tagged([argmax], "sampling", None),
        ]

    def linear(
        self, x: Texture, matrix: Matrix, m: int, output: Output, norm: Bindable | None = None
    ) -> list[Dispatch]:
        output = replace(output, consts=output.consts | {"BIAS": matrix.bias is not None})
        prologue = NO_PROLOGUE
        if norm is not None:
            prologue = PrologueSpec(Prologue.NORM, {"norm": norm}, {"NORM": True, "EPS": self.config.stream_eps})
        return self.ops.linear(x, matrix, m, output, prologue=prologue, table=routes.TEXTURE_LINEAR)

    def norm_linears(
        self,
        i: int,
        norm_op: str,
        x: Texture,
        norm: Bindable | None,
        linears: list[tuple[str, Matrix, Output]],
        m: int,
    ) -> list[Dispatch]:
        """Linears of normalised x. The kernel for one row normalises itself, which is cheaper than a dispatch."""
        assert norm is not None
        if m == 1:
            return [d for op, w, output in linears for d in tagged(self.linear(x, w, m, output, norm), op, i)]
        dispatches = tagged([self.norm(x, norm, m)], norm_op, i)
        for op, matrix, output in linears:
            dispatches += tagged(self.linear(self.h, matrix, m, output), op, i)
        return dispatches

    def norm(self, x: Texture, weight: Bindable, m: int, last_rows: bool = False) -> Dispatch:
        c = self.config
        return self.ops.rms_norm(x, weight, self.h, c.dim, c.stream_eps, m, last_rows, routes.TEXTURE_NORM)

    def feed_forward(self, i: int, layer: Layer, m: int) -> list[Dispatch]:
        if len(layer.gate_up) == 1:
            output = Output(Epilogue.TEXTURE_SWIGLU, {"y": self.act})
            linears = [("gate_up", layer.gate_up[0], output)]
            return self.norm_linears(i, "ffn_norm", self.mid, layer.ffn_norm, linears, m)
        gate, up = self.gate, self.up
        assert gate is not None and up is not None
        linears = [
            (op, matrix, Output(Epilogue.TEXTURE_STORE, {"y": y}))
            for op, matrix, y in zip(("ffn_gate", "ffn_up"), layer.gate_up, (gate, up), strict=True)
        ]
        product = self.ops.texture_silu_mul(gate, up, self.act, self.config.ffn_dim, m)
        return [
            *self.norm_linears(i, "ffn_norm", self.mid, layer.ffn_norm, linears, m),
            *tagged([product], "glu_mul", i),
        ]

    # Sampling and scoring

    def sample_dispatches(self, kind: SampleKind, sampled: int, segments: int) -> list[Dispatch]:
        vocab = self.config.vocab
        found = Candidates(vocab, ops.argmax_candidates(vocab), self.ops.argmax_rows)
        return self.sampler.dispatches(self.ops, kind, self.head_buffers(sampled), found, None, None)

    def hidden_dispatch(self, key: PlanKey) -> Dispatch:
        return self.norm(self.x, self.weights.output_norm, key.width)

    def read_hidden(self, rows: int) -> NDArray[np.float32]:
        dim = self.config.dim
        return self.gpu.read_texture(self.h, 0, dim // 4, rows).view(np.float32).reshape(rows, dim)

    def score_dispatches(self, rows: int) -> list[Dispatch]:
        c, head = self.config, self.weights.output
        logits = self.score_buffer(rows * c.vocab, "all logits")  # [m, vocab]
        output = Output(Epilogue.TEXTURE_TO_BUFFER, {"y": logits}, {"WIDTH": head.n})
        return [
            *self.layer_dispatches(rows),
            self.norm(self.x, self.weights.output_norm, rows),
            *self.linear(self.h, head, rows, output),
            self.ops.log_prob(logits, self.targets, self.scores, c.vocab),
        ]
