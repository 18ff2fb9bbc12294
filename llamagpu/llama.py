"""The public API: load a model, chat, complete text, embed it."""

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from llamagpu.arguments import check_messages, stop_strings, token_ids
from llamagpu.engine import prompt_cache
from llamagpu.engine.grammar import Grammar, GrammarVocabulary, Matcher
from llamagpu.engine.load import LoadedModel, LoadTimes, elapsed, load_model, open_source
from llamagpu.engine.memory import MemoryPlan
from llamagpu.engine.options import EngineOptions, KvType, Precision
from llamagpu.engine.sampler import HostSampler, Sampling, Scores, need_finite
from llamagpu.engine.scheduler import Request, Scheduler
from llamagpu.engine.sequence import Sequence as TokenSequence
from llamagpu.engine.step_inputs import MAX_SEGMENTS
from llamagpu.errors import (
    BadArgument,
    DoesNotFit,
    LlamaGpuError,
    Overloaded,
    WrongState,
    check_argument,
    error_context,
    is_whole,
)
from llamagpu.files.chat_template import render
from llamagpu.files.config import ModelConfig
from llamagpu.files.tokenizer import StreamDecoder, Tokenizer
from llamagpu.gpu.device import Gpu, check_process, is_forked, map_device_lost
from llamagpu.hub.catalogue import suggested_sampling
from llamagpu.hub.registry import resolve
from llamagpu.results import Completion, Logprob, Timings, Token, Usage

Progress = Callable[[int, int], None]
Pooling = Literal["mean", "last"]
POOLING_TYPES: dict[int, Pooling] = {1: "mean", 3: "last"}  # as GGUF files number them
Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Prompt = str | Sequence[int] | Sequence[Message]

PARALLEL = 4  # generations that share a step, unless told otherwise
BATCH_QUEUE = 4 * MAX_SEGMENTS  # generations of a batch that are queued: enough for every step to be full
AT_LEAST_0 = "a whole number from 0 up"
CLOSED = "its Llama was closed"


def load(
    model: str | os.PathLike[str],
    *,
    device: str | int | Gpu | None = None,
    context: int | None = None,
    chunk: int | None = None,
    kv_type: KvType | str | None = None,
    precision: Precision | str | None = None,
    kv_memory: int | None = None,
    parallel: int = PARALLEL,
    progress: Progress | None = None,
) -> "Llama":
    """A model by file, by name (`llamagpu models`) or as `hf:user/repo[:QUANT]`; it is fetched if it has to be.

    The arguments are those of `Llama`. A Path is always a file. `sampling` of the result, the default of its methods,
    is what the maker of a named model suggests.

    >>> import llamagpu
    >>> with llamagpu.load("smollm2", context=1024) as llama:
    ...     answer = llama.chat([{"role": "user", "content": "Name a colour."}], max_tokens=8)
    >>> answer.usage.completion_tokens <= 8
    True
    """
    valid = isinstance(model, str | os.PathLike) and bool(os.fspath(model))
    check_argument("model", model, valid, "a GGUF file, a name or hf:user/repo[:QUANT]")
    path = resolve(model if isinstance(model, str) else str(Path(model).expanduser().absolute()))
    llama = Llama(
        path,
        device=device,
        context=context,
        chunk=chunk,
        kv_type=kv_type,
        precision=precision,
        kv_memory=kv_memory,
        parallel=parallel,
        progress=progress,
    )
    suggested = suggested_sampling(model) if isinstance(model, str) else None
    llama.sampling = Sampling(**(suggested or {}))
    return llama


def pooling_of(metadata: Mapping[str, Any]) -> Pooling:
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    return POOLING_TYPES.get(kind, "mean") if isinstance(kind, int) else "mean"


class Llama:
    """A model on a device. Several generations may run at the same time, also from several threads: they share the
    steps of the device. `close`, or a `with` block, frees the memory.

    >>> answer = llama.chat([{"role": "user", "content": "Hello!"}], max_tokens=8)
    >>> answer.finish_reason in ("stop", "length")
    True
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: str | int | Gpu | None = None,
        context: int | None = None,
        chunk: int | None = None,
        kv_type: KvType | str | None = None,
        precision: Precision | str | None = None,
        kv_memory: int | None = None,
        kv_sequences: int = 1,
        parallel: int = PARALLEL,
        progress: Progress | None = None,
        on_plan: Callable[[MemoryPlan, Gpu], None] | None = None,
    ) -> None:
        """Open a GGUF or packed file.

        `device`: a number or name as in `llamagpu devices`, or an open Gpu to share, which stays open.
        `context`: positions; None takes the model's context, or what the KV cache holds.
        `kv_memory`: MiB for the KV cache; None takes what `context` needs, without it 2048 at most, on a CPU 512.
        `kv_sequences`: without `kv_memory`, the KV cache holds so many sequences of `context`, within that default.
        `parallel`: generations that share a step at most; more of them wait.
        `chunk`: tokens of one prefill step at most. `kv_type`: "f16", "f32" or "q8_0". `precision`: "fast" or "high".
        None lets the adapter decide. `on_plan` gets the memory plan before anything is allocated.
        """
        gpu = device if isinstance(device, Gpu) else None
        name = None if device is None or gpu else str(device)
        for argument, value in (("context", context), ("chunk", chunk), ("kv_memory", kv_memory)):
            check_argument(argument, value, value is None or is_whole(value, 1), "a whole number from 1 up, or None")
        fits = is_whole(parallel, 1) and parallel <= MAX_SEGMENTS
        check_argument("parallel", parallel, fits, f"a whole number from 1 to {MAX_SEGMENTS}")
        options = EngineOptions(
            device=name,
            context=context,
            chunk=chunk,
            kv_type=kv_type,  # type: ignore[arg-type]
            precision=precision,  # type: ignore[arg-type]
            kv_memory=kv_memory,
            kv_sequences=kv_sequences,
            parallel=parallel,
        )
        started = time.perf_counter()
        self.path = Path(path)
        with error_context(path), map_device_lost():
            source = open_source(self.path)
            try:
                self.tokenizer = Tokenizer.from_gguf(source.file.metadata)
                self.pooling = pooling_of(source.file.metadata)  # of embeddings
                open_s, _ = elapsed(started)
                self.loaded = load_model(source, options, gpu=gpu, progress=progress, on_plan=on_plan)
            except BaseException:
                source.close()
                raise
        self.loaded.times.open_s = open_s
        self.scheduler = Scheduler(self.loaded.engine)
        self.sampling = Sampling()  # what `chat`, `complete` and `generate` use without `sampling`
        self.closed = False
        self._latest: Request | None = None  # that has begun last, for save_prompt

    def close(self) -> None:
        """Free the memory. The Llama cannot generate or embed afterwards. Closing it twice does nothing.

        Nor does closing it in a forked process: what it holds is the parent's.
        """
        if is_forked():
            self.closed = True
            return
        with self.scheduler.lock:
            if not self.closed:
                self.closed = True
                self.scheduler.close(WrongState(f"this generation cannot go on: {CLOSED}", "load the model again"))
                self.loaded.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<Llama {self.path.name} on {self.gpu.name}, context {self.context}{state}>"

    def __enter__(self) -> "Llama":
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def config(self) -> ModelConfig:
        return self.loaded.config

    @property
    def gpu(self) -> Gpu:
        return self.loaded.gpu

    @property
    def context(self) -> int:
        """The largest number of positions of a sequence."""
        return self.loaded.settings.context

    @property
    def memory(self) -> MemoryPlan:
        return self.loaded.memory

    @property
    def load_times(self) -> LoadTimes:
        return self.loaded.times

    @property
    def precision(self) -> str:
        return self.loaded.engine.model.precision

    @property
    def fused(self) -> bool:
        """Whether decode runs all layers as one kernel."""
        return self.loaded.engine.model.fused

    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Compile the kernels of all steps, as `serve` does before it takes requests.

        Else the first step of two, four, eight ... sequences waits for its own, on a new machine for a second or more.
        Generations wait for it. `stop` is asked before each kernel whether to end early. A software adapter compiles a
        kernel when it runs: there this does nothing.
        """
        check_process()
        self.scheduler.check_idle()
        with self.scheduler.lock, map_device_lost():
            self._check_open()
            if not self.gpu.software:
                self.loaded.engine.warm_up(stop)

    def _check_open(self) -> None:
        check_process()
        if self.closed:
            raise WrongState("this Llama is closed", "load the model again")

    @contextmanager
    def _alone(self, positions: int) -> Iterator[TokenSequence]:
        """A sequence for work that is no generation. Generations wait for it."""
        check_process()  # before a lock that another thread of the parent may have had
        with self.scheduler.lock, map_device_lost():
            self._check_open()
            with self.scheduler.alone(positions) as sequence:
                yield sequence

    # Text

    def encode(self, text: str, *, bos: bool | None = None, special: bool = True) -> list[int]:
        """The token ids of a text.

        `bos` says whether BOS is added in front; None does as the model's file says. With `special`, control tokens
        such as <|im_end|> are recognised in the text.

        >>> ids = llama.encode("the quick brown fox")
        >>> llama.decode(ids, special=False)
        'the quick brown fox'
        """
        check_argument("text", text, isinstance(text, str), "one str")
        return self.tokenizer.encode(text, bos, special)

    def decode(self, ids: Iterable[int], *, special: bool = True) -> str:
        """The text of token ids. Without `special`, control tokens are left out.

        >>> llama.decode(llama.encode("a b", bos=False))
        'a b'
        """
        return self.tokenizer.decode(token_ids("ids", ids), special)

    def render_chat(self, messages: Sequence[Message], **variables: Any) -> str:
        """The prompt text of a conversation, rendered by the model's chat template.

        `variables` are further ones of the template, such as `tools` or `enable_thinking`.

        >>> "Hello!" in llama.render_chat([{"role": "user", "content": "Hello!"}])
        True
        """
        check_messages(messages)
        template, tokenizer = self.tokenizer.chat_template, self.tokenizer
        if template is None:
            raise LlamaGpuError("the model has no chat template", "continue the text as it is: `complete`, or --raw")
        bos, eos = tokenizer.token_text(tokenizer.bos_id), tokenizer.token_text(tokenizer.eos_id)
        return render(template, [dict(message) for message in messages], bos_token=bos, eos_token=eos, **variables)

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """The prompt ids of a conversation, for `generate`. The arguments are those of `render_chat`.

        >>> ids = llama.encode_chat([{"role": "user", "content": "Hello!"}])
        >>> len(list(llama.generate(ids, max_tokens=2))) <= 2
        True
        """
        return self.encode_rendered(self.render_chat(messages, **variables))

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of a text that `render_chat` gave. It gets BOS unless the template has written it."""
        bos = self.tokenizer.token_text(self.tokenizer.bos_id)
        return self.tokenizer.encode(text, bos=False if bos and text.startswith(bos) else None)

    @overload
    def chat(
        self, messages: Sequence[Message], *, max_tokens: int = -1, sampling: Sampling | None = None,
        stop: str | Sequence[str] = (), grammar: Grammar | None = None, logprobs: int | None = None,
        stream: Literal[False] = False,
    ) -> Completion: ...  # fmt: skip

    @overload
    def chat(
        self, messages: Sequence[Message], *, max_tokens: int = -1, sampling: Sampling | None = None,
        stop: str | Sequence[str] = (), grammar: Grammar | None = None, logprobs: int | None = None,
        stream: Literal[True],
    ) -> "Generation": ...  # fmt: skip

    def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int = -1,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        grammar: Grammar | None = None,
        logprobs: int | None = None,
        stream: bool = False,
    ) -> "Completion | Generation":
        """Answer a conversation, with the model's chat template.

        `messages`: dicts with role ("system", "user" or "assistant") and content. The rest is as for `complete`.

        >>> answer = llama.chat([{"role": "user", "content": "Hello!"}], max_tokens=8, sampling=Sampling(seed=1))
        >>> answer.usage.completion_tokens <= 8
        True
        """
        ids = self.encode_chat(messages)
        run = self.generate(
            ids, max_tokens=max_tokens, sampling=sampling, stop=stop, grammar=grammar, logprobs=logprobs
        )
        return run if stream else run.result()

    @overload
    def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int = -1, sampling: Sampling | None = None,
        stop: str | Sequence[str] = (), grammar: Grammar | None = None, logprobs: int | None = None,
        stream: Literal[False] = False,
    ) -> Completion: ...  # fmt: skip

    @overload
    def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int = -1, sampling: Sampling | None = None,
        stop: str | Sequence[str] = (), grammar: Grammar | None = None, logprobs: int | None = None,
        stream: Literal[True],
    ) -> "Generation": ...  # fmt: skip

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = -1,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        grammar: Grammar | None = None,
        logprobs: int | None = None,
        stream: bool = False,
    ) -> "Completion | Generation":
        """Continue a text or a list of ids, without a chat template.

        `max_tokens`: -1 generates until an end token or the end of the context. `stop`: a text, or several, that end
        the answer and are not part of it. `grammar`: what the text has to match; where it can only end, it ends.
        `logprobs`: N adds the log probability of each token and of the N likeliest in its place, those that the grammar
        excludes among them. `stream` returns a Generation, an iterator over the tokens.

        >>> answer = llama.complete("the quick", max_tokens=4, sampling=Sampling(temperature=0), logprobs=2)
        >>> {len(logprob.top) for logprob in answer.logprobs}
        {2}
        >>> llama.complete("the quick", grammar=Grammar.regex("yes|no")).text in ("yes", "no")
        True
        """
        run = self.generate(
            prompt, max_tokens=max_tokens, sampling=sampling, stop=stop, grammar=grammar, logprobs=logprobs
        )
        return run if stream else run.result()

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = -1,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        grammar: Grammar | None = None,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        special: bool = False,
        cache_prompt: bool = True,
        progress: Progress | None = None,
    ) -> "Generation":
        """Stream the continuation of a text or a list of ids, or the answer to messages. A text gets BOS if the model
        uses it.

        The arguments are those of `complete`; `max_tokens` 0 only computes the prompt, which `progress(done, all)`
        follows (it may not generate on this Llama). The generation begins when its first token is asked for; those that
        have begun run together. With `special` the text has control tokens in it. Without `cache_prompt` the whole
        prompt is computed.

        >>> text = "".join(token.text for token in llama.generate("the quick", max_tokens=4))
        """
        self._check_open()
        ids = self._prompt_ids(prompt)
        self._check_ids(ids)
        check_argument("max_tokens", max_tokens, is_whole(max_tokens, -1), f"{AT_LEAST_0}; -1: until the end")
        check_argument("logprobs", logprobs, logprobs is None or is_whole(logprobs, 0), f"{AT_LEAST_0}, or None")
        check_argument("progress", progress, progress is None or callable(progress), "a function, or None")
        check_argument("sampling", sampling, isinstance(sampling, Sampling | None), "a llamagpu.Sampling")
        check_argument("grammar", grammar, isinstance(grammar, Grammar | None), "a llamagpu.Grammar")
        how = sampling or self.sampling
        if how.logit_bias and max(how.logit_bias) >= self.config.vocab:
            cause = f"logit_bias has token id {max(how.logit_bias)}; the model's are 0..{self.config.vocab - 1}"
            raise BadArgument(cause, "take ids from `encode`")
        new = abs(max_tokens)  # -1: at least one
        wanted = len(ids) + new
        if wanted > self.context:
            most = self.config.context
            ways = [f"a larger context (-c or context=, at most {most})"] if self.context < most else []
            ways.append("a shorter prompt")
            if len(ids) < self.context and new > 1:
                ways.append("fewer new tokens (-n or max_tokens=)")
            raise DoesNotFit(
                f"{len(ids)} prompt tokens and {new} new ones need a context of {wanted}; it is {self.context}",
                "use " + " or ".join(ways),
            )
        stops = stop_strings(stop)
        matcher = Matcher(grammar, self._grammar_vocabulary) if grammar else None
        return Generation(
            self, ids, max_tokens, how, stops, ignore_eos, logprobs, progress, matcher, special, cache_prompt
        )

    @cached_property
    def _grammar_vocabulary(self) -> GrammarVocabulary:
        return GrammarVocabulary(self.tokenizer, self.config.vocab)

    def _check_ids(self, ids: list[int]) -> None:
        if not ids:
            raise BadArgument("the prompt is empty", "give some text: there is no BOS token to start from")
        if max(ids) >= self.config.vocab or min(ids) < 0:
            cause = f"the prompt has token ids outside 0..{self.config.vocab - 1}"
            raise BadArgument(cause, "encode it with this model's tokenizer")

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, list | tuple) and any(isinstance(item, Mapping) for item in prompt):
            return self.encode_chat(prompt)
        return token_ids("prompt", prompt)

    def submit(
        self,
        prompt: Prompt,
        *,
        n: int = 1,
        max_tokens: int = -1,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        grammar: Grammar | None = None,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        progress: Progress | None = None,
    ) -> "list[Generation]":
        """Queue `n` generations of one prompt, whose pages of 64 tokens are computed once; else as `generate`.

        They run while anybody waits for a token, of these or of others, in this thread or another: iterate them in any
        order, and end any of them with `close`. With a seed, the i-th has seed + i. More than the queue holds are
        refused with `errors.Overloaded`.

        >>> first, second = llama.submit("the quick", n=2, max_tokens=4, sampling=Sampling(seed=1))
        >>> token = next(second)
        >>> first.close()
        >>> len(second.result().ids) <= 4
        True
        """
        runs = self._generations(
            prompt,
            n,
            sampling,
            max_tokens=max_tokens,
            stop=stop,
            grammar=grammar,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            progress=progress,
        )
        try:
            for run in runs:
                run.begin()
        except BaseException:
            for run in runs:
                run.close()
            raise
        return runs

    def _generations(self, prompt: Prompt, n: int, sampling: Sampling | None, **more: Any) -> "list[Generation]":
        """`n` of one prompt, not yet queued; `more`: arguments of `generate`."""
        check_argument("n", n, is_whole(n, 1), "a whole number from 1 up")
        check_argument("sampling", sampling, isinstance(sampling, Sampling | None), "a llamagpu.Sampling")
        ids, how = self._prompt_ids(prompt), sampling or self.sampling
        each = (how if how.seed is None else replace(how, seed=how.seed + i) for i in range(n))
        return [self.generate(ids, sampling=own, **more) for own in each]

    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        *,
        n: int = 1,
        max_tokens: int = -1,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        grammar: Grammar | None = None,
        logprobs: int | None = None,
    ) -> list[Completion]:
        """Continue many texts together, `n` times each; the results are in the order of the prompts.

        The arguments are as for `submit`. With a seed, equal prompts get equal texts. An error in one ends all.

        >>> answers = llama.generate_batch(["the quick", "once upon a"], max_tokens=4, n=2)
        >>> len(answers)
        4
        """
        several = isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | Mapping)
        check_argument("prompts", prompts, several, "a list of prompts")
        queued: deque[Generation] = deque()
        found: list[Completion] = []

        def first_result() -> None:
            found.append(queued[0].result())
            queued.popleft()

        how = dict(max_tokens=max_tokens, stop=stop, grammar=grammar, logprobs=logprobs)
        try:
            for prompt in prompts:
                for run in self._generations(prompt, n, sampling, **how):
                    while len(queued) >= BATCH_QUEUE or not self._queue(run, may_wait=bool(queued)):
                        first_result()
                    queued.append(run)
            return found + [run.result() for run in queued]
        finally:
            for run in queued:
                run.close()

    def _queue(self, run: "Generation", may_wait: bool) -> bool:
        """Queue it; False if the queue is full and may be waited for."""
        try:
            run.begin()
        except Overloaded:
            if not may_wait:
                raise
            return False
        return True

    def embed(self, text: str | Sequence[str], *, pooling: Pooling | None = None) -> NDArray[np.float32]:
        """The embedding [dim] of a text, or [n, dim] of several: the pooled hidden state, of length 1.

        `pooling`: "mean" of all tokens, or the "last" token; None takes what the file says, else the mean. The dot
        product of two embeddings is their cosine similarity.
        >>> a, b = llama.embed(["a cat", "a dog"])
        >>> -1 <= float(a @ b) <= 1
        True
        """
        texts = [text] if isinstance(text, str) else text
        valid = isinstance(texts, list | tuple) and all(isinstance(item, str) for item in texts)
        check_argument("text", text, valid, "a str, or a list of them")
        ids = [self.tokenizer.encode(item) for item in texts]
        for i, item in enumerate(ids):
            where = "the text" if isinstance(text, str) else f"text {i}"
            if not item:
                raise BadArgument(f"{where} is empty", "give some text")
            if len(item) > self.context:
                cause = f"{where} has {len(item)} tokens; the context holds {self.context}"
                raise DoesNotFit(cause, "split the text")
        rows = [self.embed_ids(item, pooling=pooling) for item in ids]
        return rows[0] if isinstance(text, str) else np.array(rows, np.float32).reshape(-1, self.config.dim)

    def embed_ids(self, ids: Sequence[int], *, pooling: Pooling | None = None) -> NDArray[np.float32]:
        """The embedding [dim] of token ids, at most as many as the context holds."""
        expected = "mean or last, or None"
        check_argument("pooling", pooling, pooling in (None, *POOLING_TYPES.values()), expected)
        engine, ids = self.loaded.engine, token_ids("ids", ids)
        self._check_ids(ids)
        with self._alone(len(ids)) as sequence:
            hidden = engine.last_hidden if (pooling or self.pooling) == "last" else engine.mean_hidden
            pooled = hidden(sequence, ids)
        need_finite(pooled)
        return np.asarray(pooled / max(float(np.linalg.norm(pooled)), 1e-30), np.float32)

    # Prompt caches

    def save_prompt(self, path: str | Path, tokens: int | None = None, progress: Progress | None = None) -> None:
        """Save the KV cache of the latest prompt and its answer, or of its first `tokens`, for `load_prompt`."""
        check_argument("tokens", tokens, tokens is None or is_whole(tokens, 1), "a whole number from 1 up, or None")
        ids = self._latest.computed if self._latest else []
        with self._alone(len(ids) + 1) as sequence:
            engine = self.loaded.engine
            found = engine.cache.begin(sequence, [*ids, 0]) if ids else 0
            if found < len(ids):
                engine.prefill(sequence, ids[found:])
                engine.check()
            prompt_cache.save(self.loaded, sequence, Path(path), tokens, progress)

    def load_prompt(self, path: str | Path, progress: Progress | None = None) -> int:
        """Restore a file of `save_prompt`; return its number of tokens. A prompt that begins with them reuses them.

        A file that is damaged, or of another model or other settings, is refused.
        """
        started = time.perf_counter()
        with self._alone(self.context) as sequence:
            tokens = prompt_cache.load(self.loaded, sequence, Path(path), progress)
        self.load_times.prompt_s, _ = elapsed(started)
        return tokens


@dataclass(slots=True, weakref_slot=True, eq=False)
class Generation(Iterator[Token]):
    """An iterator over new tokens. It begins when the first one is asked for; generations that have begun run together.

    `finish_reason` (empty until the end), `ids`, `text`, `usage`, `logprobs` and `timings` fill as it runs. `close`
    ends it early, as does dropping it.

    >>> run = llama.generate("the quick", max_tokens=4)
    >>> first = next(run)
    >>> run.result().ids[0] == first.id  # the rest, and the whole
    True
    """

    llama: Llama = field(repr=False)
    prompt_ids: list[int] = field(repr=False)
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool
    top_logprobs: int | None = None
    progress: Progress | None = field(default=None, repr=False)
    matcher: Matcher | None = field(default=None, repr=False)
    special: bool = False
    cache_prompt: bool = True
    ids: list[int] = field(default_factory=list)
    text: str = ""
    # stop: end token, stop string or end of the grammar; length: max_tokens; context: the context is full
    finish_reason: str = ""
    stopped_by: str = ""  # the stop string that ended it
    timings: Timings = field(default_factory=Timings)
    logprobs: list[Logprob] = field(default_factory=list, repr=False)  # one for each id, with `logprobs`
    _decoder: StreamDecoder = field(init=False, repr=False)
    _request: Request | None = field(default=None, init=False, repr=False)
    _began: float = field(default=0.0, init=False, repr=False)
    _held: str = field(default="", init=False, repr=False)  # text that may be the beginning of a stop string
    _ended: str = field(default="", init=False, repr=False)  # why it cannot go on

    def __post_init__(self) -> None:
        self._decoder = self.llama.tokenizer.stream(self.special)

    def begin(self) -> None:
        """Queue it, without waiting for a token."""
        if self._request is None:
            self._began = time.perf_counter()
            self.timings.prompt_tokens = len(self.prompt_ids)
            most = None if self.max_tokens < 0 else self.max_tokens
            is_end = (lambda id: False) if self.ignore_eos else self.llama.tokenizer.is_end
            host = self._host_sampler()
            request = Request(
                self.prompt_ids, self.sampling, most, is_end, host, self.progress, self.matcher, self.top_logprobs
            )
            request.cache_prompt = self.cache_prompt
            self.llama._check_open()
            self.llama.scheduler.submit(request)
            self.llama._latest = self._request = request
            weakref.finalize(self, self.llama.scheduler.cancel, request)

    def _host_sampler(self) -> HostSampler | None:
        """How the host samples, where the device cannot."""
        engine = self.llama.loaded.engine
        on_device = engine.samples_on_device(self.sampling, self.top_logprobs, self.matcher is not None)
        return None if on_device else HostSampler(self.sampling, self.prompt_ids)

    def __next__(self) -> Token:
        """The next token, the end token included. `text` is the concatenation of their texts."""
        if self.finish_reason:
            raise StopIteration
        self._check_ended()
        if not self.ready:
            self.llama.scheduler.check_idle()
        self.begin()
        try:
            with map_device_lost():
                token = self._next()
        except BaseException as error:
            self._end(f"{type(error).__name__} came up in it")
            raise
        if token is None:
            raise StopIteration
        return token

    @property
    def ready(self) -> bool:
        """Whether the next token, or the end, is there without waiting."""
        request = self._request
        return request is not None and (request.taken < len(request.new) or request.done)

    def result(self) -> Completion:
        """Generate the rest and return the whole."""
        for _ in self:
            pass
        ids, logprobs = tuple(self.ids), tuple(self.logprobs)
        return Completion(self.text, self.finish_reason, self.usage, ids, logprobs, self.timings)

    def close(self) -> None:
        """End it. Closing it twice, or after its end, does nothing."""
        self._end("it was closed")

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt_ids), len(self.ids), self.timings.cached_tokens)

    def _check_ended(self) -> None:
        if self._ended:
            raise WrongState(f"this generation cannot go on: {self._ended}", "start a new one")

    def _end(self, reason: str) -> None:
        self._ended = self._ended or reason
        if self._request:
            self.llama.scheduler.cancel(self._request)

    def _next(self) -> Token | None:
        assert self._request is not None
        id = self.llama.scheduler.next_token(self._request)
        self._time(id is not None)
        if id is None:
            self._check_ended()  # another thread has closed it
            if not self.finish_reason:  # another thread may have taken the last token
                self.finish_reason = "length" if self.max_tokens == 0 else "context"  # or the cache was full
            return None
        return self._accept(id, self._request)

    def take(self) -> list[Token]:
        """The next tokens that are there without waiting, none at the end."""
        request, found = self._request, list[Token]()
        if request is None:
            return found
        while request.taken < len(request.new) and not self.finish_reason:
            request.taken += 1
            found.append(self._accept(request.new[request.taken - 1], request))
        if found:
            self._time(len(found))
        return found

    def _accept(self, id: int, request: Request) -> Token:
        self.ids.append(id)
        logprob = None
        if self.top_logprobs is not None:
            logprob = logprob_of(self.llama.tokenizer, id, request.scores[len(self.ids) - 1])
            self.logprobs.append(logprob)
        ends = not self.ignore_eos and self.llama.tokenizer.is_end(id)
        text = self._held + ("" if ends else self._decoder.push(id))
        cut = min((i for i in (text.find(s) for s in self.stop) if i >= 0), default=-1) if self.stop else -1
        reason = "stop" if cut >= 0 or ends else self._reason(request)
        if cut >= 0:
            shown = cut
            self.stopped_by = next(s for s in self.stop if text.startswith(s, cut))
        elif reason:
            text += self._decoder.flush()
            shown = len(text)
        else:
            shown = len(text) - possible_stop(text, self.stop) if self.stop else len(text)
        self._held = text[shown:]
        self.text += text[:shown]
        if reason:
            self.llama.scheduler.cancel(request)
            self.finish_reason = reason
        return Token(id, text[:shown], logprob)

    def _time(self, tokens: int) -> None:
        """So many more are taken. They have come before, if the caller was busy."""
        request, times = self._request, self.timings
        assert request is not None
        times.cached_tokens = request.cached
        times.tokens += tokens
        times.prefill_s = (request.first_at or time.perf_counter()) - self._began
        if times.tokens:
            times.first_token_s = times.prefill_s
            share = (times.tokens - 1) / max(len(request.new) - 1, 1)
            times.decode_s = share * (request.latest_at - request.first_at)

    def _reason(self, request: Request) -> str:
        """The finish reason if the latest token, which does not end the text, is the last one; else empty."""
        if request.matched == len(self.ids):
            return "stop"
        if len(self.ids) == self.max_tokens:
            return "length"
        return "context" if len(self.prompt_ids) + len(self.ids) > self.llama.context else ""


def logprob_of(tokenizer: Tokenizer, id: int, scores: Scores) -> Logprob:
    """The log probability of a token with its text, and those of the likeliest in its place."""

    def named(id: int, value: float, top: tuple[Logprob, ...] = ()) -> Logprob:
        padding = id >= tokenizer.vocab_size  # a row of the embedding table without a token
        text = "" if padding else tokenizer.token_bytes(id).decode("utf-8", "replace")
        return Logprob(id, text, value, top)

    return named(id, scores.logprob, tuple(map(named, scores.ids, scores.logprobs)))


def possible_stop(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of the text may begin a stop string."""
    longest = max((len(s) for s in stops), default=1) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0)


__all__ = [
    "Completion",
    "Generation",
    "Grammar",
    "Llama",
    "LoadedModel",
    "Logprob",
    "Sampling",
    "Timings",
    "Token",
    "Usage",
    "load",
]
