"""What adapters there are, which one would be used and why, and which kernels a model's shapes take on it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from llamagpu.engine.selfcheck import use_fast
from llamagpu.engine.tiled import suits_tiles
from llamagpu.errors import about
from llamagpu.files.config import LlamaConfig, check_tensors
from llamagpu.files.gguf_file import RawTensor
from llamagpu.files.packed_file import open_model
from llamagpu.files.repack import FORMATS
from llamagpu.gpu import routes
from llamagpu.gpu.device import FEATURES, FLOOR, Gpu, adapters, choose
from llamagpu.gpu.routes import Linear
from llamagpu.tools.verify import verified_line

Tensors = dict[str, RawTensor]
STEPS = (1, 4, 512)  # tokens: decode, a short prompt, a chunk of a long one


def list_devices(wanted: str | None) -> list[dict[str, Any]]:
    found = adapters()
    chosen = choose(found, wanted)
    return [describe(i, adapter, adapter is chosen, wanted) for i, adapter in enumerate(found)]


def describe(number: int, adapter: Any, chosen: bool, wanted: str | None) -> dict[str, Any]:
    info = adapter.info
    return {
        "number": number,
        "name": info["device"],
        "type": info["adapter_type"],
        "backend": info["backend_type"],
        "driver": info["description"],
        "chosen": chosen,
        "why": reason(info["adapter_type"], wanted) if chosen else "",
        "features": [f for f in FEATURES if f in adapter.features],
        "limits": {name: adapter.limits[name] for name in FLOOR},
        "verified": verified_line(info),
    }


def reason(kind: str, wanted: str | None) -> str:
    if wanted:
        return f"--device {wanted}"
    return "a software adapter, the only kind here" if kind == "CPU" else "the best kind found"


def device_lines(found: list[dict[str, Any]]) -> Iterator[str]:
    for d in found:
        used = f"  <- used: {d['why']}" if d["chosen"] else ""
        yield f"{d['number']}: {d['name']} ({d['type']}, {d['backend']}, {d['driver']}){used}"
        yield f"   features: {', '.join(d['features']) or 'none'}"
        limits = (f"{name.removeprefix('max-')} {value}" for name, value in d["limits"].items())
        yield f"   limits: {', '.join(limits)}"
        yield f"   {d['verified']}"


def model_kernels(path: Path, wanted: str | None) -> list[dict[str, Any]]:
    """What each distinct shape of the model takes, for one token and for several."""
    with about(path):
        file = open_model(path)
        config = LlamaConfig.from_gguf(file.metadata, file.tensors)
        check_tensors(config, file.tensors)
    gpu = Gpu.open(wanted)
    fast = use_fast(gpu, None)
    if suits_tiles(config, file.tensors, gpu):
        rows = [row for m in STEPS for row in image_choices(gpu.caps, config, file.tensors, m)]
        gpu.close()
        return rows
    rows = [row for m in STEPS for row in kernel_choices(gpu.caps, config, file.tensors, m, fast and m == 1)]
    gpu.close()
    return rows


def kernel_choices(
    caps: routes.Caps, config: LlamaConfig, tensors: Tensors, m: int, fast: bool
) -> Iterator[dict[str, Any]]:
    """The first row that fits, in the order of the data."""
    c = config

    def row(op: str, shape: str, route: routes.Route) -> dict[str, Any]:
        return {"m": m, "op": op, "shape": shape, "kernel": route.kernel, "needs": route.needs}

    table = as_linear(tensors["token_embd.weight"], m)
    yield row("embed", shown("token_embd", table), routes.pick(routes.EMBED, table, caps))
    yield row("rms_norm", f"width {c.dim}", routes.pick(routes.NORM_I8 if fast else routes.NORM, c.dim, caps))
    heads = f"{c.heads} heads, {c.kv_heads} kv, head_dim {c.head_dim}"
    yield row("attend", heads, routes.pick(routes.attention(c.heads // c.kv_heads, caps), c.head_dim, m, caps))
    for name, shape in dict.fromkeys(linears(c, tensors, m, "i8" if fast else "f32")):
        yield row("linear", shown(name, shape), routes.pick(routes.LINEAR, shape, caps))


def image_choices(caps: routes.Caps, config: LlamaConfig, tensors: Tensors, m: int) -> Iterator[dict[str, Any]]:
    """The same where the whole model runs on images."""
    c = config
    heads = routes.Heads(c.heads, c.kv_heads, c.head_dim)

    def row(op: str, shape: str, table: tuple[routes.Route, ...], *facts: Any) -> dict[str, Any]:
        route = routes.pick(table, *facts, caps)
        return {"m": m, "op": op, "shape": shape, "kernel": route.kernel, "needs": route.needs}

    def tiled(shape: Linear) -> Linear:
        return replace(shape, form="tile_f32" if shape.form == "f16" else f"tile_{shape.form}")

    table = tiled(as_linear(tensors["token_embd.weight"], m))
    yield row("embed", shown("token_embd", table), routes.EMBED_IMAGE, table)
    yield row("rms_norm", f"width {c.dim}", routes.NORM_IMAGE, c.dim)
    attention = f"{c.heads} heads, {c.kv_heads} kv, head_dim {c.head_dim}"
    yield row("attend", attention, routes.ATTEND_IMAGE, heads, m)
    if m == 1:
        yield row("attend", attention, routes.VALUES_IMAGE, heads, m)
    for name, shape in dict.fromkeys(linears(c, tensors, m, "f32")):
        yield row("linear", shown(name, tiled(shape)), routes.LINEAR_IMAGE, tiled(shape))


def linears(config: LlamaConfig, tensors: Tensors, m: int, inputs: str) -> Iterator[tuple[str, Linear]]:
    """Every matrix as it is run: q, k, v of one type as one, gate and up as one, logits for one token."""
    for i in range(config.layers):
        q, k, v, out, gate, up, down = (
            tensors[f"blk.{i}.{name}.weight"]
            for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        )
        for _, alike in groupby((q, k, v), lambda tensor: tensor.kind):
            yield "attn_qkv", as_linear(list(alike), m, inputs, "out_qkv")
        yield "attn_output", as_linear(out, m, inputs, "out_add")
        if gate.kind == up.kind:
            part = "out_swiglu_i8" if inputs == "i8" else "out_swiglu"
            yield "ffn_gate_up", as_linear([gate, up], m, inputs, part)
        else:
            yield "ffn_gate", as_linear(gate, m, inputs)
            yield "ffn_up", as_linear(up, m, inputs)
        yield "ffn_down", as_linear(down, m, inputs, "out_add")
    head = tensors["token_embd.weight" if config.tied else "output.weight"]
    yield "output (tied)" if config.tied else "output", as_linear(head, 1, inputs, "out_logits")


def as_linear(
    tensors: RawTensor | list[RawTensor], m: int, inputs: str = "f32", out: str = "out_store"
) -> Linear:
    rows = tensors if isinstance(tensors, list) else [tensors]
    k, form = rows[0].shape[1], FORMATS.get(rows[0].kind)
    group, name = (form.group, form.form) if form else (k, "f16")
    return Linear(m, sum(t.shape[0] for t in rows), k, group, name, inputs, out)


def shown(name: str, shape: Linear) -> str:
    group = "" if shape.form in ("f16", "tile_f32") else f"/{shape.group}"
    return f"{name} {shape.n}x{shape.k} {shape.form}{group}"


def kernel_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    for r in rows:
        yield f"m {r['m']:<4} {r['op']:<9} {r['shape']:<34} {r['kernel']:<20} {r['needs']}"
