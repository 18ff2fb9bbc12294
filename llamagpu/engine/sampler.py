"""Sampling parameters, and sampling from logits on the host in the order of llama.cpp's default chain."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine.grammar import Matcher, allowed_tokens
from llamagpu.errors import GrammarFailed, NumericCheckFailed, check_argument, is_number, is_whole

Floats = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters, with llama.cpp's names and defaults.

    >>> Sampling(temperature=0).greedy  # the likeliest token, always
    True
    >>> try:
    ...     Sampling(top_p=2)
    ... except ValueError as error:
    ...     print(f"{error}; {error.remedy}")
    top_p is 2; give a number from 0 to 1
    """

    temperature: float = 0.8  # 0: the likeliest token
    top_k: int = 40  # keep the k likeliest; 0: all
    top_p: float = 0.95  # keep the likeliest that together reach p
    min_p: float = 0.05  # drop tokens less likely than this share of the likeliest
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # how far back the penalty looks
    seed: int | None = None  # None: a new one each time

    def __post_init__(self) -> None:
        from_0, whole, share = "a finite number from 0 up", "a whole number from 0 up", "a number from 0 to 1"
        penalty, seed = self.repeat_penalty, self.seed
        check_argument("temperature", self.temperature, is_number(self.temperature, 0), from_0)
        check_argument("top_k", self.top_k, is_whole(self.top_k, 0), f"{whole}; 0: all tokens")
        check_argument("top_p", self.top_p, is_number(self.top_p, 0, 1), share)
        check_argument("min_p", self.min_p, is_number(self.min_p, 0, 1), share)
        check_argument(
            "repeat_penalty", penalty, is_number(penalty, 0) and penalty > 0, "a finite number above 0; 1: none"
        )
        check_argument("repeat_last_n", self.repeat_last_n, is_whole(self.repeat_last_n, 0), whole)
        check_argument("seed", seed, seed is None or is_whole(seed, 0), f"{whole}, or None for a new one each time")

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0 and self.repeat_penalty == 1.0


def host_sampler(sampling: Sampling, prompt: Sequence[int], matcher: Matcher | None = None) -> Callable[[Floats], int]:
    """A function that samples a token from logits and remembers it. Equal seeds and logits give equal tokens.

    With a matcher the token is one that the grammar allows, and the matcher accepts it.
    """
    random = np.random.default_rng(sampling.seed)
    recent = deque(prompt, maxlen=max(1, sampling.repeat_last_n))

    def sample_next(logits: Floats) -> int:
        need_finite(logits)
        values = penalise(logits.astype(np.float64), recent, sampling)
        token = sample_matching(values, sampling, random, matcher) if matcher else sample(values, sampling, random)
        recent.append(token)
        return token

    return sample_next


def sample_matching(logits: Floats, sampling: Sampling, random: np.random.Generator, matcher: Matcher) -> int:
    words = np.empty(matcher.words, np.int32)
    matcher.mask(words)
    allowed = allowed_tokens(words, logits.size)
    if not allowed.size:
        raise GrammarFailed("the grammar cannot go on: this model has no token for it", "use another grammar or model")
    token = int(allowed[sample(logits[allowed], sampling, random)])
    matcher.accept(token)
    return token


def need_finite(logits: Floats) -> None:
    if not np.isfinite(logits).all():
        raise NumericCheckFailed(
            "the model's output is not a number (NaN or infinite)",
            "the file may be damaged: fetch it again; or try --precision high",
        )


def penalise(logits: Floats, recent: Sequence[int], sampling: Sampling) -> Floats:
    """Apply the repetition penalty, in place."""
    if sampling.repeat_penalty != 1.0 and sampling.repeat_last_n:
        seen = np.unique(np.fromiter(recent, np.int64))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / sampling.repeat_penalty, values * sampling.repeat_penalty)
    return logits


def sample(logits: Floats, sampling: Sampling, random: np.random.Generator) -> int:
    if sampling.temperature <= 0:
        return int(np.argmax(logits))
    tokens, shares = candidates(logits, sampling)
    return int(tokens[np.searchsorted(np.cumsum(shares), random.random() * shares.sum(), side="right")])


def candidates(logits: Floats, sampling: Sampling) -> tuple[NDArray[np.int64], Floats]:
    """The tokens that may be sampled, likeliest first, and their shares: after top-k, top-p, min-p and temperature."""
    count = min(sampling.top_k, logits.size) if sampling.top_k > 0 else logits.size
    tokens = np.argpartition(-logits, count - 1)[:count] if count < logits.size else np.arange(logits.size)
    tokens = tokens[np.lexsort((tokens, -logits[tokens]))]
    shares = softmax(logits[tokens])
    kept = np.cumsum(shares) - shares < sampling.top_p  # the token that crosses p stays
    kept &= shares >= sampling.min_p * shares[0]
    kept[0] = True
    tokens = tokens[kept]
    return tokens, softmax(logits[tokens] / sampling.temperature)


def softmax(values: Floats) -> Floats:
    shares = np.exp(values - values.max())
    return np.asarray(shares / shares.sum())


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
