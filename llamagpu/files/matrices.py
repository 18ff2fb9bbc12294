"""Builds the matrices that a model runs from the tensors of a file.

q, k and v are concatenated, and gate and up are interleaved row by row where their types allow it: this gives fewer and
larger dispatches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

import numpy as np
from numpy.typing import NDArray

from llamagpu.files.architectures import QkNorm
from llamagpu.files.config import CONV, CONV_IN, CONV_OUT, QK_NORMS, ModelConfig, norm_tensor, norms_of_layer
from llamagpu.files.gguf_file import RawTensor
from llamagpu.files.repack import layout_of, repack, to_f32
from llamagpu.files.storage import Layout, PackedMatrix, concat, interleave, rope_rows, take_rows

Tensors = Mapping[str, RawTensor]
Rows = tuple[Layout, int]  # a layout, and the number of rows in it
Pack = Callable[[RawTensor], PackedMatrix]


@dataclass(frozen=True, slots=True)
class LoadedMatrix:
    matrices: list[PackedMatrix]  # the shards of the matrix, in row order
    bias: NDArray[np.float32] | None = None  # [n]


@dataclass(frozen=True, slots=True)
class MatrixSource:
    """One matrix of the model: a description for the allocation and the memory plan, and the function that loads it."""

    label: str  # "token_embd", "blk.3.qkv", ...
    rows: tuple[Rows, ...]
    has_bias: bool
    load: Callable[[], LoadedMatrix]  # gives matrices of these rows and layouts
    experts: int = 1  # matrices of as many rows each, one after another

    @property
    def n(self) -> int:
        return sum(n for _, n in self.rows)

    @property
    def layer(self) -> int | None:
        return layer_of(self.label)


def layer_of(name: str) -> int | None:
    """The number of the layer: 3 for "blk.3.qkv", None outside of the layers."""
    return int(name.split(".")[1]) if name.startswith("blk.") else None


def vector_widths(config: ModelConfig) -> dict[str, int]:
    """Labels and lengths of norm weights, sinks and taps of short convolutions, which stay vectors of f32. The norms of
    q and k are one vector."""
    found = {"output_norm": config.dim}
    for i, kind in enumerate(config.kinds):
        found |= {f"blk.{i}.{name}": config.dim for name in norms_of_layer(config)}
        if kind.is_conv:
            found[f"blk.{i}.conv"] = config.conv_taps * config.dim
            continue
        if config.qk_norm is not QkNorm.NONE:
            found[f"blk.{i}.qk_norm"] = sum(config.qk_norm_widths)
        if config.sinks:
            found[f"blk.{i}.attn_sinks"] = config.heads
    return found


def vector_values(tensors: Tensors, config: ModelConfig, label: str) -> NDArray[np.float32]:
    """The weights of a norm, with what they scale beside it, or another vector of vector_widths."""
    name = label.rpartition(".")[2]
    if name == "qk_norm":
        layer = label.removesuffix(name)
        return np.concatenate([_qk_norm(to_f32(tensors[f"{layer}{each}.weight"]), config) for each in QK_NORMS])
    if name == "conv":  # [dim, taps] in the file
        taps = to_f32(tensors[f"{label.removesuffix(name)}{CONV}.weight"]).reshape(config.dim, config.conv_taps)
        return np.ascontiguousarray(taps.T).reshape(-1)
    values = to_f32(tensors[f"{label.removesuffix(name)}{norm_tensor(name, config)}.weight"])
    if name == "output_norm":
        return values * np.float32(config.logit_scale)
    return values * np.float32(config.norm_after_scale) if name.startswith("post") else values


def _qk_norm(values: NDArray[np.float32], config: ModelConfig) -> NDArray[np.float32]:
    """In the order of the rows of q or k."""
    if not config.neox:
        return values
    return values[rope_rows(len(values) // config.head_dim, config.head_dim, config.rope_dims)]


def matrix_sources(tensors: Tensors, config: ModelConfig, pack: Pack = repack) -> list[MatrixSource]:
    """Every matrix in the order of use."""
    tensors = split_fused(tensors, config)
    found = [_single(tensors, "token_embd", pack)]
    for i, kind in enumerate(config.kinds):
        if kind.is_conv:  # its matrices are in the places of attention's
            for label, name in (("qkv", CONV_IN), ("attn_output", CONV_OUT)):
                found.append(replace(_single(tensors, f"blk.{i}.{name}", pack), label=f"blk.{i}.{label}"))
        else:
            found.append(_qkv(tensors, config, i, pack))
            found.append(_single(tensors, f"blk.{i}.attn_output", pack))
        found += _feed_forward(tensors, config, i, pack)
    if not config.tied:
        found.append(_single(tensors, "output", pack))
    return found


def _feed_forward(tensors: Tensors, config: ModelConfig, i: int, pack: Pack) -> list[MatrixSource]:
    """In the order of Layer.matrices: gate and up, down, and the router of experts."""
    experts, stacked = config.experts or 1, "_exps" * bool(config.experts)
    gate, up, down = (f"blk.{i}.ffn_{name}{stacked}" for name in ("gate", "up", "down"))
    if tensors[f"{gate}.weight"].ggml_type == tensors[f"{up}.weight"].ggml_type:
        found = [_gate_up(tensors, i, gate, up, pack)]
    else:
        found = [_single(tensors, gate, pack), _single(tensors, up, pack)]
    found = [
        replace(source, label=source.label.removesuffix(stacked), experts=experts)
        for source in (*found, _single(tensors, down, pack))
    ]
    return [*found, _single(tensors, f"blk.{i}.ffn_gate_inp", pack)] if config.experts else found


def split_fused(tensors: Tensors, config: ModelConfig) -> Tensors:
    """The tensors with attn_qkv as q, k and v, and the halves of ffn_up as gate and up."""
    if not config.fused_tensors:
        return tensors
    found, c = dict(tensors), config
    for i in range(c.layers):
        qkv, up = found.pop(f"blk.{i}.attn_qkv.weight"), found[f"blk.{i}.ffn_up.weight"]
        rows = {"attn_q": (qkv, c.q_width), "attn_k": (qkv, c.kv_width), "attn_v": (qkv, c.kv_width)}
        start = 0
        for name, (tensor, count) in rows.items():
            found[f"blk.{i}.{name}.weight"] = _take(tensor, start, count, f"blk.{i}.{name}.weight")
            start += count
        for half, name in enumerate(("ffn_gate", "ffn_up")):
            found[f"blk.{i}.{name}.weight"] = _take(up, half * c.ffn_dim, c.ffn_dim, f"blk.{i}.{name}.weight")
    return found


def _take(tensor: RawTensor, start: int, count: int, name: str) -> RawTensor:
    """Rows of a tensor as a tensor."""
    row_bytes = len(tensor.data) // tensor.shape[0]  # 0 for a tensor without data
    data = tensor.data[start * row_bytes : (start + count) * row_bytes]
    return RawTensor(name, tensor.ggml_type, (count, tensor.shape[1]), data)


def _rows(tensor: RawTensor) -> Rows:
    """Of all experts, where there are some."""
    return layout_of(tensor.ggml_type, tensor.shape[-1]), prod(tensor.shape[:-1])


def _bias(tensors: Tensors, name: str) -> NDArray[np.float32] | None:
    bias = tensors.get(f"{name}.bias")
    return None if bias is None else to_f32(bias).reshape(-1)


def _single(tensors: Tensors, name: str, pack: Pack) -> MatrixSource:
    tensor = tensors[f"{name}.weight"]

    def load() -> LoadedMatrix:
        return LoadedMatrix([pack(tensor)], _bias(tensors, name))

    return MatrixSource(name, (_rows(tensor),), f"{name}.bias" in tensors, load)


def _qkv(tensors: Tensors, config: ModelConfig, i: int, pack: Pack) -> MatrixSource:
    """q, k and v. The rows of NeoX RoPE pairs, which are half a head apart in the file, become neighbours."""
    names = [f"blk.{i}.attn_{name}" for name in "qkv"]
    each = [_rows(tensors[f"{name}.weight"]) for name in names]
    rows = tuple((layout, sum(n for _, n in run)) for layout, run in groupby(each, key=lambda rows: rows[0]))
    has_bias = any(f"{name}.bias" in tensors for name in names)

    def load() -> LoadedMatrix:
        packed, biases = [], []
        for name, heads, rotated in zip(
            names, (config.heads, *[config.kv_heads] * 2), (True, True, False), strict=True
        ):
            matrix, bias = pack(tensors[f"{name}.weight"]), _bias(tensors, name)
            bias = np.zeros(matrix.n, np.float32) if bias is None else bias
            if config.neox and rotated:
                order = rope_rows(heads, config.head_dim, config.rope_dims)
                matrix, bias = take_rows(matrix, order), bias[order]
            packed.append(matrix)
            biases.append(bias)
        return LoadedMatrix(concat(packed), np.concatenate(biases) if has_bias else None)

    return MatrixSource(f"blk.{i}.qkv", rows, has_bias, load)


def _gate_up(tensors: Tensors, i: int, gate: str, up: str, pack: Pack) -> MatrixSource:
    layout, n = _rows(tensors[f"{gate}.weight"])
    has_bias = f"{gate}.bias" in tensors or f"{up}.bias" in tensors

    def load() -> LoadedMatrix:
        matrix = interleave(pack(tensors[f"{gate}.weight"]), pack(tensors[f"{up}.weight"]))
        if not has_bias:
            return LoadedMatrix([matrix])
        biases = [_bias(tensors, name) for name in (gate, up)]
        both = [np.zeros(n, np.float32) if bias is None else bias for bias in biases]
        return LoadedMatrix([matrix], np.stack(both, 1).reshape(-1))

    return MatrixSource(f"blk.{i}.gate_up", ((layout, 2 * n),), has_bias, load)
