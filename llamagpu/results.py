"""What the Python API returns: tokens, completions and their figures."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a token, before grammar, penalties, temperature and filters."""

    id: int
    text: str  # of this token alone
    logprob: float
    top: tuple["Logprob", ...] = ()  # the likeliest tokens in its place, the likeliest first


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    text: str  # text that this token completes: may be empty, or the text of several tokens
    logprob: Logprob | None = None  # with `logprobs`


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int  # an end token included
    cached_tokens: int  # prompt tokens that were in the KV cache


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


@dataclass(frozen=True, slots=True)
class Completion:
    """What `Llama.chat` and `Llama.complete` return."""

    text: str
    finish_reason: str  # stop: end token, stop string or end of the grammar; length: max_tokens; context: it is full
    usage: Usage
    ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...]  # one for each id, with `logprobs`; else none
    timings: Timings
