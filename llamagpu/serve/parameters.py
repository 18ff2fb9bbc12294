"""How a text is sampled and when it ends: the fields that OpenAI's two endpoints and llama.cpp's server share."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from llamagpu.arguments import MAX_PENALTY
from llamagpu.llama import Sampling
from llamagpu.serve.errors import invalid

SEEDS = 1 << 32
FIELDS = {field.name for field in dataclasses.fields(Sampling)}
PASSED = (
    *("temperature", "top_p", "top_k", "min_p", "repeat_penalty", "repeat_last_n"),
    *("presence_penalty", "frequency_penalty"),
)
MIN_TEMPERATURE = 1e-4  # logits divided by less would overflow
MAX_STOPS, MAX_STOP_CHARS = 64, 1024
MAX_CHOICES = 128


class SamplingFields(msgspec.Struct, kw_only=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    cache_prompt: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


@dataclass(frozen=True, slots=True)
class Parameters:
    sampling: Sampling
    max_tokens: int = -1  # -1: until the model or the context ends
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None  # how many of the likeliest tokens come with each
    cache_prompt: bool = True

    def choice(self, number: int) -> Sampling:
        """Each choice has a seed of its own."""
        seed = self.sampling.seed
        if seed is None or not number:
            return self.sampling
        return dataclasses.replace(self.sampling, seed=(seed + number) % SEEDS)


def parameters(
    given: SamplingFields, base: Sampling, vocab: int, max_tokens: int | None, logprobs: int | None = None
) -> Parameters:
    n = 1 if given.n is None else given.n
    if not 1 <= n <= MAX_CHOICES:
        raise invalid(f"n is {n}: give 1 to {MAX_CHOICES}", "n")
    if max_tokens is not None and max_tokens < -1:
        raise invalid(f"max_tokens is {max_tokens}: give a whole number from 0 up", "max_tokens")
    return Parameters(
        sampling=sampling(given, base, vocab),
        max_tokens=-1 if max_tokens is None else max_tokens,
        stop=stops(given.stop),
        n=n,
        logprobs=logprobs,
        cache_prompt=given.cache_prompt is not False,
    )


def sampling(given: SamplingFields, base: Sampling, vocab: int) -> Sampling:
    """The server's defaults with what the request says."""
    changes: dict[str, Any] = {name: value for name in PASSED if (value := getattr(given, name)) is not None}
    if given.logit_bias:
        changes["logit_bias"] = bias(given.logit_bias, vocab)
    if given.seed is not None:
        changes["seed"] = None if given.seed == -1 else given.seed % SEEDS
    for name in changes.keys() - FIELDS:
        if not changes.pop(name) == 0:
            raise invalid(f"{name} is not supported: leave it out", name)
    if changes.get("temperature", 1) < MIN_TEMPERATURE:
        changes["temperature"] = min(0.0, changes["temperature"])  # no other token has a chance there
    if not 1 / MAX_PENALTY <= changes.get("repeat_penalty", 1) <= MAX_PENALTY:
        raise invalid(f"repeat_penalty: give a number from {1 / MAX_PENALTY:g} to {MAX_PENALTY:g}", "repeat_penalty")
    return dataclasses.replace(base, **changes)


def bias(given: Mapping[str, float], vocab: int) -> dict[int, float]:
    found = {}
    for id, value in given.items():
        if not id.isdecimal() or int(id[:12]) >= vocab:
            raise invalid(f"logit_bias: {id[:20]!r} is no token id below {vocab}", "logit_bias")
        found[int(id)] = value
    return found


def stops(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop or []
    if len(texts) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in texts):
        raise invalid(f"stop: give at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters", "stop")
    return tuple(text for text in texts if text)
