"""A tiny model end to end: random weights, its logits against the same model in float64."""

from collections.abc import Iterator
from functools import cache, partial

import numpy as np

from llamagpu.engine.engine import Engine
from llamagpu.engine.options import Backend, KvType, Precision, Settings
from llamagpu.engine.sequence import Sequence
from llamagpu.engine.synthetic import synthetic_config
from llamagpu.engine.weights import Layer, Matrix, Weights, WeightTarget, upload_matrix
from llamagpu.files.config import ModelConfig
from llamagpu.files.storage import Storage, dequantize
from llamagpu.gpu.buffers import Bindable
from llamagpu.gpu.device import Gpu
from llamagpu.verify.reference import (
    F32,
    Answer,
    Array,
    Case,
    Floats,
    Weight,
    attention,
    random,
    rms_norm,
    round_int8,
    round_kv,
    swiglu,
)

F16_CACHE = (1e-8, 1e-4)  # the reference rounds keys and values to f16 as well; a few round differently
Q8_0_CACHE = (1e-6, 3e-3)  # likewise to int8
FAST = (5e-4, 5e-2)  # in every layer some int8 values round differently: 5e-5 measured on an H200
CONTEXT, CHUNK = 64, 16
PROMPT, STEPS = 21, 4  # a full chunk and an incomplete one, then single tokens

Tensors = dict[str, Array]  # the weights in float64, by name
Mode = tuple[Precision, Backend, KvType | None]  # None: the default of the adapter
MODES: dict[str, Mode] = {
    "high": (Precision.HIGH, Backend.BUFFERS, None),
    "fast": (Precision.FAST, Backend.BUFFERS, None),
    "q8_0": (Precision.HIGH, Backend.BUFFERS, KvType.Q8_0),
    "textures": (Precision.HIGH, Backend.TEXTURES, KvType.F32),
}


def model_cases(gpu: Gpu, quick: bool) -> Iterator[Case]:
    """Both precisions, and on a CPU adapter the texture backend, which is how models run there."""
    config = synthetic_config("tiny")
    weights = cache(lambda backend: tiny_weights(gpu, config, backend))  # built for the first case that runs

    def build(mode: Mode) -> tuple[Engine, "Reference"]:
        precision, backend, kv_type = mode
        on_device, tensors = weights(backend)
        kv_type = kv_type or (KvType.F16 if gpu.caps.native_f16 else KvType.F32)
        settings = Settings(precision, kv_type, backend, CHUNK, CONTEXT, CONTEXT)
        engine = Engine(gpu, config, on_device, settings)
        int8 = engine.model.int8_decode, engine.model.int8_prefill
        return engine, Reference(config, tensors, settings.kv_type, *int8)

    def logits(mode: Mode) -> Answer:
        engine, reference = build(mode)
        sequence = Sequence()
        ids = random("ids").integers(0, config.vocab, PROMPT + STEPS).tolist()
        got, want = [], []
        for start, end in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, PROMPT + STEPS))):
            engine.prefill(sequence, ids[start:end])
            got.append(engine.read_logits())
            want.append(reference.forward(ids[start:end])[-1])
        return np.array(got), np.array(want)

    def greedy(mode: Mode) -> Answer:
        """Tokens sampled and fed back on the device against tokens that the host samples from the logits."""
        engine, _ = build(mode)
        sequence = Sequence()
        engine.prefill(sequence, [1, 2, 3])
        sampled = list(engine.greedy(sequence, 12))
        sequence.truncate(0)
        engine.prefill(sequence, [1, 2, 3])
        want = []
        for _ in sampled:
            want.append(int(engine.read_logits().argmax()))
            engine.prefill(sequence, want[-1:])
        return np.array(sampled) + 1, np.array(want) + 1

    names = ["high", "q8_0", "fast"] + ["textures"] * gpu.caps.cpu
    bounds = {"high": F16_CACHE if gpu.caps.native_f16 else F32, "fast": FAST, "q8_0": Q8_0_CACHE, "textures": F32}
    for name in names[-1:] if quick else names:
        shape = f"tiny, {name}: logits of {PROMPT} + {STEPS} tokens"
        yield Case("model", shape, partial(logits, MODES[name]), bounds[name])
        yield Case("model", f"tiny, {name}: 12 greedy tokens", partial(greedy, MODES[name]), (0.0, 0.0))


def tiny_weights(gpu: Gpu, config: ModelConfig, backend: Backend) -> tuple[Weights, Tensors]:
    """Q4_0 with a Q4_1 feed-forward, Q8_0 down projection and an f16 embedding: one matrix of each storage."""
    c, tensors = config, Tensors()
    target = WeightTarget.of(backend, Precision.HIGH, gpu.caps)

    def matrix(name: str, storage: Storage, n: int, k: int, has_offset: bool = False) -> Matrix:
        packed = Weight(storage, n, k, 32, has_offset).packed()
        if packed.scales is not None:  # makes the matrix differ from the last one of this shape
            packed.scales[...] = random(name).standard_normal(packed.scales.shape) * 0.01
        tensors[name] = dequantize(packed)
        return upload_matrix(gpu, [packed], name, target)

    def norm(name: str) -> Bindable:
        weight = tensors[name] = random(name).uniform(0.5, 1.5, c.dim).astype(np.float32)
        if backend is Backend.TEXTURES:
            return gpu.upload_texture(weight.reshape(1, -1, 4), name)
        return gpu.upload(weight, name)

    layers = tuple(
        Layer(
            attn_norm=norm(f"{i}.attn_norm"),
            qkv=matrix(f"{i}.qkv", Storage.Q4, c.q_width + 2 * c.kv_width, c.dim),
            attn_output=matrix(f"{i}.attn_output", Storage.Q4, c.dim, c.q_width),
            ffn_norm=norm(f"{i}.ffn_norm"),
            gate_up=(matrix(f"{i}.gate_up", Storage.Q4, 2 * c.ffn_dim, c.dim, has_offset=True),),
            ffn_down=matrix(f"{i}.ffn_down", Storage.Q8, c.dim, c.ffn_dim),
        )
        for i in range(c.layers)
    )
    table = matrix("token_embd", Storage.F16, c.vocab, c.dim)
    return Weights(table, layers, norm("output_norm"), table), tensors


class Reference:
    """The same model in float64, with a KV cache; it rounds what the device rounds."""

    def __init__(
        self, config: ModelConfig, tensors: Tensors, kv_type: KvType, int8_decode: bool, int8_prefill: bool
    ) -> None:
        self.config, self.tensors = config, tensors
        self.kv_type = kv_type
        self.int8_decode, self.int8_prefill = int8_decode, int8_prefill
        empty = np.zeros((config.kv_heads, 0, config.head_dim))
        self.keys, self.values = [empty] * config.layers, [empty] * config.layers  # [kv_heads, n, head_dim]

    def forward(self, ids: list[int]) -> Floats:
        """Appends ids; [len(ids), vocab] logits."""
        w, eps, position = self.tensors, self.config.norm_eps, self.keys[0].shape[1]
        x = w["token_embd"][ids]
        for i in range(self.config.layers):
            x = x + self.attention(i, rms_norm(x, w[f"{i}.attn_norm"], eps), position)
            hidden = self.linear(rms_norm(x, w[f"{i}.ffn_norm"], eps), f"{i}.gate_up")
            x = x + self.linear(swiglu(hidden), f"{i}.ffn_down")
        return self.linear(rms_norm(x, w["output_norm"], eps), "token_embd", self.int8_decode)

    def linear(self, x: Floats, name: str, int8: bool | None = None) -> Floats:
        if int8 is None:
            int8 = self.int8_decode if len(x) == 1 else self.int8_prefill
        return np.asarray((round_int8(x) if int8 else x) @ self.tensors[name].T)

    def attention(self, i: int, h: Floats, position: int) -> Floats:
        c = self.config
        rows = self.linear(h, f"{i}.qkv").reshape(len(h), -1, c.head_dim)
        q, k, v = np.split(rows, [c.heads, c.heads + c.kv_heads], axis=1)
        k, v = (round_kv(a, self.kv_type).swapaxes(0, 1) for a in (self.rotate(k, position), v))
        self.keys[i] = np.concatenate([self.keys[i], k], axis=1)
        self.values[i] = np.concatenate([self.values[i], v], axis=1)
        y = attention(self.rotate(q, position), self.keys[i], self.values[i], position)
        return self.linear(y.reshape(len(h), -1), f"{i}.attn_output")

    def rotate(self, x: Floats, position: int) -> Floats:
        """RoPE: pairs of neighbouring dimensions rotate with the position."""
        d = x.shape[2]
        frequency = self.config.rope_theta ** (-np.arange(0, d, 2) / d)
        angle = (position + np.arange(len(x)))[:, None, None] * frequency
        a, b, out = x[..., ::2], x[..., 1::2], np.empty_like(x)
        out[..., ::2] = a * np.cos(angle) - b * np.sin(angle)
        out[..., 1::2] = a * np.sin(angle) + b * np.cos(angle)
        return out
