"""All layers of a token as one kernel: against float64, against the same as dispatches of their own, and what happens
where workgroups do not run at the same time."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wgpu

from llamagpu.engine import weights
from llamagpu.engine.layers import PATIENCE, buffers_of, shelf_of
from llamagpu.engine.llama import Transformer
from llamagpu.engine.memory import plan_memory
from llamagpu.engine.shelves import Shelves
from llamagpu.engine.weights import kinds_of, load_weights
from llamagpu.errors import BadFile, DeviceLost
from llamagpu.files.config import LlamaConfig
from llamagpu.files.packed_file import PackedFile
from llamagpu.files.repack import small
from llamagpu.gpu import device, routes
from llamagpu.gpu.device import Slice
from llamagpu.gpu.join import BOUND, Stage, join
from llamagpu.gpu.routes import Crew
from llamagpu.gpu.shaders import compose
from llamagpu.tools.convert.convert import convert, open_source, plan
from tests.conftest import open_gpu
from tests.gguf_builder import tiny_llama, tiny_parts, write_gguf
from tests.test_model import by_name, check_against_reference, logits_after, open_model, tokens


@pytest.fixture(scope="module")
def join_gpu() -> Any:
    """A software adapter runs one workgroup at a time for sure: the meetings are then of one."""
    found = open_gpu(LLAMAGPU_JOIN="1")
    if found.caps.subgroup < 4:
        pytest.skip("layers are joined with subgroups of 4 or more only")
    return found


def load(gpu: Any, path: Path, context: int = 64, chunk: int = 16, fast: bool = False, **more: Any) -> Transformer:
    file, config = open_model(path)
    factors = file.tensors.get("rope_freqs.weight")
    stored = load_weights(file.tensors, config, gpu, fast=fast)
    freqs = None if factors is None else small(factors)
    return Transformer(gpu, config, stored, freqs, context, chunk=chunk, fast=fast, **more)


SHAPE: dict[str, Any] = dict(dim=128, heads=2, kv_heads=1, head_dim=64, ffn=192, layers=3, kind="Q4_0")

MODELS: dict[str, dict[str, Any]] = {
    "share 2": SHAPE,
    "share 3, offsets": SHAPE | dict(heads=6, kv_heads=2, kind="Q4_1", tied=False),
    "biases": SHAPE | dict(biases=True, kind="Q8_0"),
    "sliding window": SHAPE | dict(metadata={"llama.attention.sliding_window": 5}),
    "qwen2, head_dim 128": SHAPE | dict(arch="qwen2", head_dim=128, kind="F16"),
    "two kinds of down": SHAPE | dict(kind=by_name(**{"1.ffn_down": "Q8_0", "": "Q4_0"}), layers=4),
    "two kinds of v": SHAPE | dict(kind=by_name(**{"1.attn_v": "Q8_0", "3.attn_v": "Q8_0", "": "Q4_0"}), layers=4),
    "four kinds of down": SHAPE | dict(layers=6, kind=by_name(**{
        "1.ffn_down": "Q8_0", "4.ffn_down": "Q8_0", "2.ffn_down": "Q4_0", "5.ffn_down": "Q4_1", "": "F16"})),
    # groups of 16 in 6 bits, and the second layer unlike its neighbours in two stages
    "mixed": SHAPE | dict(dim=256, ffn=256, kind=by_name(**{"1.attn_v": "Q6_K", "1.ffn_down": "Q6_K", "": "Q4_K"})),
}  # fmt: skip


@pytest.mark.parametrize("fast", [False, True], ids=["high", "fast"])
@pytest.mark.parametrize("name", MODELS)
def test_joined_layers(join_gpu, tmp_path, name, fast):
    path = tiny_llama(tmp_path / "m.gguf", **MODELS[name])
    model = load(join_gpu, path, fast=fast, kv_f32=name == "biases" or not fast)
    assert model.joined and model.fast == fast
    kernels = 3 if name == "mixed" and join_gpu.caps.storage_buffers < 33 else 1
    assert [d.label for d in model.plan(1).dispatches].count("layers") == kernels
    check_against_reference(model, path)


LACKING = (("0.attn_q", "0.attn_k", "0.attn_v"), ("0.attn_output",), ("1.ffn_down",))


@pytest.mark.parametrize("lacking", LACKING, ids=str)
def test_a_bias_that_some_layers_lack(join_gpu, tmp_path, lacking):
    """Zeros, or not in the file at all: another variant, or zeros on the shelf."""
    keys, tensors = tiny_parts(**SHAPE | dict(biases=True, kind="Q8_0"))
    for name in lacking:
        kind, shape, data = tensors.pop(f"blk.{name}.bias")
        if len(lacking) > 1:
            tensors[f"blk.{name}.bias"] = kind, shape, bytes(len(data))
    path = write_gguf(tmp_path / "m.gguf", keys, tensors)
    model = load(join_gpu, path, kv_f32=True)
    assert model.joined
    check_against_reference(model, path)


def test_a_matrix_that_does_not_fit_a_shelf(join_gpu, tmp_path, monkeypatch):
    """Its words stand alone, its scales do not; every layer reads its own."""
    monkeypatch.setattr(join_gpu, "caps", replace(join_gpu.caps, binding_bytes=1 << 17))
    monkeypatch.setattr(weights, "kinds_of", lambda *rest: (kinds_of(*rest)[0], 4))
    kinds = by_name(attn_q="Q8_0", attn_k="Q8_0", attn_v="Q8_0", **{"": "Q4_0"})
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE | dict(kv_heads=2, layers=4, kind=kinds))
    model = load(join_gpu, path, kv_f32=True)
    part = model.weights.layers[1].qkv.parts[0]
    assert model.joined and not isinstance(part.words, Slice) and isinstance(part.scales, Slice)
    check_against_reference(model, path)


@pytest.mark.parametrize("other, ready", [("attn_q", "false"), ("attn_v", "true")])
def test_parts_share_inputs_where_the_first_has_made_them_everywhere(join_gpu, tmp_path, other, ready):
    """By the kernels' text: with one workgroup they always have."""
    shape = SHAPE | dict(kv_heads=2, kind=by_name(**{other: "Q8_0", "": "F16"}))
    model = load(join_gpu, tiny_llama(tmp_path / "m.gguf", **shape))
    model.joined.crew = Crew(128, 512)
    stages = model.joined.stages([0, 1, 2], *model.caches[0], model.rope)
    found = [re.findall(r"const READY: bool = (\w+);", stage.source) for stage in stages]
    assert found[0] == ["false"] and found[1] == [ready]


def test_inputs_that_workgroup_memory_does_not_hold(join_gpu, tmp_path):
    """As f32; int8 records of as many are there."""
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE | dict(layers=2, ffn=join_gpu.caps.workgroup_bytes // 4))
    for fast in (False, True):
        model = load(join_gpu, path, fast=fast, kv_f32=not fast)
        *_, gate_up, down = model.joined.stages([0, 1], *model.caches[0], model.rope)
        assert "const QUADS: bool = " + ("false" if fast else "true") in gate_up.source
        assert ("var<workgroup> records" if fast else "fn prepare(index: u32) { wait(index); }") in down.source
        check_against_reference(model, path)


def test_a_long_context_is_split_and_joined(join_gpu, tmp_path):
    """More splits with every 32 positions, then 64 and 128; the same with a plan whose stages are dispatches."""
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE, context=4096)
    joined, apart = (load(join_gpu, path, 2304, 256, kv_f32=True) for _ in range(2))
    apart.joined = None
    for count in (31, 1, 1, 90, 1, 500, 1, 1600, 1):  # up to 17 splits
        ids = tokens(count, seed=count)
        got, want = logits_after(joined, ids), logits_after(apart, ids)
        if count == 1:
            assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
    assert len(joined.plan(1)) == 4 < len(apart.plan(1))  # embedding, layers, norm, output


@pytest.mark.parametrize("settings", [{"LLAMAGPU_SAFE": "1"}, {"LLAMAGPU_TRUSTED": "0"}], ids=str)
def test_the_same_text_by_other_means(join_gpu, tmp_path, monkeypatch, settings):
    """2000 tokens, with the cache growing on the way."""
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE | dict(layers=2), context=2048)

    def text(gpu: Any) -> list[int]:
        model = load(gpu, path, 256, limit=2048)
        model.prefill([1, 2, 3])
        return list(model.greedy(2000))

    want = text(join_gpu)
    assert len(want) == 2000
    monkeypatch.setenv(*next(iter(settings.items())))
    assert text(open_gpu(LLAMAGPU_JOIN="1", **settings)) == want


def test_the_cache_grows_and_is_read_back(join_gpu, tmp_path):
    """Stacks of caches: copied head by head into larger ones, and out of the device and back."""
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    roomy, growing = load(join_gpu, path, 64), load(join_gpu, path, 8, limit=64)
    roomy.prefill([5, 6, 7])
    growing.prefill([5, 6, 7])
    assert list(growing.greedy(30)) == list(roomy.greedy(30))
    assert growing.capacity >= 32
    held = [piece.copy() for piece in growing.read_cache(20)]
    other = load(join_gpu, path, 64)
    rest = iter(held)
    other.write_cache(20, lambda count: next(rest))
    assert all(np.array_equal(a, b) for a, b in zip(other.read_cache(20), held, strict=True))


@pytest.mark.parametrize("shape", [MODELS["biases"], SHAPE | dict(ffn=1024, kind=by_name(**{"0.ffn_up": "Q8_0"}))])
def test_shelves_hold_the_same_bytes(gpu, join_gpu, tmp_path, shape):
    """Also where gate and up of a layer are no one matrix."""
    file, config = open_model(tiny_llama(tmp_path / "m.gguf", **shape))
    before, used = join_gpu.allocated_bytes, gpu.allocated_bytes
    shelved, plain = (load_weights(file.tensors, config, device) for device in (join_gpu, gpu))
    assert join_gpu.allocated_bytes - before == gpu.allocated_bytes - used  # nothing is there twice
    for layer, other in zip(shelved.layers, plain.layers, strict=True):
        for buffer, single in zip(buffers_of(layer), buffers_of(other), strict=True):
            assert isinstance(buffer, Slice) and buffer.offset % 256 == 0 and buffer.size == single.size
            assert np.array_equal(join_gpu.read(buffer, np.uint8, buffer.size), gpu.read(single, np.uint8, single.size))


@pytest.mark.parametrize("name", ["blk.7", "blk.1", "blk.x.weight", "blk.3.nextn.weight", "blk.1.nextn.weight"])
def test_tensors_that_no_layer_has_are_not_looked_at(join_gpu, tmp_path, name):
    keys, tensors = tiny_parts(**SHAPE)
    path = write_gguf(tmp_path / "m.gguf", keys, tensors | {name: ("IQ2_XXS", (256, 256), bytes(256 * 66))})
    file, config = open_model(path)
    used = plan_memory(config, file.tensors, join_gpu, 64, 16, True).weights
    before = join_gpu.allocated_bytes
    load_weights(file.tensors, config, join_gpu)
    assert join_gpu.allocated_bytes - before == used


def test_matrices_of_other_types_are_other_variants(join_gpu, tmp_path):
    """Also where they have as many bytes, as a packed file may have that says something else."""
    model = load(join_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE))
    first, other = (layer.attn_output for layer in model.weights.layers[:2])
    assert shelf_of(first) == shelf_of(other)
    for lie in (dict(group=64), dict(form="q8"), dict(pair=True), dict(scale_bits=32), dict(n=64)):
        assert shelf_of(replace(first, parts=(replace(first.parts[0], **lie),))) != shelf_of(first)


def test_layers_that_are_alike_share_a_shelf(join_gpu):
    """Also where others are between them; in sections, each within a binding."""
    shelves = Shelves(join_gpu, [{"down": kind} for kind in "abaab"], most=4)
    places = [shelves.room(512, f"blk.{i}.down", i) for i in range(5)]
    assert [place.offset for place in places] == [0, 0, 512, 1024, 0]
    assert places[0].buffer is places[2].buffer is places[3].buffer and places[0].buffer.size == 3 * 512
    assert len({id(place.buffer) for place in places}) == 3  # the last is of another section
    norms = [shelves.room(256, f"blk.{i}.norm", i) for i in range(5)]
    assert [norm.offset for norm in norms] == [0, 256, 512, 768, 0]


def test_what_does_not_fit_a_shelf_stands_alone(join_gpu):
    """Sizes that no binding could begin after, and more than a binding holds."""
    shelves = Shelves(join_gpu, [{}] * 3, most=3)
    assert isinstance(shelves.room(512, "a", 1), Slice) and not isinstance(shelves.room(100, "b", 1), Slice)
    assert not isinstance(shelves.room(512, "a"), Slice)
    large = join_gpu.caps.binding_bytes // 3 // 256 * 256 + 256
    assert not isinstance(shelves.room(large, "c", 0), Slice)


def test_a_packed_file_that_lies_about_types(join_gpu, tmp_path):
    """The second layer's matrix is larger than those it is said to be like."""
    kinds = by_name(**{"1.ffn_down": "Q8_0", "": "Q4_0"})
    path = tmp_path / "m.safetensors"
    source = open_source(str(tiny_llama(tmp_path / "m.gguf", **SHAPE | dict(kind=kinds))))
    convert(source, path, plan(source, None, packed=True))
    file = PackedFile(path)
    config = LlamaConfig.from_gguf(file.metadata, file.tensors)
    load_weights(file.tensors, config, join_gpu)
    tensor = file.tensors["blk.1.ffn_down.weight"]
    file.tensors["blk.1.ffn_down.weight"] = replace(tensor, kind="Q4_0")
    with pytest.raises(BadFile, match=r"blk\.1\.ffn_down is not of the type that the file says"):
        load_weights(file.tensors, config, join_gpu)


def test_layers_stay_apart_where_the_adapter_does_not_say_so(gpu, tmp_path):
    """A software adapter by default: its workgroups run one after another."""
    assert not gpu.caps.join
    model = load(gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE))
    assert model.joined is None and not isinstance(model.weights.layers[0].attn_norm, Slice)


# Workgroups that do not run at the same time: 64 of them on a few threads


def test_a_crew_that_meets_is_found(join_gpu, tmp_path, monkeypatch):
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    want = logits_after(load(join_gpu, path), [1])
    monkeypatch.setattr(routes, "crews", lambda dim, caps: (Crew(64, 256), Crew(1, 256)))
    model = load(join_gpu, path)
    assert model.joined and model.joined.crew.count == 1
    assert np.array_equal(logits_after(model, [1]), want)


def test_a_driver_that_takes_no_kernel_of_different_types(join_gpu, tmp_path, monkeypatch):
    """Layers of each type get their own."""
    real, refused = join_gpu.pipeline, []

    def pipeline(source: str, label: str) -> Any:
        if "place >> 16u == 1u" in source:
            refused.append(source)
            raise wgpu.GPUError("too large")
        return real(source, label)

    monkeypatch.setattr(join_gpu, "pipeline", pipeline)
    path = tiny_llama(tmp_path / "m.gguf", **MODELS["two kinds of down"])
    model = load(join_gpu, path, kv_f32=True)
    assert model.joined and model.joined.alike and [d.label for d in model.plan(1).dispatches].count("layers") == 3
    assert len(refused) == 1
    check_against_reference(model, path)


def test_a_driver_is_not_asked_twice(join_gpu, tmp_path, monkeypatch):
    refused: list[str] = []

    def pipeline(source: str, label: str) -> Any:
        refused.append(source)
        raise wgpu.GPUError("too large")

    model = load(join_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE))
    monkeypatch.setattr(join_gpu, "pipeline", pipeline)
    assert not model.joined.find_crew(model.caches, model.rope, model.recorder) and len(refused) == 1


def test_without_one_the_layers_stay_apart(join_gpu, tmp_path, monkeypatch):
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    monkeypatch.setattr(routes, "crews", lambda dim, caps: (Crew(64, 256),))
    model = load(join_gpu, path, kv_f32=True)
    assert model.joined is None
    check_against_reference(model, path)
    assert len(list(model.greedy(5))) == 5


def test_other_subgroups_than_probed_are_noticed(join_gpu, tmp_path, monkeypatch):
    """A driver that chooses them by kernel: here the kernel believes in twice as many lanes as there are."""
    monkeypatch.setattr(device, "join", lambda stages, count, size, *rest: join(stages, count, 2 * size, *rest))
    assert load(join_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE)).joined is None


def test_stores_that_do_not_arrive_are_noticed(join_gpu, tmp_path, monkeypatch):
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    source = compose("relay", (), {})
    wrong = source.replace("+ 1u;\n}", "+ select(1u, 0u, i == 77u && layer() == 9u);\n}")
    assert wrong != source
    monkeypatch.setattr(
        device.shaders, "compose", lambda kernel, *rest: wrong if kernel == "relay" else compose(kernel, *rest)
    )
    assert load(join_gpu, path).joined is None


@pytest.mark.parametrize(
    "go_on",
    [
        lambda model: list(model.greedy(30)),
        lambda model: list(model.sample(lambda logits: int(logits.argmax()))),
        lambda model: model.log_probs([1, 2, 3]),
    ],
    ids=["device", "host", "scores"],
)
def test_a_wait_given_up_ends_the_text(join_gpu, tmp_path, go_on):
    model = load(join_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE))
    assert join_gpu.read(model.meeting, np.uint32, 3)[2] == PATIENCE
    model.prefill([1, 2, 3])
    join_gpu.write(model.meeting, np.array([1], np.uint32), offset=4)
    with pytest.raises(DeviceLost, match="same time") as caught:
        go_on(model)
    assert "LLAMAGPU_JOIN=0" in str(caught.value.remedy)


def test_a_kernel_with_too_many_bindings_is_not_joined(join_gpu, tmp_path):
    """Three types in q, k and v, and biases: 34 buffers."""
    if join_gpu.caps.storage_buffers >= 34:
        pytest.skip("the adapter binds as many")
    kinds = by_name(attn_q="Q4_0", attn_k="Q4_1", attn_v="Q8_0")
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE | dict(layers=1, biases=True, kind=kinds))
    model = load(join_gpu, path, kv_f32=True)
    assert model.joined is None
    check_against_reference(model, path)


@pytest.mark.parametrize(
    "limits", [dict(scalar=True), dict(workgroup_bytes=8192), dict(invocations=256), dict(subgroup=0)], ids=str
)
def test_what_joining_needs(gpu, limits):
    """A GPU that could join Llama 1B, and one that lacks something."""
    fine = replace(gpu.caps, cpu=False, join=True, scalar=False, subgroup=32, invocations=1024, workgroup_bytes=32768,
                   storage_buffers=64)  # fmt: skip
    heads = routes.Heads(32, 8, 64)
    assert routes.joinable(2048, 8192, heads, True, fine)
    assert not routes.joinable(2048, 8192, heads, True, replace(fine, **limits))
    assert not routes.joinable(2048, 8192, routes.Heads(32, 1, 64), True, fine)  # 32 heads share one: a subgroup each


def test_layers_share_no_line_of_memory(join_gpu, tmp_path):
    """A line that was read with one layer's values may stay in a workgroup's cache, and be read for the next one's: 256
    bytes that nobody writes, and nobody reads, are between them and around all."""
    model = load(join_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE))
    want, layers = logits_after(model, [3]), SHAPE["layers"]
    model.truncate(0)
    poison = np.uint32(0x7FC0BEEF)  # not a number
    for buffer in (model.joined.q.buffer, model.x):
        join_gpu.write(buffer, np.full(buffer.size // 4, poison))
    assert np.array_equal(logits_after(model, [3]), want)
    words = join_gpu.read(model.joined.q.buffer, np.uint32, model.joined.q.buffer.size // 4)
    rows = dict(q=2 * 64, mid=128, act=192, partial=2 * 128 * 64, stats=2 * 2 * 128)  # 128 splits, of which one is used
    ends = [0]
    for name, width in rows.items():
        place = getattr(model.joined, name)
        for layer in range(layers):
            used = width // 128 if name in ("partial", "stats") else width
            start = place.offset // 4 + layer * (used + 64)
            assert (words[start : start + used] != poison).all(), (name, layer)
            assert (words[ends[-1] : start] == poison).all() and start - ends[-1] >= 64, (name, layer)
            ends.append(start + used)
    assert (words[ends[-1] :] == poison).all() and len(words) - ends[-1] >= 64
    x = join_gpu.read(model.x, np.uint32, (layers + 1) * (128 + 64)).reshape(layers + 1, -1)
    assert (x[:, :128] != poison).all() and (x[:, 128:] == poison).all()
    for place in model.caches[0] + model.caches[-1]:
        assert place.offset >= 256 and place.buffer.size - place.offset - place.size >= 256


# How kernels become one


def test_what_one_stage_writes_no_stage_binds_read_only(join_gpu, tmp_path):
    """A driver may read what is declared read-only through a cache that stores do not reach."""
    model = load(join_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE))
    (layers,) = (d for d in model.plan(1).dispatches if d.label == "layers")
    declared = {name: mode for mode, name, _ in BOUND.findall(layers.source)}
    modes: dict[Any, set[str]] = {}
    for name, buffer in layers.buffers.items():
        modes.setdefault(getattr(buffer, "buffer", buffer), set()).add(declared[name])
    assert all(len(found) == 1 or found <= {"storage, read", "uniform"} for found in modes.values())
    shared = (model.joined.q.buffer, model.x, *(k.buffer for k in model.caches[0]))
    assert all(modes[b] == {"storage, read_write"} for b in shared)


def test_names_of_stages_do_not_meet(join_gpu):
    """The same kernel twice, with a constant of its own each: y = x * 2 + 1, by layer."""
    source = (
        "const STEP: u32 = 1u;\nconst WORKGROUP: u32 = 8u;\n"
        "@group(0) @binding(0) var<storage, read> x: array<u32>;\n"
        "@group(0) @binding(1) var<storage, read_write> y: array<u32>;\n"
        "fn next(v: vec2<u32>) -> u32 { return v.x * STEP + v.y; }\n"
        "@compute @workgroup_size(WORKGROUP)\n"
        "fn main(@builtin(local_invocation_index) index: u32, @builtin(workgroup_id) group: vec3<u32>) {\n"
        "  let i = layer() * 64u + group.x * 8u + index;\n  y[i] = next(vec2<u32>(x[i], STEP - 1u));\n}\n"
    )
    x = join_gpu.upload(np.arange(128, dtype=np.uint32), "x")
    mid, y = join_gpu.zeros(512, "mid"), join_gpu.zeros(512, "y")
    stages = [
        Stage(source.replace("= 1u", "= 2u"), {"x": x, "y": mid}, (8, 1, 1)),
        Stage(source, {"x": mid, "y": y}, (8, 1, 1)),
    ]
    meeting = join_gpu.upload(np.array([0, 0, PATIENCE, 0], np.uint32), "meeting")
    layers = join_gpu.upload(np.array([2, 0, 0, 0], np.uint32), "layers", 64)
    text, buffers = join(stages, 1, join_gpu.caps.subgroup, meeting, layers)
    assert {"STEP_0", "STEP_1", "next_0", "next_1"} <= set(re.findall(r"\w+", text)) and len(buffers) == 5
    from llamagpu.gpu.recorder import Plan, Recorder

    Recorder(join_gpu).submit([(Plan([join_gpu.joined(stages, 1, meeting, layers)]), 1, 0)])
    assert join_gpu.read(y, np.uint32, 128).tolist() == [2 * i + 1 for i in range(128)]


def test_fields_are_not_called_like_anything_else(join_gpu):
    """Their declarations would be renamed, and their uses would not."""
    wrong = compose("relay", (), {}) + "\nstruct Two { N: u32, other: u32 }\n"
    with pytest.raises(AssertionError, match=r"called like something else: {'N'}"):
        join([Stage(wrong, {"y": join_gpu.zeros(16, "y")}, (1, 1, 1))], 1, 8, None, join_gpu.zeros(16, "layers"))


# What is read after a wait has a place that is not known before: later() is part of it


def functions(source: str) -> dict[str, tuple[list[str], str]]:
    """Name: parameters and body; declarations begin at the start of a line."""
    head, next_one = r"^fn (\w+)\(((?:[^()]|\([^()]*\))*)\)[^{\n]*\{", r"(?=^(?:fn|@|var|const|struct)|\Z)"
    found = re.findall(f"{head}(.*?){next_one}", re.sub(r"//.*", "", source), re.M | re.S)
    return {name: (re.findall(r"(\w+):", params), body) for name, params, body in found}


def waits_for_place(source: str, name: str) -> list[str]:
    """Reads of the binding `name` whose place could be known before the wait."""
    known = functions(source)

    def late(place: str, within: str, depth: int = 0) -> bool:
        params, body = known[within]
        words = set(re.findall(r"\w+", place))
        if "later" in words:
            return True
        lets = [expression for word in words for expression in re.findall(rf"\b(?:let|var) {word} = ([^;]+);", body)]
        if depth < 9 and any(late(expression, within, depth + 1) for expression in lets):
            return True
        calls = [
            (other, call) for other, (_, text) in known.items() if other != within
            for call in re.findall(rf"\b{within}\(((?:[^()]|\([^()]*\))*)\)", text)
        ] if words & set(params) else []  # fmt: skip
        passed = within != "main" and bool(words & set(params)) and depth < 9  # what nobody calls reads nothing
        return passed and all(late(call, other, depth + 1) for other, call in calls)

    return [
        f"{within}: {name}[{place}]" for within, (_, body) in known.items()
        for place in re.findall(rf"\b{name}\[([^\]]+)\](?! =[^=])", body) if not late(place, within)
    ]  # fmt: skip


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_nothing_is_read_before_the_wait_is_over(join_gpu, tmp_path, fast, wide):
    """In every stage, of every buffer that a stage writes; and the test sees where it is missing."""
    ffn = join_gpu.caps.workgroup_bytes // 4 if wide else SHAPE["ffn"]
    model = load(join_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE | dict(ffn=ffn)), fast=fast)
    stages = model.joined.stages([0, 1, 2], *model.caches[0], model.rope)
    written = {
        id(getattr(stage.buffers[name], "buffer", stage.buffers[name]))
        for stage in stages for mode, name, _ in BOUND.findall(stage.source) if "write" in mode
    }  # fmt: skip
    seen = 0
    for stage in stages:
        for mode, name, _ in BOUND.findall(stage.source):
            if id(getattr(stage.buffers[name], "buffer", stage.buffers[name])) in written and "write" not in mode:
                seen += 1
                assert not waits_for_place(stage.source, name), name
                assert waits_for_place(stage.source.replace("later() + ", ""), name), name
    # x | q, keys, values | partial, stats, x | mid | act (twice, where there is no norm to bind), mid
    assert seen == (10 if wide and not fast else 11)


@pytest.mark.parametrize("dim", [576, 2048])
def test_crews_are_powers_of_two(gpu, dim):
    """Arrivals are counted without end: 2^32 must be a whole number of meetings."""
    for crew in (*routes.crews(dim, replace(gpu.caps, cpu=False)), *routes.crews(dim, gpu.caps)):
        assert crew.count & (crew.count - 1) == 0
