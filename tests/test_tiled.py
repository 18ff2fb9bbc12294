"""Models in images, for CPU adapters: the tiles, each kernel and whole models against float64, the choice."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import shared_data
from gguf_builder import tiny_llama
from reference import Reference, assert_close, attention

from llamagpu.files.gguf_file import GgufFile
from llamagpu.files.repack import Packed, dequantize
from llamagpu.files.tiles import tile
from llamagpu.gpu import routes

wgpu = pytest.importorskip("wgpu")
from test_model import F32, MODELS, check_against_reference, open_model, tokens  # noqa: E402

from llamagpu.engine import ops  # noqa: E402
from llamagpu.engine.ops import Out  # noqa: E402
from llamagpu.engine.tiled import TiledTransformer, load_tiles, suits_tiles, upload_tiles  # noqa: E402
from llamagpu.files.repack import small  # noqa: E402
from llamagpu.gpu.recorder import Plan, Recorder  # noqa: E402

FORMS = {  # name -> form, group, scale and offset
    "q4": ("q4", 32, False), "q4 offset": ("q4", 32, True), "q4/64": ("q4", 64, False),
    "q4/16": ("q4", 16, True), "q8": ("q8", 32, False), "q8 offset": ("q8", 32, True),
    "q8/16": ("q8", 16, False), "f16": ("f16", 0, False),
}  # fmt: skip
UNTILED = ("head_dim 6", "head_dim 256", "odd widths", "rope_dims 6")  # models that do not fit


def packed(form: str, group: int, pair: bool, n: int, k: int, rng: np.random.Generator) -> Packed:
    if form == "f16":
        return Packed(form, n, k, k, rng.standard_normal((n, k + k % 2)).astype(np.float16), None)
    scales = (rng.standard_normal((n, k // group, 1 + pair)) * 0.01).astype(np.float16)
    words = rng.integers(0, 256, (n, k // 2 if form == "q4" else k), dtype=np.uint8)
    return Packed(form, n, k, group, words if form == "q4" else words.view(np.int8), scales)


def image(gpu: Any, values: np.ndarray) -> Any:
    """[m, k] as texels of 4, the last one filled up with 0."""
    padded = np.pad(values.astype(np.float32), ((0, 0), (0, -values.shape[1] % 4)))
    return gpu.upload_image(padded.reshape(len(values), -1, 4), "test")


def texels(gpu: Any, texture: Any) -> np.ndarray:
    """[height, 4 width] f32."""
    row = -(-16 * texture.width // 256) * 256
    size = (texture.width, texture.height, 1)
    raw = gpu.device.queue.read_texture({"texture": texture}, {"bytes_per_row": row}, size)
    return np.frombuffer(raw, np.float32).reshape(texture.height, -1)[:, : 4 * texture.width]


def step_of(gpu: Any, m: int, pos: int = 0) -> Any:
    return gpu.upload(np.array([pos, m, 0, 0], np.uint32), "step", wgpu.BufferUsage.UNIFORM)


def run(gpu: Any, dispatches: list[Any], m: int, pos: int = 0) -> None:
    recorder = Recorder(gpu)
    recorder.safe = not gpu.trusted
    recorder.submit([(Plan(dispatches), m, pos)])


@pytest.mark.parametrize("name", FORMS)
def test_tiles_hold_the_same_weights(name):
    """Read back by the layout's own description, in float64."""
    p = packed(*FORMS[name], n=13, k=192, rng=np.random.default_rng(0))
    t = tile(p)
    assert t.words.dtype == np.uint32 and t.words.shape[::2] == (2, 4)
    if p.scales is None:
        rows = t.words.view(np.float32).reshape(2, -1, 8, 8).swapaxes(1, 2).reshape(16, -1)
        assert np.array_equal(rows[:13, :192], dequantize(p))
        return
    groups = t.words.reshape(2, 192 // p.group, -1, 8)  # [tile, group, word, row]
    words, scales = groups[:, :, :-2], groups[:, :, -2:].view(np.float32).astype(np.float64)
    bits = 4 if p.form == "q4" else 8
    ints = words[:, :, :, None, :] >> np.arange(0, 32, bits, dtype=np.uint32)[:, None] & (2**bits - 1)
    ints = ints.reshape(2, 192 // p.group, p.group, 8)  # [tile, group, k, row]
    rows = (ints * scales[:, :, :1] + scales[:, :, 1:]).transpose(0, 3, 1, 2).reshape(16, 192)
    assert_close(rows[:13], dequantize(p), 1e-13, 1e-6, name)


def matrix_of(gpu: Any, *parts: Packed, bias: np.ndarray | None = None) -> tuple[Any, np.ndarray]:
    return upload_tiles(gpu, [tile(p) for p in parts], "w", bias), np.concatenate([dequantize(p) for p in parts])


@pytest.mark.parametrize("m", [1, 2, 3, 7, 8, 9, 33, 70])
@pytest.mark.parametrize("n, k", [(40, 64), (1003, 192)], ids=["40x64", "1003x192"])
@pytest.mark.parametrize("name", FORMS)
def test_linear(gpu, name, n, k, m):
    rng = np.random.default_rng(m)
    matrix, w = matrix_of(gpu, packed(*FORMS[name], n=n, k=k, rng=rng))
    x = rng.standard_normal((m, k)).astype(np.float32)
    y = gpu.upload(np.full(m * n + 8, 77.0, np.float32), "y")
    out = Out("image_store", {"y": y}, {"WIDTH": n})
    run(gpu, ops.linear(gpu, image(gpu, x), matrix, m, out, step_of(gpu, m), table=routes.LINEAR_IMAGE), m)
    got = gpu.read(y, np.float32, m * n + 8)
    assert (got[m * n :] == 77.0).all()
    assert_close(got[: m * n].reshape(m, n), x @ w.T, *F32, name)


@pytest.mark.parametrize("route", routes.LINEAR_IMAGE, ids=lambda r: f"{r.kernel} {r.needs}")
def test_every_row_of_the_linear_table(any_gpu, route):
    """Also where another row would be taken; and k that fills no stride."""
    gpu = any_gpu
    rng, m = np.random.default_rng(0), 1 if "gemv" in route.kernel else 6
    for form, k in (("q4", 96), ("f16", 44)):
        matrix, w = matrix_of(gpu, packed(form, 32, True, 24, k, rng))
        x, y = rng.standard_normal((m, k)).astype(np.float32), gpu.zeros(m * 24 * 4, "y")
        out, table = Out("image_store", {"y": y}, {"WIDTH": 24}), (replace(route, fits=lambda *_: True),)
        run(gpu, ops.linear(gpu, image(gpu, x), matrix, m, out, step_of(gpu, m), table=table), m)
        assert_close(gpu.read(y, np.float32, m * 24).reshape(m, 24), x @ w.T, *F32, form)


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("part", ["image_put", "image_add", "image_swiglu"])
def test_linear_into_images(gpu, part, m):
    """Two parts of different types and a bias; nothing is written beyond the tokens."""
    rng = np.random.default_rng(m)
    bias = rng.standard_normal(72).astype(np.float32)
    two = [packed("q4", 32, True, 24, 64, rng), packed("q8", 16, False, 48, 64, rng)]
    matrix, w = matrix_of(gpu, *two, bias=bias)
    x, base = rng.standard_normal((m, 64)).astype(np.float32), rng.standard_normal((m, 72)).astype(np.float32)
    y = image(gpu, np.full((m + 4, 72), 77.0))
    buffers = {"y": y} | ({"base": image(gpu, base)} if part == "image_add" else {})
    out = Out(part, buffers, {"BIAS": True})
    run(gpu, ops.linear(gpu, image(gpu, x), matrix, m, out, step_of(gpu, m), table=routes.LINEAR_IMAGE), m)
    want = x @ w.T + bias
    if part == "image_add":
        want = want + base
    if part == "image_swiglu":
        gate, up = want[:, ::2], want[:, 1::2]
        want = gate / (1 + np.exp(-gate)) * up
    got = texels(gpu, y)
    assert_close(got[:m, : want.shape[1]], want, *F32, part)
    assert (got[m:] == 77.0).all()


@pytest.mark.parametrize("k", [64, 576])
def test_linear_of_a_normalised_token(any_gpu, k):
    gpu, rng = any_gpu, np.random.default_rng(k)
    matrix, w = matrix_of(gpu, packed("q4", 32, True, 40, k, rng))
    x, weight = rng.standard_normal((2, 1, k)).astype(np.float32)
    y = gpu.zeros(160, "y")
    out = Out("image_store", {"y": y}, {"WIDTH": 40})
    made, step = ops.Made({"norm": image(gpu, weight)}, {"NORM": True, "EPS": 0.5}), step_of(gpu, 1)
    run(gpu, ops.linear(gpu, image(gpu, x), matrix, 1, out, step, table=routes.LINEAR_IMAGE, made=made), 1)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean() + 0.5) * weight
    assert_close(gpu.read(y, np.float32, 40), (normed @ w.T)[0], *F32, "normalised")


@pytest.mark.parametrize("last", [False, True])
def test_rms_norm(any_gpu, last):
    gpu = any_gpu
    rng = np.random.default_rng(0)
    x, weight = (
        rng.standard_normal((3, 76)).astype(np.float32),
        rng.standard_normal((1, 76)).astype(np.float32),
    )
    y, step = image(gpu, np.full((4, 76), 77.0)), step_of(gpu, 3)
    run(
        gpu,
        [ops.rms_norm(gpu, image(gpu, x), image(gpu, weight), y, 76, 1e-5, 3, step, last, routes.NORM_IMAGE)],
        3,
    )
    rows = x[2:] if last else x
    want = rows / np.sqrt((rows.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight
    got = texels(gpu, y)
    assert_close(got[: len(rows)], want, *F32, "norm")
    assert (got[len(rows) :] == 77.0).all()


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("m, pos", [(1, 0), (1, 37), (1, 100), (5, 0), (5, 30)])
@pytest.mark.parametrize("heads", [(6, 2, 64), (2, 2, 8), (4, 1, 128)], ids=["6/2x64", "2/2x8", "4/1x128"])
def test_attention(gpu, heads, m, pos, window):
    """A cache image of 16 rows: positions beyond them stand in further columns."""
    count, kv, d = heads
    rng, fold = np.random.default_rng(pos), 16
    q = rng.standard_normal((m, count, d)).astype(np.float32)
    k, v = rng.standard_normal((2, kv, pos + m, d)).astype(np.float32)
    cache = np.zeros((-(-(pos + m) // fold), fold, 2, kv, d), np.float32)  # [column, row, keys | values, ...]
    for p in range(pos + m):
        cache[p // fold, p % fold] = k[:, p], v[:, p]
    folded = image(gpu, cache.swapaxes(0, 1).reshape(fold, -1))
    y, step = image(gpu, np.full((m + 1, count * d), 77.0)), step_of(gpu, m, pos)
    scored = gpu.image(fold, (pos // 4 // fold + 1) * count, "scored")
    images = image(gpu, q.reshape(m, -1)), folded, scored, y
    plan = ops.attend_image(gpu, routes.Heads(*heads), *images, m, step, window, d**-0.5, {"FOLD": fold})
    run(gpu, plan, m, pos)
    got = texels(gpu, y)
    want = attention(q.swapaxes(0, 1).astype(np.float64), k, v, np.arange(pos, pos + m), window)
    assert_close(got[:m].reshape(m, count, d).swapaxes(0, 1), want, *F32, f"{heads} at {pos}")
    assert (got[m:] == 77.0).all()


@pytest.mark.parametrize("d", [8, 64, 128])
def test_attention_over_the_longest_context(gpu, d):
    """llvmpipe ends loops after 65535 turns, without a word. Equal scores: the result is the mean of the values."""
    most, fold = routes.most_positions(d, replace(gpu.caps, cpu=True), images=True), 8192
    values = np.arange(65600, dtype=np.float32) / 65600
    cache = np.zeros((9 * fold, 2, d), np.float32)
    cache[: len(values), 1] = values[:, None]
    folded = image(gpu, cache.reshape(9, fold, -1).swapaxes(0, 1).reshape(fold, -1))
    q, scored = image(gpu, np.zeros((2, d))), gpu.image(fold, 3, "scored")
    for m, positions in ((2, most), (1, most), (1, len(values)), (2, len(values))):
        pos, y = positions - m, gpu.image(d // 4, 2, "y")
        images, step = (q, folded, scored, y), step_of(gpu, m, pos)
        run(gpu, ops.attend_image(gpu, routes.Heads(1, 1, d), *images, m, step, 0, 1.0, {"FOLD": fold}), m, pos)
        got = texels(gpu, y)[:m]
        if gpu.caps.cpu and m == 2 and positions > most:
            assert np.isnan(got).any(axis=1).all()  # it stopped early, and that shows
        else:
            want = np.array([[values[: pos + t + 1].mean(dtype=np.float64)] * d for t in range(m)])
            assert_close(got, want, 1e-8, 1e-4, f"{m} tokens, {positions} positions")
    gpu.free(folded)


def test_embedding_of_every_form(gpu):
    rng = np.random.default_rng(0)
    for name, form in FORMS.items():
        two = [packed(*form, 21 if i else 24, 64, rng) for i in range(2)]
        matrix, w = matrix_of(gpu, *two)
        ids = np.array([0, 44, 7, 23, 24, 30], np.uint32)
        y = gpu.image(16, len(ids), "y")
        run(gpu, ops.embed(gpu, gpu.upload(ids, "ids"), matrix, y, len(ids), routes.EMBED_IMAGE), len(ids))
        assert_close(texels(gpu, y), w[ids], 1e-13, 1e-6, name)


def load(gpu: Any, path: Any, context: int = 64, chunk: int = 16, **more: Any) -> TiledTransformer:
    file, config = open_model(path)
    factors = file.tensors.get("rope_freqs.weight")
    weights = load_tiles(file.tensors, config, gpu)
    freqs = None if factors is None else small(factors)
    return TiledTransformer(gpu, config, weights, freqs, context, chunk=chunk, kv_f32=True, **more)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in UNTILED])
def test_model(gpu, tmp_path, name):
    path = tiny_llama(tmp_path / "m.gguf", **MODELS[name])
    check_against_reference(load(gpu, path), path)


def test_model_at_the_floor(floor_gpu, tmp_path):
    path = tiny_llama(tmp_path / "m.gguf", **MODELS["32 weights"])
    check_against_reference(load(floor_gpu, path), path)


def test_a_growing_cache_keeps_what_it_holds(gpu, tmp_path):
    path, ids = tiny_llama(tmp_path / "m.gguf"), tokens(60)
    model, want = load(gpu, path, context=8, limit=64), Reference(GgufFile(path)).forward(ids)
    for start, end in ((0, 7), (7, 30), (30, 31), (31, 60)):
        model.prefill(ids[start:end])
        assert_close(model.read_logits(), want[end - 1], *F32, f"{end} tokens")


def test_log_probs(gpu, tmp_path):
    path, ids = tiny_llama(tmp_path / "m.gguf"), tokens(20)
    logits = Reference(GgufFile(path)).forward(ids).astype(np.float64)
    logs = logits - np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    want = (logs - logits.max(axis=1, keepdims=True))[np.arange(19), ids[1:]]
    assert_close(load(gpu, path).log_probs(ids), want, *F32, "log probabilities")


def test_greedy_is_the_golden_text(gpu):
    import json

    golden = json.loads(shared_data("tiny/stories260K.golden.json").read_text())["greedy_ids"]
    model = load(gpu, shared_data("tiny/stories260K-f32.gguf"), context=16, limit=512)
    model.prefill([1])
    assert list(model.greedy(len(golden))) == golden


def test_which_models_are_tiled(gpu, tmp_path):
    cpu = replace(gpu.caps, cpu=True)

    class Adapter:
        caps = cpu

    for name, shape in MODELS.items():
        file, config = open_model(tiny_llama(tmp_path / "m.gguf", **shape))
        assert suits_tiles(config, file.tensors, Adapter) == (name not in UNTILED), name
        Adapter.caps = replace(cpu, cpu=False)
        assert not suits_tiles(config, file.tensors, Adapter)
        Adapter.caps = replace(cpu, image_side=32)
        assert not suits_tiles(config, file.tensors, Adapter)
        Adapter.caps = cpu


def test_a_cpu_adapter_takes_the_images(gpu, tmp_path):
    """No kernel on buffers but for the choice, and the float64 reference's logits."""
    from llamagpu.engine.generate import Llama

    path, ids = tiny_llama(tmp_path / "m.gguf"), tokens(21)
    with Llama(path, device=gpu) as llama:
        llama.model.prefill(ids[:20])
        llama.model.prefill(ids[20:])
        logits = llama.model.read_logits()
        kernels = {dispatch.label for m in (1, 2) for dispatch in llama.model.plan(m).dispatches}
    assert_close(logits, Reference(GgufFile(path)).forward(ids)[-1], *F32, "logits")
    assert ("linear_image_gemv" in kernels) == gpu.caps.cpu
    if gpu.caps.cpu:
        attention = {"attend_image", "attend_image_scores", "attend_image_values"}
        linear = {"linear_image", "linear_image_gemv"}
        assert kernels == attention | linear | {"embed_image", "rms_norm_image", "argmax"}
