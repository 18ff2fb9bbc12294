"""From a file and a prompt to streamed text: the whole path, and what it took."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wgpu

from llamagpu.engine import prompt_cache
from llamagpu.engine.llama import Transformer
from llamagpu.engine.memory import MemoryPlan, plan_memory
from llamagpu.engine.sampler import Sampling, make_sampler, need_finite
from llamagpu.engine.selfcheck import use_fast
from llamagpu.engine.tiled import TiledTransformer, load_tiles, suits_tiles
from llamagpu.engine.weights import load_weights
from llamagpu.errors import DeviceLost, DoesNotFit, LlamaGpuError, about
from llamagpu.files.config import LlamaConfig, check_tensors
from llamagpu.files.packed_file import open_model
from llamagpu.files.repack import small
from llamagpu.files.tokenizer import Tokenizer
from llamagpu.gpu import routes
from llamagpu.gpu.device import Gpu

FIRST_CONTEXT = 1024  # positions the cache starts with when nobody says; it doubles as the text grows
Progress = Callable[[int, int], None]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    text: str  # what became visible with it: may be empty, or several tokens' text at once


@dataclass(slots=True)
class Timings:
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, taken over from the call before or a file
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


@dataclass(slots=True)
class LoadTimes:
    """Seconds of each stage of loading, for `-v` and `bench`."""

    open_s: float = 0.0  # read the file's header, the tokenizer's tables
    device_s: float = 0.0
    weights_s: float = 0.0  # repack and upload
    compile_s: float = 0.0  # first plans
    prompt_s: float = 0.0  # `load_prompt`

    @property
    def total_s(self) -> float:
        return self.open_s + self.device_s + self.weights_s + self.compile_s + self.prompt_s


class Llama:
    """A model on a device. `generate` gives tokens as they come; `close` gives the memory back."""

    def __init__(
        self,
        path: str | Path,
        *,
        device: str | Gpu | None = None,
        context: int | None = None,
        chunk: int | None = None,
        kv_type: str | None = None,
        precision: str | None = None,
        progress: Progress | None = None,
        on_plan: Callable[[MemoryPlan, Gpu], None] | None = None,
    ) -> None:
        """`device`: a number or name as in `llamagpu devices`, or an open Gpu to share (it stays open).
        `chunk`: most tokens of a prompt's step; `kv_type`: "f16" or "f32"; `precision`: "fast" or "high"; None
        chooses by the adapter."""
        check_choice("kv_type", kv_type, ("f16", "f32"))
        check_choice("precision", precision, ("fast", "high"))
        times = self.load_times = LoadTimes()
        started = time.perf_counter()
        with ExitStack() as undo, about(path), loss_named():
            self.file = undo.enter_context(closing(open_model(path)))
            self.config = LlamaConfig.from_gguf(self.file.metadata, self.file.tensors)
            check_tensors(self.config, self.file.tensors)
            self.tokenizer = Tokenizer.from_gguf(self.file.metadata)
            self.limit = context_limit(self.config, context)
            times.open_s, started = lap(started)
            self.gpu = device if isinstance(device, Gpu) else undo.enter_context(closing(Gpu.open(device)))
            self.fast = fast = use_fast(self.gpu, precision)
            times.device_s, started = lap(started)
            self.chunk = min(chunk or routes.chunk(self.gpu.caps, fast), self.limit)
            tiles_do = suits_tiles(self.config, self.file.tensors, self.gpu)
            self.tiled = tiles_do and kv_type != "f16" and not fast
            most = routes.most_positions(self.config.head_dim, self.gpu.caps, self.tiled)
            if most and not context:
                self.limit = min(self.limit, most)
            self.kv_f32 = kv_type == "f32" if kv_type else self.tiled or not self.gpu.caps.half
            first = self.limit if context else min(self.limit, FIRST_CONTEXT)
            self.memory = self.plan_memory(first)
            if on_plan:
                on_plan(self.memory, self.gpu)
            self.memory.check(self.gpu)
            if self.tiled:
                weights = load_tiles(self.file.tensors, self.config, self.gpu, progress)
            else:
                weights = load_weights(self.file.tensors, self.config, self.gpu, progress, fast)
            times.weights_s, started = lap(started)
            factors = self.file.tensors.get("rope_freqs.weight")
            freq_factors = None if factors is None else small(factors)
            self.model = (TiledTransformer if self.tiled else Transformer)(
                self.gpu, self.config, weights, freq_factors, first, self.limit, self.chunk, self.kv_f32, fast
            )
            self.model.plan(1)
            times.compile_s, started = lap(started)
            self.close = undo.pop_all().close

    def __enter__(self) -> "Llama":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def precision(self) -> str:
        return "fast" if self.model.fast else "high"

    def plan_memory(self, context: int) -> MemoryPlan:
        c, tensors = self.config, self.file.tensors
        return plan_memory(c, tensors, self.gpu, context, self.chunk, self.kv_f32, self.tiled, self.fast)

    def chat(self, messages: Sequence[Message]) -> str:
        """The prompt text for a conversation, by the model's own chat template."""
        from llamagpu.files.chat_template import render  # here: raw text does not need jinja2

        template, tokenizer = self.tokenizer.chat_template, self.tokenizer
        if template is None:
            raise LlamaGpuError("the model has no chat template", "use --raw to continue the text as it is")
        bos, eos = tokenizer.token_text(tokenizer.bos_id), tokenizer.token_text(tokenizer.eos_id)
        return render(template, list(messages), bos_token=bos, eos_token=eos)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
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
        """Continue a text (encoded with BOS as the model wants it) or a list of ids.

        `max_tokens`: -1 goes on until the model or the context ends, 0 only reads the prompt.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise LlamaGpuError("the prompt is empty", "give some text: there is no BOS token to start from")
        if max(ids) >= self.config.vocab or min(ids) < 0:
            cause = f"the prompt has token ids outside 0..{self.config.vocab - 1}"
            raise LlamaGpuError(cause, "encode it with this model's tokenizer")
        new = abs(max_tokens)  # -1: one at least
        wanted = len(ids) + new
        if wanted > self.limit:
            raise DoesNotFit(
                f"{len(ids)} prompt tokens and {new} new ones need a context of {wanted}; it is {self.limit}",
                f"use a larger -c (this model takes {self.config.context}), a shorter prompt or a smaller -n",
            )
        self.plan_memory(max(wanted, self.memory.context)).check(self.gpu)
        stops = tuple(s for s in stop if s)
        return Generation(self, ids, max_tokens, sampling or Sampling(), stops, ignore_eos, progress)

    def save_prompt(
        self, path: str | Path, tokens: int | None = None, progress: Progress | None = None
    ) -> None:
        """What has been read, or the first `tokens` of it, into a file for `load_prompt`."""
        with loss_named():
            prompt_cache.save(self, Path(path), tokens, progress)

    def load_prompt(self, path: str | Path, progress: Progress | None = None) -> int:
        """As if what the file holds had just been read; how many tokens that is. The next prompt is read from where
        it differs. A file that is damaged, or of another model or other settings, is refused."""
        started = time.perf_counter()
        with loss_named():
            tokens = prompt_cache.load(self, Path(path), progress)
        self.load_times.prompt_s, _ = lap(started)
        return tokens


@contextmanager
def loss_named() -> Iterator[None]:
    """wgpu has no exception of its own for a device that went away."""
    try:
        yield
    except wgpu.GPUError as error:
        if "lost" not in str(error):
            raise
        cause = "the device went away while it was working (driver reset, sleep, or out of memory)"
        raise DeviceLost(cause, "try again; a smaller -c or -ub asks less of it") from error


def check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise LlamaGpuError(f"{name} is {value!r}", f"choose {' or '.join(choices)}")


def lap(started: float) -> tuple[float, float]:
    now = time.perf_counter()
    return now - started, now


def context_limit(config: LlamaConfig, wanted: int | None) -> int:
    if wanted and wanted > config.context:
        raise DoesNotFit(
            f"a context of {wanted} was asked for; the model was trained for {config.context}",
            f"use -c {config.context} or less",
        )
    return wanted or config.context


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
    finish_reason: str = ""  # stop: end token or stop string; length: max_tokens; context: no room left
    timings: Timings = field(default_factory=Timings)

    def __iter__(self) -> Iterator[Token]:
        """One Token for each id, the end token's too; their texts joined are `text`."""
        decoder = self.llama.tokenizer.stream()
        held = ""  # text that may be the beginning of a stop string
        with closing(self.steps()) as steps, loss_named():
            for id in steps:
                self.ids.append(id)
                held += "" if self.ends(id) else decoder.push(id)
                cut = min((i for i in (held.find(s) for s in self.stop) if i >= 0), default=-1)
                self.finish_reason = "stop" if cut >= 0 else self.reason(id)
                if cut >= 0:
                    keep = len(held) - cut
                elif self.finish_reason:
                    held, keep = held + decoder.flush(), 0
                else:
                    keep = held_back(held, self.stop)
                shown, held = held[: len(held) - keep], held[len(held) - keep :]
                self.text += shown
                yield Token(id, shown)
                if self.finish_reason:
                    return
        self.finish_reason = "length"  # of nothing: max_tokens is 0

    def ends(self, id: int) -> bool:
        return self.llama.tokenizer.is_end(id) and not self.ignore_eos

    def reason(self, id: int) -> str:
        """Why `id`, the latest, is the last one; nothing if it is not."""
        if self.ends(id):
            return "stop"
        if len(self.ids) == self.max_tokens:
            return "length"
        return "context" if len(self.prompt_ids) + len(self.ids) > self.llama.limit else ""

    def steps(self) -> Generator[int, None, None]:
        """The new ids. What of the prompt is in the cache already is not computed again."""
        model, times = self.llama.model, self.timings
        start = time.perf_counter()
        shared = shared_prefix(model.history, self.prompt_ids[:-1])
        model.truncate(shared)
        times.prompt_tokens, times.cached_tokens = len(self.prompt_ids), shared
        model.room_for(len(self.prompt_ids) - shared + abs(self.max_tokens))
        model.prefill(self.prompt_ids[shared:], self.progress)
        if self.max_tokens == 0:
            model.read_logits()  # waits
            times.prefill_s = time.perf_counter() - start
            return
        first = start
        for id in self.choices():
            now = time.perf_counter()
            if not times.tokens:
                first = now
                times.prefill_s = times.first_token_s = now - start
            times.tokens += 1
            times.decode_s = now - first
            yield id

    def choices(self) -> Iterator[int]:
        model, sampling = self.llama.model, self.sampling
        most = None if self.max_tokens < 0 else self.max_tokens
        if not sampling.greedy and not model.draws_on_device(sampling):
            yield from model.sample(make_sampler(sampling, self.prompt_ids))
            return
        need_finite(model.read_logits())  # of NaN the device takes token 0, or draws any
        yield from model.greedy(most) if sampling.greedy else model.draw(sampling, self.prompt_ids, most)


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of text could still become a stop string."""
    longest = max((len(s) for s in stops), default=1) - 1
    return next(
        (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0
    )
