"""A tiny model end to end: its weights random, its logits against the same model in float64."""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from llamagpu.engine.llama import Transformer
from llamagpu.engine.synthetic import synthetic_config
from llamagpu.engine.tiled import TiledTransformer, upload_tiles
from llamagpu.engine.weights import Layer, Weights, upload_matrix
from llamagpu.files.config import LlamaConfig
from llamagpu.files.repack import dequantize
from llamagpu.files.tiles import tile
from llamagpu.gpu.device import Gpu
from llamagpu.tools.oracle import (
    F32,
    Array,
    Case,
    Weight,
    attention,
    random,
    rms_norm,
    rounded,
    silu,
)

F16_CACHE = (1e-8, 1e-4)  # the reference rounds keys and values to f16 as well; a few fall to the other side
FAST = (5e-4, 5e-2)  # int8 steps fall to the other side in every layer: 5e-5 seen on an H200; the gate of such kernels
CONTEXT, CHUNK = 64, 16
PROMPT, STEPS = 21, 4  # a whole chunk and a part of one, then single tokens

Matrices = dict[str, Array]  # the float64 twin of Weights: every tensor by name


def model_cases(gpu: Gpu, quick: bool) -> Iterator[Case]:
    """Precision high and fast; on a CPU adapter also on images, which is how models run there."""
    config = synthetic_config("tiny")
    weights = cache(
        lambda tiled: tiny_weights(gpu, config, tiled)
    )  # made when the first of them is asked for

    def model(kind: str) -> tuple[Transformer, "Reference"]:
        tiled, fast = kind == "images", kind == "fast"
        kv_f32, (on_device, tensors) = tiled or not gpu.caps.half, weights(tiled)
        made = TiledTransformer if tiled else Transformer
        device = made(gpu, config, on_device, None, CONTEXT, chunk=CHUNK, kv_f32=kv_f32, fast=fast)
        return device, Reference(config, tensors, kv_f32, device.fast, device.fast_many)

    def logits(kind: str) -> tuple[Any, Any]:
        device, reference = model(kind)
        ids = random("ids").integers(0, config.vocab, PROMPT + STEPS).tolist()
        got, want = [], []
        for start, end in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, PROMPT + STEPS))):
            device.prefill(ids[start:end])
            got.append(device.read_logits())
            want.append(reference.forward(ids[start:end])[-1])
        return np.array(got), np.array(want)

    def greedy(kind: str) -> tuple[Any, Any]:
        """Tokens fed back on the device against those that the host takes from the logits."""
        device, _ = model(kind)
        device.prefill([1, 2, 3])
        chosen = list(device.greedy(12))
        device.truncate(0)
        device.prefill([1, 2, 3])
        want = []
        for _ in chosen:
            want.append(int(device.read_logits().argmax()))
            device.prefill(want[-1:])
        return np.array(chosen) + 1, np.array(want) + 1

    kinds = ["high", "fast"] + ["images"] * gpu.caps.cpu
    for kind in kinds[-1:] if quick else kinds:
        bound = {"high": F16_CACHE if gpu.caps.half else F32, "fast": FAST, "images": F32}[kind]
        yield Case(
            "model", f"tiny, {kind}: logits of {PROMPT} + {STEPS} tokens", partial(logits, kind), bound
        )
        yield Case("model", f"tiny, {kind}: 12 greedy tokens", partial(greedy, kind), (0.0, 0.0))


def tiny_weights(gpu: Gpu, config: LlamaConfig, tiled: bool) -> tuple[Weights, Matrices]:
    """Q4_0 with a Q4_1 feed-forward, Q8_0 down projection and an f16 embedding: a storage form each."""
    c, tensors = config, Matrices()

    def matrix(name: str, form: str, n: int, k: int, pair: bool = False) -> Any:
        packed = Weight(form, n, k, 32, pair).packed()
        if packed.scales is not None:  # another matrix than the last one of this shape
            packed.scales[...] = random(name).standard_normal(packed.scales.shape) * 0.01
        tensors[name] = dequantize(packed)
        return upload_tiles(gpu, [tile(packed)], name) if tiled else upload_matrix(gpu, [packed], name)

    def norm(name: str) -> Any:
        weight = tensors[name] = random(name).uniform(0.5, 1.5, c.dim).astype(np.float32)
        return gpu.upload_image(weight.reshape(1, -1, 4), name) if tiled else gpu.upload(weight, name)

    layers = tuple(
        Layer(
            attn_norm=norm(f"{i}.attn_norm"),
            qkv=matrix(f"{i}.qkv", "q4", (c.heads + 2 * c.kv_heads) * c.head_dim, c.dim),
            attn_output=matrix(f"{i}.attn_output", "q4", c.dim, c.heads * c.head_dim),
            ffn_norm=norm(f"{i}.ffn_norm"),
            gate_up=(matrix(f"{i}.gate_up", "q4", 2 * c.ffn_dim, c.dim, pair=True),),
            ffn_down=matrix(f"{i}.ffn_down", "q8", c.dim, c.ffn_dim),
        )
        for i in range(c.layers)
    )
    table = matrix("token_embd", "f16", c.vocab, c.dim)
    return Weights(table, layers, norm("output_norm"), table), tensors


class Reference:
    """The same model in float64, with its key/value cache; rounds what the device rounds."""

    def __init__(
        self, config: LlamaConfig, tensors: Matrices, kv_f32: bool, fast: bool, fast_many: bool
    ) -> None:
        self.config, self.tensors = config, tensors
        self.kv_type = np.float64 if kv_f32 else np.float16
        self.fast, self.fast_many = fast, fast_many
        none = np.zeros((config.kv_heads, 0, config.head_dim))
        self.keys, self.values = [none] * config.layers, [none] * config.layers  # [kv_heads, n, head_dim]

    def forward(self, ids: list[int]) -> Array:
        """Appends ids; [len(ids), vocab] logits."""
        w, eps, pos = self.tensors, self.config.norm_eps, self.keys[0].shape[1]
        x = w["token_embd"][ids]
        for i in range(self.config.layers):
            x = x + self.attention(i, rms_norm(x, w[f"{i}.attn_norm"], eps), pos)
            hidden = self.linear(rms_norm(x, w[f"{i}.ffn_norm"], eps), f"{i}.gate_up")
            x = x + self.linear(silu(hidden[:, ::2]) * hidden[:, 1::2], f"{i}.ffn_down")
        return self.linear(rms_norm(x, w["output_norm"], eps), "token_embd", self.fast)

    def linear(self, x: Array, name: str, fast: bool | None = None) -> Array:
        if fast is None:
            fast = self.fast if len(x) == 1 else self.fast_many
        return np.asarray((rounded(x) if fast else x) @ self.tensors[name].T)

    def attention(self, i: int, h: Array, pos: int) -> Array:
        c = self.config
        rows = self.linear(h, f"{i}.qkv").reshape(len(h), -1, c.head_dim)
        q, k, v = np.split(rows, [c.heads, c.heads + c.kv_heads], axis=1)
        k, v = (a.astype(self.kv_type).astype(np.float64).swapaxes(0, 1) for a in (self.rotate(k, pos), v))
        self.keys[i] = np.concatenate([self.keys[i], k], axis=1)
        self.values[i] = np.concatenate([self.values[i], v], axis=1)
        y = attention(self.rotate(q, pos), self.keys[i], self.values[i], pos)
        return self.linear(y.reshape(len(h), -1), f"{i}.attn_output")

    def rotate(self, x: Array, pos: int) -> Array:
        """Pairs of neighbouring dimensions turn with the position."""
        d = x.shape[2]
        angle = (pos + np.arange(len(x)))[:, None, None] * self.config.rope_theta ** (-np.arange(0, d, 2) / d)
        a, b, out = x[..., ::2], x[..., 1::2], np.empty_like(x)
        out[..., ::2], out[..., 1::2] = (
            a * np.cos(angle) - b * np.sin(angle),
            a * np.sin(angle) + b * np.cos(angle),
        )
        return out
