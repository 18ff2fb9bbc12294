"""The public API: load a model, generate text from a prompt."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wgpu

from llamagpu.engine import prompt_cache
from llamagpu.engine.load import LoadedModel, LoadTimes, elapsed, load_model, open_source
from llamagpu.engine.memory import MemoryPlan
from llamagpu.engine.options import EngineOptions, KvType, Precision
from llamagpu.engine.sampler import Sampling, host_sampler, need_finite
from llamagpu.engine.sequence import Sequence as TokenSequence
from llamagpu.errors import DeviceLost, DoesNotFit, LlamaGpuError, error_context
from llamagpu.files.config import ModelConfig
from llamagpu.files.tokenizer import Tokenizer
from llamagpu.gpu.device import Gpu
from llamagpu.hub.registry import resolve

Progress = Callable[[int, int], None]
Message = dict[str, Any]


def load(model: str | Path, **options: Any) -> "Llama":
    """A model by file, by name (`smollm2`) or as `hf:user/repo[:QUANT]`; options as for `Llama`."""
    return Llama(resolve(str(model)), **options)


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    text: str  # text that this token completes: may be empty, or the text of several tokens


@dataclass(slots=True)
class Timings:
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the KV cache or a prompt cache file
    prefill_s: float = 0.0
    first_token_s: float = 0.0  # from the call to the first token
    tokens: int = 0
    decode_s: float = 0.0  # from the first token to the last

    @property
    def prefill_tps(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tps(self) -> float:
        return (self.tokens - 1) / self.decode_s if self.decode_s and self.tokens > 1 else 0.0


class Llama:
    """A model on a device. `generate` streams tokens; `close` frees the memory."""

    def __init__(
        self,
        path: str | Path,
        *,
        device: str | Gpu | None = None,
        context: int | None = None,
        chunk: int | None = None,
        kv_type: KvType | str | None = None,
        precision: Precision | str | None = None,
        progress: Progress | None = None,
        on_plan: Callable[[MemoryPlan, Gpu], None] | None = None,
    ) -> None:
        """Open a GGUF or packed file.

        `device`: a number or name as in `llamagpu devices`, or an open Gpu to share, which stays open.
        `context`: positions; None lets the KV cache grow up to the model's context.
        `chunk`: tokens of one prefill step at most. `kv_type`: "f16" or "f32". `precision`: "fast" or "high".
        None lets the adapter decide. `on_plan` gets the memory plan before anything is allocated.
        """
        gpu = device if isinstance(device, Gpu) else None
        name = None if isinstance(device, Gpu) else device
        options = EngineOptions(name, context, chunk, kv_type, precision)  # type: ignore[arg-type]
        started = time.perf_counter()
        with error_context(path), map_device_lost():
            source = open_source(Path(path))
            try:
                self.tokenizer = Tokenizer.from_gguf(source.file.metadata)
                open_s, _ = elapsed(started)
                self.loaded = load_model(source, options, gpu=gpu, progress=progress, on_plan=on_plan)
            except BaseException:
                source.close()
                raise
        self.loaded.times.open_s = open_s
        self.sequence = TokenSequence()

    def close(self) -> None:
        """Free the memory. The Llama cannot be used afterwards."""
        self.loaded.close()

    def __enter__(self) -> "Llama":
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

    # Text

    def chat(self, messages: Sequence[Message]) -> str:
        """The prompt text of a conversation, rendered by the model's chat template."""
        from llamagpu.files.chat_template import render  # here: raw text does not need jinja2

        template, tokenizer = self.tokenizer.chat_template, self.tokenizer
        if template is None:
            raise LlamaGpuError("the model has no chat template", "use --raw to continue the text as it is")
        bos, eos = tokenizer.token_text(tokenizer.bos_id), tokenizer.token_text(tokenizer.eos_id)
        return render(template, list(messages), bos_token=bos, eos_token=eos)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The prompt ids of a conversation."""
        text = self.chat(messages)
        bos = self.tokenizer.token_text(self.tokenizer.bos_id)
        return self.tokenizer.encode(text, bos=False if bos and text.startswith(bos) else None)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = -1,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        progress: Progress | None = None,
    ) -> "Generation":
        """Continue a text or a list of ids. A text gets BOS if the model uses it.

        `max_tokens`: -1 generates until an end token or the end of the context, 0 only computes the prompt.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise LlamaGpuError("the prompt is empty", "give some text: there is no BOS token to start from")
        if max(ids) >= self.config.vocab or min(ids) < 0:
            cause = f"the prompt has token ids outside 0..{self.config.vocab - 1}"
            raise LlamaGpuError(cause, "encode it with this model's tokenizer")
        new = abs(max_tokens)  # -1: at least one
        wanted = len(ids) + new
        if wanted > self.context:
            raise DoesNotFit(
                f"{len(ids)} prompt tokens and {new} new ones need a context of {wanted}; it is {self.context}",
                f"use a larger -c (this model takes {self.config.context}), a shorter prompt or a smaller -n",
            )
        if wanted > self.loaded.engine.cache.capacity:
            self.loaded.check_memory(wanted)
        stops = tuple(text for text in stop if text)
        return Generation(self, ids, max_tokens, sampling or Sampling(), stops, ignore_eos, progress)

    # Prompt caches

    def save_prompt(self, path: str | Path, tokens: int | None = None, progress: Progress | None = None) -> None:
        """Save the KV cache of the sequence, or of its first `tokens`, to a file for `load_prompt`."""
        with map_device_lost():
            prompt_cache.save(self.loaded, self.sequence, Path(path), tokens, progress)

    def load_prompt(self, path: str | Path, progress: Progress | None = None) -> int:
        """Restore a file of `save_prompt`; return its number of tokens. A prompt that begins with them reuses them.

        A file that is damaged, or of another model or other settings, is refused.
        """
        started = time.perf_counter()
        with map_device_lost():
            tokens = prompt_cache.load(self.loaded, self.sequence, Path(path), progress)
        self.load_times.prompt_s, _ = elapsed(started)
        return tokens


@contextmanager
def map_device_lost() -> Iterator[None]:
    """Raise DeviceLost if the device is lost: wgpu has no exception for it."""
    try:
        yield
    except wgpu.GPUError as error:
        if "lost" not in str(error):
            raise
        cause = "the device went away while it was working (driver reset, sleep, or out of memory)"
        raise DeviceLost(cause, "try again; a smaller -c or -ub asks less of it") from error


@dataclass(slots=True)
class Generation:
    """An iterator over new tokens; `finish_reason`, `ids`, `text` and `timings` fill as it runs."""

    llama: Llama
    prompt_ids: list[int]
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool
    progress: Progress | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""  # stop: end token or stop string; length: max_tokens; context: the context is full
    timings: Timings = field(default_factory=Timings)

    def __iter__(self) -> Iterator[Token]:
        """Yield a Token for each id, also for the end token. `text` is the concatenation of their texts."""
        decoder = self.llama.tokenizer.stream()
        pending = ""  # text that may be the beginning of a stop string
        with closing(self._steps()) as steps, map_device_lost():
            for id in steps:
                self.ids.append(id)
                pending += "" if self._ends(id) else decoder.push(id)
                cut = min((i for i in (pending.find(s) for s in self.stop) if i >= 0), default=-1)
                self.finish_reason = "stop" if cut >= 0 else self._reason(id)
                if cut >= 0:
                    hidden = len(pending) - cut
                elif self.finish_reason:
                    pending, hidden = pending + decoder.flush(), 0
                else:
                    hidden = possible_stop(pending, self.stop)
                shown, pending = pending[: len(pending) - hidden], pending[len(pending) - hidden :]
                self.text += shown
                yield Token(id, shown)
                if self.finish_reason:
                    return
        self.finish_reason = "length"  # max_tokens is 0

    def _ends(self, id: int) -> bool:
        return self.llama.tokenizer.is_end(id) and not self.ignore_eos

    def _reason(self, id: int) -> str:
        """The finish reason if `id`, the latest token, is the last one; else empty."""
        if self._ends(id):
            return "stop"
        if len(self.ids) == self.max_tokens:
            return "length"
        return "context" if len(self.prompt_ids) + len(self.ids) > self.llama.context else ""

    def _steps(self) -> Generator[int, None, None]:
        """Yield the new ids. Prompt tokens that are in the KV cache already are not computed again."""
        engine, sequence, times = self.llama.loaded.engine, self.llama.sequence, self.timings
        start = time.perf_counter()
        shared = sequence.shared_prefix(self.prompt_ids[:-1])
        sequence.truncate(shared)
        times.prompt_tokens, times.cached_tokens = len(self.prompt_ids), shared
        engine.reserve(sequence, len(self.prompt_ids) - shared + abs(self.max_tokens))
        engine.prefill(sequence, self.prompt_ids[shared:], self.progress)
        if self.max_tokens == 0:
            engine.read_logits()  # waits for the prompt
            times.prefill_s = time.perf_counter() - start
            return
        first = start
        for id in self._sampled():
            now = time.perf_counter()
            if not times.tokens:
                first = now
                times.prefill_s = times.first_token_s = now - start
            times.tokens += 1
            times.decode_s = now - first
            yield id

    def _sampled(self) -> Iterator[int]:
        engine, sequence, sampling = self.llama.loaded.engine, self.llama.sequence, self.sampling
        most = None if self.max_tokens < 0 else self.max_tokens
        if not sampling.greedy and not engine.samples_on_device(sampling):
            yield from engine.sample_on_host(sequence, host_sampler(sampling, self.prompt_ids))
            return
        need_finite(engine.read_logits())  # the device would sample an arbitrary token from NaN logits
        if sampling.greedy:
            yield from engine.greedy(sequence, most)
        else:
            yield from engine.sample(sequence, sampling, self.prompt_ids, most)


def possible_stop(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of the text may begin a stop string."""
    longest = max((len(s) for s in stops), default=1) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0)


__all__ = ["Generation", "Llama", "LoadedModel", "Sampling", "Timings", "Token", "load"]
