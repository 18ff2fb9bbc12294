"""The Python API as its users meet it: results, embeddings, log probabilities, wrong arguments, wrong order."""

import doctest
import gc
import inspect
import json
import os
import subprocess
import sys
import weakref
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import open_gpu
from gguf_builder import tiny_llama, tiny_parts, write_gguf
from one_sequence import OneSequence, load_one, reference_of, token_ids
from reference import EMBEDDING, Reference, assert_close
from test_model import F32, INT8

import llamagpu
from llamagpu import Completion, Generation, Grammar, Llama, Sampling
from llamagpu.engine import grammar, sampler
from llamagpu.engine.options import Backend, Precision
from llamagpu.errors import BadArgument, BadFile, DoesNotFit, LlamaGpuError, WrongState
from llamagpu.files.gguf_file import GgufFile

GREEDY = Sampling(temperature=0)
EXACT = {"precision": "high", "kv_type": "f32"}
PROMPT = "the quick brown fox"
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", metadata={"tokenizer.chat_template": TEMPLATE})


@pytest.fixture(scope="module")
def llama(path, gpu):
    return Llama(path, device=gpu, **EXACT)


# The module


def test_names():
    assert set(llamagpu.__all__) <= set(dir(llamagpu))
    assert all(getattr(llamagpu, name) for name in llamagpu.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = llamagpu.lod
    code = "import llamagpu, sys; llamagpu.errors.LlamaGpuError; assert 'wgpu' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("function", [llamagpu.load, Llama, Llama.chat, Llama.complete, Llama.generate])
def test_every_argument_has_a_name(function):
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}


def test_docstring_examples(llama):
    """All of them, except that of `load`, which tests/test_examples.py runs: it needs the default model."""
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(verbose=False)
    names = {"llama": llama, "Sampling": Sampling, "Grammar": Grammar, "json": json}
    tests = [t for m in (llamagpu.llama, sampler, grammar) for t in finder.find(m, globs=names) if t.examples]
    run = [test for test in tests if test.name != "llamagpu.llama.load"]
    assert {"llamagpu.llama.Llama.chat", "llamagpu.llama.Llama.embed"} < {test.name for test in run}
    for test in run:
        assert runner.run(test).failed == 0, test.name


@pytest.mark.parametrize("kind", [str, Path])
def test_load(path, gpu, kind):
    with llamagpu.load(kind(path), device=gpu, context=64) as llama:
        assert llama.context == 64


def test_load_takes_a_path_as_a_path(path, gpu, tmp_path, monkeypatch):
    """A file that is called like a model is opened, and one that is not there is not fetched."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadFile, match="smollm2"):
        llamagpu.load(Path("smollm2"))
    Path("smollm2").write_bytes(path.read_bytes())
    with llamagpu.load(Path("smollm2"), device=gpu) as llama:
        assert llama.config.vocab == 288


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (dict(model=None), "model is None"),
        (dict(model=""), "model is ''"),
        (dict(context=0), "context is 0"),
        (dict(context="big"), "context is 'big'"),
        (dict(chunk=-1), "chunk is -1"),
        (dict(kv_type="q8"), "kv_type is 'q8'"),
        (dict(precision="low"), "precision is 'low'"),
    ],
)
def test_load_refuses(path, gpu, arguments, cause):
    with pytest.raises(BadArgument, match=cause) as caught:
        llamagpu.load(**{"model": path, "device": gpu} | arguments)
    assert caught.value.remedy and isinstance(caught.value, ValueError)


# Results


def test_complete_is_what_generate_streams(llama):
    options = dict(max_tokens=12, sampling=GREEDY)
    streamed = llama.complete(PROMPT, stream=True, **options)
    assert isinstance(streamed, Generation)
    texts = [token.text for token in streamed]
    answer = llama.complete(PROMPT, **options)
    assert isinstance(answer, Completion)
    assert answer.text == "".join(texts) == streamed.text and answer.ids == tuple(streamed.ids)
    prompt_tokens = len(llama.encode(PROMPT))
    assert (answer.finish_reason, answer.logprobs) == ("length", ())
    assert answer.usage == llamagpu.Usage(prompt_tokens, 12, prompt_tokens - 1)
    assert answer.timings.tokens == 12 and answer.timings.decode_s > 0
    with pytest.raises(AttributeError):
        answer.text = ""


def test_chat_answers(llama):
    options = dict(max_tokens=6, sampling=GREEDY)
    answer = llama.chat(MESSAGES, **options)
    assert answer.text == llama.complete("[user]hi[a]", **options).text
    assert [token.id for token in llama.chat(tuple(MESSAGES), stream=True, **options)] == list(answer.ids)


def test_one_stop_string_needs_no_list(llama):
    whole = llama.complete(PROMPT, max_tokens=30, sampling=GREEDY).text
    stop = whole[6:9]
    answer = llama.complete(PROMPT, max_tokens=30, sampling=GREEDY, stop=stop)
    assert answer.text == whole[: whole.index(stop)] and answer.finish_reason == "stop"


def test_encode_and_decode(llama):
    ids = llama.encode(PROMPT)
    assert ids == llama.tokenizer.encode(PROMPT) and llama.encode(PROMPT, bos=False) == ids[1:]
    assert llama.decode(np.array(ids), special=False) == PROMPT
    answers = [llama.complete(prompt, max_tokens=3, sampling=GREEDY).ids for prompt in (PROMPT, ids, np.array(ids))]
    assert answers[0] == answers[1] == answers[2]


# Log probabilities


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, Sampling(temperature=2, seed=5), Sampling(1.0, 0, seed=6, presence_penalty=1.0, logit_bias={70: 4.0})],
    ids=["greedy", "sampled", "changed"],
)
def test_log_probabilities(llama, path, sampling):
    """Those of the model's distribution, whatever the sampling does with it."""
    answer = llama.complete(PROMPT, max_tokens=6, sampling=sampling, logprobs=3)
    prompt, vocab = llama.encode(PROMPT), llama.config.vocab
    logits = Reference(GgufFile(path)).forward([*prompt, *answer.ids])[len(prompt) - 1 : -1]
    want = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert [logprob.id for logprob in answer.logprobs] == list(answer.ids)
    assert_close([p.logprob for p in answer.logprobs], want[range(6), answer.ids], *F32, "of the tokens")
    for logprob, row in zip(answer.logprobs, want, strict=True):
        assert [top.id for top in logprob.top] == np.argsort(-row)[:3].tolist()
        assert_close([top.logprob for top in logprob.top], np.sort(row)[:-4:-1], *F32, "of the likeliest")
    if sampling.greedy:
        assert all(logprob.top[0].id == logprob.id for logprob in answer.logprobs)
    everything = llama.complete(PROMPT, max_tokens=1, logprobs=10 * vocab).logprobs[0].top
    assert len(everything) == vocab and np.exp([p.logprob for p in everything]).sum() == pytest.approx(1)
    assert everything[0].text == llama.tokenizer.token_bytes(everything[0].id).decode("utf-8", "replace")


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3)], ids=["greedy", "sampled"])
def test_log_probabilities_change_no_token(llama, sampling):
    options = dict(max_tokens=10, sampling=sampling)
    tokens = list(llama.generate(PROMPT, logprobs=0, **options))
    assert tuple(token.id for token in tokens) == llama.complete(PROMPT, **options).ids
    assert all(token.logprob.id == token.id and token.logprob.top == () for token in tokens)


def test_logit_bias(llama):
    """A ban is certain, a large bias nearly so, wherever tokens are sampled."""
    plain = llama.complete(PROMPT, max_tokens=8, sampling=GREEDY).ids
    banned = Sampling(temperature=0, logit_bias={id: False for id in plain})
    assert not set(llama.complete(PROMPT, max_tokens=8, sampling=banned).ids) & set(plain)
    on_host = Sampling(2.0, seed=1, logit_bias={65: 100.0}, presence_penalty=0.1, repeat_last_n=2000)
    assert not llama.loaded.engine.samples_on_device(on_host)
    for sampling in (on_host, replace(on_host, repeat_last_n=64), replace(on_host, repeat_last_n=0, top_k=270)):
        assert set(llama.complete(PROMPT, max_tokens=5, sampling=sampling).ids) == {65}


# Embeddings


class HiddenReference(Reference):
    def linear(self, x, name):
        if name in ("output", EMBEDDING):
            self.hidden = x  # [m, dim] after the last norm
        return super().linear(x, name)


def check_mean_hidden(run: OneSequence, path: Path) -> None:
    """One row, a part of a chunk, a chunk and one row, almost two chunks."""
    plain, ids = reference_of(run, path), token_ids(30)
    for count in (1, 13, 17, 30):
        int8 = dict(int8_decode=plain.int8_decode, int8_prefill=plain.int8_prefill)
        reference, rows = HiddenReference(GgufFile(path), **int8), []
        for start in range(0, count, 16):  # in chunks, as one row has other rounding than several
            reference.forward(ids[start : min(start + 16, count)])
            rows.append(reference.hidden)
        run.clear()
        got = run.engine.mean_hidden(run.sequence, ids[:count])
        bounds = INT8 if run.model.int8_decode else F32
        assert_close(got, np.concatenate(rows).mean(axis=0), *bounds, f"{count} tokens")


@pytest.mark.parametrize(
    ("backend", "precision"),
    [(Backend.BUFFERS, Precision.HIGH), (Backend.BUFFERS, Precision.FAST), (Backend.TEXTURES, Precision.HIGH)],
)
def test_mean_hidden_state(gpu, tmp_path, backend, precision):
    path = tiny_llama(tmp_path / "m.gguf", ggml_type="Q4_0")
    check_mean_hidden(load_one(gpu, path, backend=backend, precision=precision), path)


def test_mean_hidden_state_of_fused_decode(tmp_path):
    """One row leaves its residual stream elsewhere there."""
    path = tiny_llama(tmp_path / "m.gguf", dim=128, heads=2, kv_heads=1, head_dim=64, ffn=192, ggml_type="Q4_0")
    with closing(open_gpu(LLAMAGPU_FUSED="1")) as gpu:
        run = load_one(gpu, path)
        if not run.model.fused:
            pytest.skip("this adapter cannot fuse")
        check_mean_hidden(run, path)


def test_embed(llama):
    texts = ["the quick brown fox", "a", "lazy dogs " * 9]
    many = llama.embed(texts)
    assert many.shape == (3, llama.config.dim) and many.dtype == np.float32
    assert np.linalg.norm(many, axis=1) == pytest.approx(1, abs=1e-6)
    answer = llama.complete(PROMPT, max_tokens=4, sampling=GREEDY)
    for text, row in zip(texts, many, strict=True):
        assert np.array_equal(llama.embed(text), row)
    assert llama.complete(PROMPT, max_tokens=4, sampling=GREEDY).ids == answer.ids
    assert llama.embed([]).shape == (0, llama.config.dim)
    assert abs(float(many[0] @ many[1])) < 0.99


def test_embed_refuses(llama):
    for text in (5, None, ["a", 5], b"ab"):
        with pytest.raises(BadArgument, match="text is "):
            llama.embed(text)
    with pytest.raises(DoesNotFit, match=r"text 1 has \d+ tokens; the context holds 256"):
        llama.embed(["a", "zq " * 300])


# Wrong arguments

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [NAN, INF, -0.1, "0", None, True]),
        ("top_k", [-1, 1.5, None, "40"]),
        ("top_p", [2, -0.1, NAN, None]),
        ("min_p", [1.1, -1, NAN]),
        ("repeat_penalty", [0, -1, NAN, INF, 1e-40, 1e39]),
        ("repeat_last_n", [-1, 0.5]),
        ("seed", [-1, 1.5, "x"]),
        ("presence_penalty", [NAN, INF, -101, "1", None]),
        ("frequency_penalty", [NAN, -INF, 101, True]),
        ("logit_bias", [None, [1], {-1: 1}, {"a": 1}, {1: 101}, {1: NAN}, {1: INF}, {1: True}, {1: "1"}, {1.5: 1}]),
    ],
)
def test_sampling_refuses(name, values):
    for value in values:
        with pytest.raises(BadArgument) as caught:
            Sampling(**{name: value})
        assert caught.value.cause == f"{name} is {value!r}" and caught.value.remedy and caught.value.exit_code == 2


def test_sampling_takes_the_ends_of_the_ranges():
    Sampling(0, 0, 0, 0, 0.01, 0, 0)
    Sampling(1e9, np.int64(5), np.float32(1), 1.0, 100, 10**6, 2**70)
    given = {3: 100, np.int64(4): -100.0, 0: -INF, 9: False}
    sampling = Sampling(presence_penalty=-100, frequency_penalty=100, logit_bias=given)
    given[7] = 1
    assert sampling.logit_bias == {3: 100, 4: -100, 0: -INF, 9: -INF}
    assert hash(sampling) == hash(replace(sampling))
    assert len(Sampling(logit_bias={i: 1 for i in range(300)}).logit_bias) == 300
    with pytest.raises(BadArgument) as caught:
        Sampling(logit_bias={i: 1 for i in range(301)})
    assert "300" in caught.value.remedy


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (dict(max_tokens=-5), "max_tokens is -5"),
        (dict(max_tokens=2.5), "max_tokens is 2.5"),
        (dict(max_tokens=None), "max_tokens is None"),
        (dict(stop=["a", 5]), r"stop is \['a', 5\]"),
        (dict(stop=5), "stop is 5"),
        (dict(logprobs=True), "logprobs is True"),
        (dict(logprobs=-1), "logprobs is -1"),
        (dict(sampling=0.8), "sampling is 0.8"),
        (dict(grammar="yes|no"), "grammar is 'yes|no'"),
        (dict(prompt=["a", "b"]), r"prompt is \['a', 'b'\]"),
        (dict(prompt=b"abc"), "prompt is b'abc'"),
        (dict(prompt=None), "prompt is None"),
        (dict(prompt=[1.5]), r"prompt is \[1.5\]"),
        (dict(prompt=np.zeros((30, 30))), r"prompt is array.*\.\.\."),
        (dict(prompt=[]), "the prompt is empty"),
        (dict(prompt=[288]), "outside 0..287"),
        (dict(sampling=Sampling(logit_bias={288: 1})), "logit_bias has token id 288; the model's are 0..287"),
    ],
)
def test_complete_refuses(llama, arguments, cause):
    with pytest.raises(BadArgument, match=cause) as caught:
        llama.complete(**{"prompt": PROMPT, "max_tokens": 1} | arguments)
    assert "\n" not in caught.value.cause and caught.value.remedy
    if "-" in cause:
        assert "from 0 up" in caught.value.remedy


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        ("hi", "messages is 'hi'"),
        ([], r"messages is \[\]"),
        (MESSAGES[0], "messages is {'role'"),
        (["hi"], r"messages\[0\] is 'hi'"),
        ([*MESSAGES, {"role": "user"}], r"messages\[1\]\['content'\] is None"),
        ([{"content": "hi"}], r"messages\[0\]\['role'\] is None"),
        ([*MESSAGES, {"role": "robot", "content": "hi"}], r"messages\[1\]\['role'\] is 'robot'"),
        ([{"role": "user", "content": ["a", "b"]}], r"messages\[0\]\['content'\] is \['a', 'b'\]"),
    ],
)
def test_chat_refuses(llama, messages, cause):
    for call in (llama.chat, llama.encode_chat):
        with pytest.raises(BadArgument, match=cause) as caught:
            call(messages)
        assert caught.value.remedy


def test_what_does_not_fit_names_the_larger_context(path, gpu, llama):
    with Llama(path, device=gpu, context=64) as small, pytest.raises(DoesNotFit) as caught:
        small.complete(PROMPT, max_tokens=100)
    assert "at most 256" in caught.value.remedy and "fewer new tokens" in caught.value.remedy
    with pytest.raises(DoesNotFit) as caught:
        llama.complete(PROMPT, max_tokens=1000)
    assert "larger" not in caught.value.remedy  # it is the largest already
    with pytest.raises(DoesNotFit) as caught:
        llama.complete([1] * 256, max_tokens=8)
    assert caught.value.remedy == "use a shorter prompt"  # fewer new tokens would not do


# Generations


def test_a_generation_is_an_iterator(llama):
    want = llama.complete(PROMPT, max_tokens=9, sampling=GREEDY)
    run = llama.generate(PROMPT, max_tokens=9, sampling=GREEDY)
    assert iter(run) is run and run.finish_reason == ""
    first = next(run)
    for token in run:
        second = token
        break
    rest = list(run)  # goes on where the loop left it
    assert [first.id, second.id, *(token.id for token in rest)] == list(want.ids) == run.ids
    assert run.finish_reason == "length" and run.usage.completion_tokens == 9
    assert list(run) == [] and run.ids == list(want.ids)  # a second iteration finds nothing, and changes nothing
    with pytest.raises(StopIteration):
        next(run)
    assert run.result().text == want.text


def test_generations_one_after_another(llama):
    """Made at once, each runs when it is read."""
    prompts = [PROMPT, "lazy dogs", "a"]
    runs = [llama.generate(prompt, max_tokens=5, sampling=GREEDY) for prompt in prompts]
    texts = [run.result().ids for run in runs]
    assert texts == [llama.complete(prompt, max_tokens=5, sampling=GREEDY).ids for prompt in prompts]


@pytest.mark.parametrize("later", ["generate", "complete", "embed", "load_prompt"])
def test_a_later_call_disturbs_nobody(llama, later, tmp_path):
    want = [llama.complete(prompt, max_tokens=50, sampling=GREEDY).ids for prompt in (PROMPT, "lazy dogs")]
    if later == "load_prompt":
        llama.save_prompt(tmp_path / "prompt")
    first = llama.generate(PROMPT, max_tokens=50, sampling=GREEDY)
    next(first)
    calls = {
        "generate": lambda: next(llama.generate("a", max_tokens=5)),
        "complete": lambda: llama.complete("a", max_tokens=5),
        "embed": lambda: llama.embed("a"),
        "load_prompt": lambda: llama.load_prompt(tmp_path / "prompt"),
    }
    calls[later]()
    assert first.result().ids == want[0]
    assert llama.complete("lazy dogs", max_tokens=50, sampling=GREEDY).ids == want[1]


def test_two_generations_in_turns(llama):
    want = [llama.complete(prompt, max_tokens=9, sampling=GREEDY).ids for prompt in (PROMPT, "a")]
    runs = [llama.generate(prompt, max_tokens=9, sampling=GREEDY) for prompt in (PROMPT, "a")]
    pairs = list(zip(*runs, strict=True))
    assert [tuple(token.id for token in tokens) for tokens in zip(*pairs, strict=True)] == want


def test_saving_a_prompt_ends_nothing(llama, tmp_path):
    want = llama.complete(PROMPT, max_tokens=20, sampling=GREEDY)
    run = llama.generate(PROMPT, max_tokens=20, sampling=GREEDY)
    next(run)
    llama.save_prompt(tmp_path / "prompt")
    assert run.result().ids == want.ids


def test_a_dropped_generation_is_gone(llama):
    gc.collect()
    gc.disable()  # not by the garbage collector: there is no cycle
    try:
        run = llama.generate(PROMPT, ignore_eos=True)
        next(run)
        kept = weakref.ref(run)
        del run
        assert kept() is None
    finally:
        gc.enable()
    assert llama.complete(PROMPT, max_tokens=2, sampling=GREEDY).usage.completion_tokens == 2


def test_a_generation_in_a_cycle_is_gone(llama, monkeypatch):
    """The garbage collector frees what a cycle holds in any order, and may free staging buffers first."""
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    want = llama.complete(PROMPT, max_tokens=20, sampling=GREEDY)
    gc.collect()
    for _ in range(3):
        run = llama.generate("lazy dogs", sampling=GREEDY)
        next(run)
        cycle = [run]
        cycle.append(cycle)
        del run, cycle
        gc.collect()
        assert not unraisable
        assert llama.complete(PROMPT, max_tokens=20, sampling=GREEDY).ids == want.ids


def test_a_closed_generation(llama):
    run = llama.generate(PROMPT, max_tokens=20, ignore_eos=True)
    next(run)
    run.close()
    run.close()
    with pytest.raises(WrongState, match="it was closed") as caught:
        next(run)
    assert caught.value.remedy == "start a new one"
    run = llama.generate(PROMPT, max_tokens=2)
    answer = run.result()
    run.close()
    assert list(run) == [] and run.result() == answer


def test_closed_before_its_first_token(path, gpu):
    """As another thread may do it, while the first waits for a token."""
    with Llama(path, device=gpu, chunk=8) as llama:
        [run] = llama.submit(list(range(20, 41)), max_tokens=20)
        llama.scheduler.while_computing = run.close  # in the first step of three
        with pytest.raises(WrongState, match="it was closed"):
            next(run)
        assert not run.finish_reason and not run.ids


@pytest.mark.parametrize("ids", [[], [-5], [10**6], "text"])
def test_ids_that_cannot_be_embedded(llama, ids):
    with pytest.raises(BadArgument):
        llama.embed_ids(ids)


def test_a_failed_generation_says_so(llama):
    def progress(done: int, total: int) -> None:
        raise KeyError

    run = llama.generate("lazy dogs", progress=progress)
    with pytest.raises(KeyError):
        next(run)
    with pytest.raises(WrongState, match="KeyError came up in it"):
        next(run)
    assert llama.complete(PROMPT, max_tokens=1).usage.completion_tokens == 1


def test_a_progress_function_that_generates_is_refused(path, gpu):
    """It is called amid a step of everybody's. Its own generation fails, and nobody else gets other tokens."""
    with Llama(path, device=gpu, parallel=3, chunk=16, precision="high", kv_type="f32") as llama:
        tried = {
            "complete": lambda: llama.complete("a", max_tokens=2),
            "embed": lambda: llama.embed("a"),
            "save": lambda: llama.save_prompt("prompt"),
            "next": lambda: [next(neighbour) for _ in range(50)],
            "warm up": lambda: llama.warm_up(),
        }
        alone = llama.generate("the quick", max_tokens=40, sampling=GREEDY, ignore_eos=True).result().ids
        for call in tried.values():
            neighbour = llama.generate("the quick", max_tokens=40, sampling=GREEDY, ignore_eos=True)
            next(neighbour)
            run = llama.generate("lazy dogs " * 6, progress=lambda done, total, call=call: call())
            with pytest.raises(WrongState, match="progress function uses the model"):
                next(run)
            assert neighbour.result().ids == alone
            assert llama.complete("a", max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True, "x"])
def test_tokens_to_save_that_are_none(llama, tmp_path, tokens):
    llama.complete(PROMPT, max_tokens=1)
    with pytest.raises(BadArgument, match="tokens is "):
        llama.save_prompt(tmp_path / "prompt", tokens)
    assert not any(tmp_path.iterdir())


def test_penalties_that_look_back_without_end(llama):
    far = Sampling(temperature=0, repeat_penalty=1.3, repeat_last_n=10**30)
    far_enough = replace(far, repeat_last_n=1024)
    runs = [llama.generate(PROMPT, max_tokens=8, sampling=how, ignore_eos=True) for how in (far, far_enough)]
    assert runs[0].result().ids == runs[1].result().ids


# Closing


def test_use_after_close(path, gpu):
    llama = Llama(path, device=gpu)
    begun, unread = llama.generate(PROMPT, ignore_eos=True), llama.generate(PROMPT)
    finished = llama.generate(PROMPT, max_tokens=1)
    finished.result()
    next(begun)
    llama.close()
    llama.close()
    with pytest.raises(WrongState, match="its Llama was closed") as caught:
        next(begun)
    assert caught.value.remedy == "load the model again"
    assert repr(llama) == f"<Llama {path.name} on {gpu.name}, context 256, closed>"
    calls = {
        "unread": lambda: next(unread),
        "complete": lambda: llama.complete(PROMPT),
        "chat": lambda: llama.chat(MESSAGES),
        "embed": lambda: llama.embed("a"),
        "save": lambda: llama.save_prompt("prompt"),
        "load": lambda: llama.load_prompt("prompt"),
    }
    for call in calls.values():
        with pytest.raises(WrongState, match="this Llama is closed") as caught:
            call()
        assert caught.value.remedy
    assert list(finished) == [] and len(finished.ids) == 1
    assert llama.decode(llama.encode(PROMPT), special=False) == PROMPT  # needs no device


def test_leaving_without_closing(path, gpu):
    """A script may end in the midst of a generation: it ends quietly."""
    code = (
        f"import llamagpu\nllama = llamagpu.load({str(path)!r})\n"
        "run = llama.generate('a b', sampling=llamagpu.Sampling(temperature=0))\n"
        "for token in run:\n    break\nprint('end')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


def test_chat_without_a_template_names_complete(tmp_path, gpu):
    with (
        Llama(write_gguf(tmp_path / "m.gguf", *tiny_parts()), device=gpu) as llama,
        pytest.raises(LlamaGpuError, match="no chat template") as caught,
    ):
        llama.chat(MESSAGES)
    assert "complete" in caught.value.remedy


FORKING = """
import os, sys, llamagpu
llama = llamagpu.load(sys.argv[1])
run = llama.generate("the quick", max_tokens=50, ignore_eos=True)
next(run)
if os.fork() == 0:
    shared = lambda: llamagpu.Llama(sys.argv[1], device=llama.gpu)
    uses = (lambda: next(run), lambda: llama.complete("a"), lambda: llama.embed("a"), shared)
    for use in (*uses, lambda: llamagpu.load(sys.argv[1])):
        try:
            use()
        except llamagpu.errors.WrongState as error:
            print(error.cause, flush=True)
    llama.close()
    os._exit(0)
os.wait()
print(len(run.result().ids))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_says_so(path):
    command = [sys.executable, "-c", FORKING, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = found.stdout.splitlines()
    assert lines == 5 * ["this process was forked from one that uses a GPU"] + ["50"], found.stderr
