"""The Python API, from a prompt to streamed text: what is yielded, when it ends, what stays in the KV cache."""

import dis
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import open_gpu
from gguf_builder import tiny_llama, tiny_parts, write_gguf
from one_sequence import forget
from test_hostile_files import MODEL, MUTATIONS
from test_hostile_files import encode as encode_gguf

from llamagpu import Llama, Sampling, Token
from llamagpu.engine.load import resolve
from llamagpu.engine.options import EngineOptions
from llamagpu.engine.scheduler import Request
from llamagpu.errors import BadArgument, DoesNotFit, LlamaGpuError, NumericCheckFailed, WrongState

GREEDY = Sampling(temperature=0)
# Where texts are compared whose tokens were read by prefill here and by decode there: rounding must not decide.
EXACT = {"precision": "high", "kv_type": "f32"}
VARIED = Sampling(temperature=3, top_k=0, top_p=1, min_p=0, seed=11)
PROMPT = "the quick brown fox"
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", metadata={"tokenizer.chat_template": TEMPLATE})


@pytest.fixture(scope="module")
def llama(path, gpu):
    """Random weights: it never means to end, and says every token some time."""
    return Llama(path, device=gpu, **EXACT)


def text_of(llama, prompt=PROMPT, **options):
    run = llama.generate(prompt, **{"max_tokens": 40, "sampling": GREEDY, "ignore_eos": True} | options)
    tokens = list(run)
    assert [token.id for token in tokens] == run.ids
    assert "".join(token.text for token in tokens) == run.text
    return run


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.5, seed=5)], ids=["greedy", "sampled"])
def test_streamed_text_is_the_decoded_text(llama, sampling):
    run = text_of(llama, max_tokens=120, sampling=sampling)
    tokenizer = llama.tokenizer
    shown = [id for id in run.ids if not tokenizer.is_control(id)]
    before = tokenizer.decode([*run.prompt_ids, *shown], special=False)
    assert before == tokenizer.decode(run.prompt_ids, special=False) + run.text
    assert len(run.ids) == 120 and run.finish_reason == "length"
    assert "\ufffd" in run.text  # a random model says bytes of no character, and they come out too


def test_a_cpu_adapter_looks_back_only_so_far(gpu, tmp_path):
    """Beyond that llvmpipe would give wrong numbers without an error; nobody who did not ask for more is refused."""
    path = tiny_llama(tmp_path / "long.gguf", context=100_000)
    with Llama(path, device=gpu) as llama:
        assert llama.context == (63488 if gpu.caps.cpu else 100_000)
    if gpu.caps.cpu:
        for options in ({"context": 65_533}, {"context": 8193, "kv_type": "f16"}):
            with pytest.raises(DoesNotFit, match="more than a CPU adapter can do"):
                Llama(path, device=gpu, **options)


def test_prompt_as_ids_is_prompt_as_text(llama):
    ids = llama.tokenizer.encode(PROMPT)
    assert text_of(llama, ids).ids == text_of(llama, PROMPT).ids


def test_same_seed_same_text(llama):
    def sampled(seed):
        return text_of(llama, sampling=Sampling(temperature=1.2, seed=seed)).text

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_stop_strings(llama):
    """Cut out of any place of the text, so that they begin and end inside tokens and span several."""
    whole = text_of(llama, sampling=VARIED).text
    for start in range(0, len(whole) - 5, 3):
        stop = whole[start : start + 5]
        run = text_of(llama, stop=[stop, "never said"], sampling=VARIED)
        assert run.text == whole[: whole.index(stop)] and run.finish_reason == "stop"
        assert len(run.ids) < 40 or start + 8 > len(whole)


def test_of_two_stop_strings_the_one_that_is_whole_first(llama):
    whole = text_of(llama, sampling=VARIED).text
    for stops, end in (((whole[9:14], whole[5:9]), 5), ((whole[9:14], whole[5:30]), 9)):
        assert all(whole.count(stop) == 1 for stop in stops)
        assert text_of(llama, stop=stops, sampling=VARIED).text == whole[:end]


def test_what_looks_like_a_stop_string_but_is_none_comes_out(llama):
    whole = text_of(llama).text
    assert text_of(llama, stop=[whole[5:9] + "\0", whole[-3:] + "more"]).text == whole


def test_a_closed_llama_cannot_be_entered_again(path, gpu):
    with Llama(path, device=gpu, context=64) as llama:
        pass
    with pytest.raises(WrongState, match="is closed"), llama:
        pass


@pytest.mark.parametrize("stop", ["", ["a", ""]])
def test_an_empty_stop_string_is_refused(llama, stop):
    with pytest.raises(BadArgument, match=r"^stop is ") as raised:
        llama.generate(PROMPT, stop=stop)
    assert "none may be empty" in "".join(traceback.format_exception_only(raised.value))  # the remedy, too


def test_the_end_token_ends(path, tmp_path, gpu):
    """The token that the model says tenth is made its end token."""
    with Llama(path, device=gpu, **EXACT) as llama:
        ids = text_of(llama, sampling=VARIED).ids
    tenth = next(id for id in ids[9:] if id not in ids[:9] and id > 2)
    keys, tensors = tiny_parts(metadata={"tokenizer.ggml.eos_token_id": tenth})
    with Llama(write_gguf(tmp_path / "end.gguf", keys, tensors), device=gpu, **EXACT) as llama:
        run = text_of(llama, ignore_eos=False, sampling=VARIED)
        assert run.ids == ids[: ids.index(tenth) + 1] and run.finish_reason == "stop"
        ended = llama.tokenizer.decode([*run.prompt_ids, *run.ids[:-1]], special=False)
        assert ended == PROMPT + run.text
        assert text_of(llama, sampling=VARIED).ids == ids  # --ignore-eos


def test_no_new_tokens(llama):
    run = text_of(llama, max_tokens=0)
    assert (run.ids, run.text, run.finish_reason) == ([], "", "length")
    assert run.timings.prompt_tokens == len(run.prompt_ids) and run.timings.prefill_s > 0


def test_until_the_context_is_full(path, gpu):
    with Llama(path, device=gpu, context=64) as llama:
        prompt = llama.tokenizer.encode(PROMPT)
        for sampling in (GREEDY, Sampling(seed=1)):
            run = text_of(llama, max_tokens=-1, sampling=sampling)
            # the last token is sampled, but has no position in the cache
            assert len(prompt) + len(run.ids) == 64 + 1 and run.finish_reason == "context"


def test_the_context_is_what_the_kv_cache_holds(path, gpu, monkeypatch):
    """By default the model's, unless that takes too much memory; -c and --kv-memory decide otherwise."""
    ways = {"": {}, "-c": {"context": 100}, "mib": {"kv_memory": 1}, "both": {"context": 9, "kv_memory": 1}}
    held = {}
    for name, options in ways.items():
        with Llama(path, device=gpu, **EXACT, **options) as llama:
            held[name] = llama.context, llama.loaded.engine.cache.capacity
            each = llama.loaded.engine.cache.position_bytes
    in_mib = (1 << 20) // each // 64 * 64
    assert held == {"": (256, 256), "-c": (100, 128), "mib": (256, in_mib), "both": (9, in_mib)}
    monkeypatch.setattr("llamagpu.engine.load.KV_BYTES", 200 * each)
    monkeypatch.setattr("llamagpu.engine.load.SOFTWARE_KV_BYTES", 200 * each)
    with Llama(path, device=gpu, **EXACT) as llama:
        assert llama.context == llama.loaded.engine.cache.capacity == 192
    with Llama(path, device=gpu, context=256, **EXACT) as llama:
        assert llama.context == 256


def test_a_kv_memory_that_does_not_hold_the_context(tmp_path, gpu):
    path = tiny_llama(tmp_path / "m.gguf", context=100_000)
    with pytest.raises(DoesNotFit, match=r"a KV cache of 1 MiB holds \d+ positions") as caught:
        Llama(path, device=gpu, context=50_000, kv_memory=1)
    memory, context = map(int, re.findall(r"\d+", caught.value.remedy))
    with Llama(path, device=gpu, context=context, kv_memory=1) as llama:
        assert llama.context == context
    settings = resolve(EngineOptions(context=50_000, kv_memory=memory), llama.loaded.source, gpu)
    assert settings.capacity >= settings.context == 50_000


def test_prompts_before_the_last_one_are_found(llama):
    """Pages are kept until their place is needed; they are of use in any order."""
    forget(llama)
    first, second = (llama.tokenizer.encode(text) for text in (PROMPT, "a lazy dog sleeps"))
    want = {}
    for prompt in (first, second):
        want[tuple(prompt)] = text_of(llama, prompt)
        assert want[tuple(prompt)].timings.cached_tokens < 5  # what both begin with
    for prompt in (first, second, first):
        again = text_of(llama, prompt)
        assert again.ids == want[tuple(prompt)].ids
        assert again.timings.cached_tokens == len(prompt) - 1


def test_an_embedding_leaves_prompts_in_the_cache(llama):
    forget(llama)
    prompt = llama.tokenizer.encode(PROMPT)
    want = text_of(llama, prompt).ids
    llama.embed(["the quick", PROMPT])
    again = text_of(llama, prompt)
    assert again.ids == want and again.timings.cached_tokens == len(prompt) - 1


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=3)], ids=["greedy", "sampled"])
def test_what_was_read_is_not_read_again(llama, path, gpu, sampling):
    forget(llama)
    first = llama.tokenizer.encode(PROMPT)
    run = text_of(llama, first, sampling=sampling)
    longer = [*first, *run.ids, *llama.tokenizer.encode(" and then", bos=False)]
    other = [*first[:-2], *llama.tokenizer.encode(" dog", bos=False)]
    for prompt, least in ((longer, len(first) + 39), (first, len(first) - 1), (other, len(first) - 2)):
        again = text_of(llama, prompt, sampling=sampling)
        assert again.timings.cached_tokens == least
        with Llama(path, device=gpu, **EXACT) as fresh:
            assert text_of(fresh, prompt, sampling=sampling).ids == again.ids


def test_stopping_early_leaves_the_model_usable(llama):
    want = text_of(llama).ids
    for sampling in (GREEDY, Sampling(seed=1)):
        for _ in zip(range(5), llama.generate(PROMPT, sampling=sampling), strict=False):
            pass
        assert text_of(llama).ids == want


def test_closing_in_the_midst_of_a_text(path):
    """Steps may be on their way to the queue: none of them may come after the device has gone."""
    for count in range(1, 6):
        llama = Llama(path)
        run = iter(llama.generate(PROMPT, max_tokens=100, sampling=GREEDY, ignore_eos=True))
        for _ in range(count):
            next(run)
        llama.close()
        with pytest.raises(LlamaGpuError):
            list(run)


def press(*_: object) -> None:
    raise KeyboardInterrupt


def interrupt(run: Iterable[Token], after_s: float) -> None:
    """Runs it; KeyboardInterrupt comes at that moment, wherever Python is then, unless it is through before."""
    before = signal.signal(signal.SIGALRM, press)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        list(run)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["textures", "buffers"])
def own_llama(path, request, monkeypatch):
    """On a device of its own, as on a software adapter and as on a GPU."""
    with closing(open_gpu()) as gpu:
        monkeypatch.setattr(gpu, "caps", replace(gpu.caps, cpu=request.param == "textures"))
        with Llama(path, device=gpu, **EXACT) as llama:
            yield llama


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signals here")
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, seed=3, repeat_penalty=1.2)], ids=["greedy", "sampled"])
def test_an_interrupted_text_goes_on_as_if_nothing_had_been(own_llama, sampling):
    llama = own_llama
    text_of(llama, max_tokens=40, sampling=sampling)  # compiles
    forget(llama)
    whole = text_of(llama, max_tokens=40, sampling=sampling)
    ids, cuts = whole.prompt_ids + whole.ids, set()
    end = whole.timings.first_token_s + whole.timings.decode_s
    for count in range(60):  # spread over the time it takes; batches, and other work on the machine, make many the same
        moment = 0.001 + end * (count * 0.618 % 1)
        if count >= 6 and len(cuts) > 3:
            break
        forget(llama)
        run = llama.generate(PROMPT, max_tokens=40, sampling=sampling, ignore_eos=True)
        interrupt(run, moment)
        done = run.prompt_ids + run.ids
        assert ids[: len(done)] == done
        if len(done) < len(ids):
            rest = text_of(llama, done, max_tokens=len(ids) - len(done), sampling=sampling)
            assert done + rest.ids == ids
        cuts.add(len(run.ids))
    assert len(cuts) > 3


def test_interrupted_while_pages_are_taken(own_llama, path, gpu, monkeypatch):
    """Pages that were taken, and that no sequence got, are found when they are needed."""
    with Llama(path, device=gpu, **EXACT) as other:
        want = text_of(other, max_tokens=-1).ids
    pool = own_llama.loaded.engine.cache.pool
    take = pool.take
    run = own_llama.generate(PROMPT, sampling=GREEDY, ignore_eos=True)
    for _ in range(60):
        next(run)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pool, "take", lambda count: press(take(count)))
        list(run)
    assert 60 <= len(run.ids) < len(want) and run.ids == want[: len(run.ids)]
    assert run.ids + text_of(own_llama, run.prompt_ids + run.ids, max_tokens=-1).ids == want


def test_closing_frees_a_shared_device(path, gpu):
    """Weights, KV cache, scratch, and the logits of all rows that only scoring needs."""
    before = gpu.allocated_bytes
    for precision in ("high", "fast"):
        with Llama(path, device=gpu, precision=precision) as llama:
            text_of(llama)
            with llama.scheduler.alone(5) as sequence:
                llama.loaded.engine.log_probs(sequence, [1, 2, 3, 4, 5])
            assert gpu.allocated_bytes > before
        llama.close()  # a second time
        assert gpu.allocated_bytes == before


def test_timings(llama):
    """The first token comes at 1, all others at 10, so that every figure is known."""

    def note_time(request: Request) -> None:
        request.latest_at = 10.0 if request.new else 1.0
        request.first_at = request.first_at or request.latest_at

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llamagpu.llama.time", SimpleNamespace(perf_counter=lambda: 0.0))
        patch.setattr(Request, "note_time", note_time)
        forget(llama)
        t = text_of(llama, [1, 2, 3, 4], max_tokens=10).timings
    assert (t.prompt_tokens, t.cached_tokens, t.tokens) == (4, 0, 10)
    assert (t.prefill_s, t.first_token_s, t.decode_s) == (1.0, 1.0, 9.0)
    assert (t.prefill_tps, t.decode_tps) == (4.0, 1.0)


def test_load_times(path, gpu, monkeypatch):
    """Every stage is timed, and their sum is no more than the time that loading took."""
    began = time.perf_counter()
    with Llama(path, device=gpu) as llama:
        took, times = time.perf_counter() - began, llama.load_times
        stages = (times.open_s, times.device_s, times.weights_s, times.compile_s)
        assert min(stages) > 0 and times.prompt_s == 0
        assert sum(stages) == times.total_s <= took


def test_progress_counts_the_prompt(path, gpu):
    seen: list[tuple[int, int]] = []
    with Llama(path, device=gpu, chunk=8) as llama:
        list(llama.generate(list(range(20, 41)), max_tokens=1, progress=lambda *done: seen.append(done)))
    assert seen == [(0, 21), (8, 21), (16, 21), (21, 21)]


@pytest.mark.parametrize(
    ("prompt", "options", "error", "cause"),
    [
        ([], {}, LlamaGpuError, "empty"),
        ([1, 288], {}, LlamaGpuError, "outside 0..287"),
        ([-1], {}, LlamaGpuError, "outside 0..287"),
        ([1] * 200, {"max_tokens": 57}, DoesNotFit, "200 prompt tokens and 57 new ones need a context"),
        ([1] * 256, {}, DoesNotFit, "context of 257; it is 256"),
    ],
)
def test_refused_prompts(llama, prompt, options, error, cause):
    with pytest.raises(error, match=cause) as caught:
        llama.generate(prompt, **options)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("options", "error", "cause"),
    [
        ({"context": 257}, DoesNotFit, "trained for 256"),
        ({"kv_type": "q8"}, LlamaGpuError, "kv_type is 'q8'"),
        ({"kv_type": "q8_0"}, LlamaGpuError, "heads have 16"),
        ({"precision": "low"}, LlamaGpuError, "precision is 'low'"),
    ],
)
def test_refused_settings(path, gpu, options, error, cause):
    with pytest.raises(error, match=cause) as caught:
        Llama(path, device=gpu, **options)
    assert caught.value.remedy


def test_chat(llama):
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert llama.render_chat(messages) == "[system]be kind[user]hi[a]"
    assert llama.encode_chat(messages) == llama.tokenizer.encode("[system]be kind[user]hi[a]")


def test_a_template_that_writes_bos_itself_gets_one(tmp_path, gpu):
    template = "{{ bos_token }}{{ messages[0].content }}"
    keys, tensors = tiny_parts(metadata={"tokenizer.chat_template": template})
    with Llama(write_gguf(tmp_path / "m.gguf", keys, tensors), device=gpu) as llama:
        ids = llama.encode_chat([{"role": "user", "content": "hi"}])
        assert ids.count(1) == 1 and ids == [1, *llama.tokenizer.encode("hi", bos=False)]


def test_chat_needs_a_template(tmp_path, gpu):
    llama = Llama(tiny_llama(tmp_path / "m.gguf"), device=gpu)
    with pytest.raises(LlamaGpuError, match="no chat template"):
        llama.encode_chat([{"role": "user", "content": "hi"}])


# Damaged models


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_that_is_no_number(tmp_path, gpu, temperature):
    keys, tensors = tiny_parts(ggml_type="F16")
    for name, (ggml_type, shape, _) in tensors.items():
        if "norm" in name:
            tensors[name] = (ggml_type, shape, np.full(shape, 3e38, "<f4").tobytes())
    llama = Llama(write_gguf(tmp_path / "m.gguf", keys, tensors), device=gpu)
    with pytest.raises(NumericCheckFailed, match="not a number"):
        list(llama.generate(PROMPT, sampling=Sampling(temperature=temperature), max_tokens=20))


def test_errors_name_the_file(tmp_path, gpu):
    keys, tensors = tiny_parts()
    ggml_type, shape, _ = tensors["blk.1.ffn_up.weight"]
    tensors["blk.1.ffn_up.weight"] = (ggml_type, shape, np.full(shape, np.nan, "<f4").tobytes())
    damaged = write_gguf(tmp_path / "nan.gguf", keys, tensors)
    with pytest.raises(LlamaGpuError) as caught:
        Llama(damaged, device=gpu)
    assert caught.value.cause.startswith(f"{damaged}: tensor 'blk.1.ffn_up.weight' is damaged")
    assert str(caught.value) == caught.value.cause


def weights_flipped(rng, raw, header, marks):
    out = bytearray(raw)
    for at in rng.integers(header, len(raw), size=rng.integers(1, 200)):
        out[at] ^= 1 << rng.integers(8)
    return bytes(out)


@pytest.mark.parametrize("mutate", [*MUTATIONS, weights_flipped], ids=lambda f: f.__name__)
def test_damaged_models(tmp_path, gpu, mutate):
    """Opening and running a damaged file gives text or a refusal, nothing else."""
    marks: list = []
    raw = encode_gguf(*tiny_parts(**MODEL), marks=marks)
    file, rng, ran = tmp_path / "m.gguf", np.random.default_rng(9), 0
    for i in range(40):
        file.write_bytes(mutate(rng, raw, marks[-1][1] + 8, marks))
        try:
            with Llama(file, device=gpu, context=16) as llama:
                for temperature in (0.0, 1.0):
                    list(llama.generate("a b", max_tokens=3, sampling=Sampling(temperature=temperature)))
            ran += 1
        except LlamaGpuError as error:
            assert error.cause.isprintable() and error.remedy
        except BaseException as error:
            error.add_note(f"{mutate.__name__}, file {i}")
            raise
    assert ran if mutate is weights_flipped else ran < 40


def interrupt_at_call(number: int) -> tuple[Callable[..., Any], list[int]]:
    """A trace function that raises KeyboardInterrupt at this call of the package, and what counts the calls.

    Python looks for signals at calls. Not in the lock's own methods: at the call that ends a `with` this is too early,
    since a signal is noticed after it.
    """
    calls = [0]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        if "llamagpu" not in name or name.endswith("fair_lock.py"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL"):
            calls[0] += 1
            if calls[0] == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    return trace, calls


def test_an_interrupt_at_any_call(path):
    """Of a text with company. Every text is as it would have been, then and later: pages and queues are whole."""
    with Llama(path, **EXACT, parallel=3) as llama:
        options = {"max_tokens": 12, "sampling": GREEDY, "ignore_eos": True}
        prompts = (PROMPT, "a fox", "the lazy dog")
        texts = [list(llama.generate(prompt, **options).result().ids) for prompt in prompts]
        number, before, interrupted = 1, sys.gettrace(), 0
        while True:
            run, *others = (llama.submit(prompt, **options)[0] for prompt in prompts)
            trace, calls = interrupt_at_call(number)
            try:
                sys.settrace(trace)
                list(run)
                break
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(before)
            assert texts[0][: len(run.ids)] == list(run.ids), number
            run.close()
            assert [list(other.result().ids) for other in others] == texts[1:], number
            assert list(llama.generate(PROMPT, **options).result().ids) == texts[0], number
            number += max(1, 13 * number // 200)
        assert calls[0] < number and interrupted > 50
