"""Sampling parameters, and sampling from logits on the host in the order of llama.cpp's default chain."""

import math
import secrets
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.arguments import MAX_PENALTY
from llamagpu.engine.grammar import allowed_tokens
from llamagpu.errors import NumericCheckFailed, check_argument, is_number, is_whole
from llamagpu.gpu.shaders import constants

Floats = NDArray[np.floating]
MAX_BIASES = constants("sample")["MAX_BIASES"]  # tokens of a logit bias
SORTED = constants("best_tokens")["MAX_TOP_K"]  # tokens that the device sorts
PENALTIES = f"a number from {1 / MAX_PENALTY:g} to {MAX_PENALTY:g}; 1: none"


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
    repeat_last_n: int = 64  # how many tokens of prompt and answer the three penalties look back at; 0: no penalties
    seed: int | None = None  # of which the low 32 bits count; None: a new one each time
    presence_penalty: float = 0.0  # subtracted from the logit of a token among the last repeat_last_n
    frequency_penalty: float = 0.0  # subtracted once for each time that the token is among them
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # added first; -inf or False: never

    def __post_init__(self) -> None:
        from_0, whole, share = "a finite number from 0 up", "a whole number from 0 up", "a number from 0 to 1"
        penalty, seed = self.repeat_penalty, self.seed
        check_argument("temperature", self.temperature, is_number(self.temperature, 0), from_0)
        check_argument("top_k", self.top_k, is_whole(self.top_k, 0), f"{whole}; 0: all tokens")
        check_argument("top_p", self.top_p, is_number(self.top_p, 0, 1), share)
        check_argument("min_p", self.min_p, is_number(self.min_p, 0, 1), share)
        check_argument("repeat_penalty", penalty, is_number(penalty, 1 / MAX_PENALTY, MAX_PENALTY), PENALTIES)
        check_argument("repeat_last_n", self.repeat_last_n, is_whole(self.repeat_last_n, 0), whole)
        check_argument("seed", seed, seed is None or is_whole(seed, 0), f"{whole}, or None for a new one each time")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            check_argument(name, value, is_number(value, -100, 100), "a number from -100 to 100; 0: none")
        object.__setattr__(self, "logit_bias", checked_bias(self.logit_bias))

    @property
    def penalises(self) -> bool:
        changes = self.repeat_penalty != 1.0 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return changes and self.repeat_last_n > 0

    @property
    def greedy(self) -> bool:
        """Whether the largest logit as it is decides."""
        return self.temperature <= 0 and not self.penalises and not self.logit_bias

    def seeded(self) -> "Sampling":
        """With a seed, a new one if it has none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))

    @property
    def seed_word(self) -> int:
        """The 32 bits that random numbers come from."""
        return int(self.seed or 0) & 0xFFFFFFFF


def checked_bias(bias: Any) -> dict[int, float]:
    """A copy, with -inf for False."""
    expected = "a dict from token ids to numbers from -100 to 100, or -inf or False for tokens that must not come"
    check_argument("logit_bias", bias, isinstance(bias, Mapping), expected)
    check_argument("logit_bias", bias, len(bias) <= MAX_BIASES, f"at most {MAX_BIASES} tokens")
    valid = all(is_whole(id, 0) and (v is False or v == -math.inf or is_number(v, -100, 100)) for id, v in bias.items())
    check_argument("logit_bias", bias, valid, expected)
    return {int(id): -math.inf if value is False else float(value) for id, value in bias.items()}


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities in the place of a token, before mask, bias, penalties, temperature and filters."""

    logprob: float  # of the token
    ids: list[int]  # the likeliest tokens, the likeliest first
    logprobs: list[float]


class HostSampler:
    """Samples a token from logits and remembers it: the same token as the device with this seed."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self.sampling, self.prompt = sampling.seeded(), prompt
        self.restart(())

    def restart(self, new: Sequence[int]) -> None:
        """After the prompt and these tokens."""
        self.position = len(self.prompt) + len(new)
        self.recent = deque((*self.prompt, *new), maxlen=min(max(1, self.sampling.repeat_last_n), sys.maxsize))

    def __call__(self, logits: Floats, mask: NDArray[np.int32] | None = None) -> int:
        """`mask`: the bits of the tokens that a grammar allows."""
        need_finite(logits)
        wide, sampling = logits.astype(np.float64), self.sampling
        if mask is not None:
            wide[~allowed_tokens(mask, wide.size)] = -math.inf
        number = random_number(sampling.seed_word, self.position)
        token = sample(penalise(add_bias(wide, sampling), self.recent, sampling), sampling, number)
        self.recent.append(token)
        self.position += 1
        return token


def random_number(seed: int, position: int) -> float:
    """The number in 0..1 for the token at a position: two rounds of PCG, as in the kernel."""

    def pcg(h: int) -> int:
        h = (h * 747796405 + 2891336453) & 0xFFFFFFFF
        h = (((h >> ((h >> 28) + 4)) ^ h) * 277803737) & 0xFFFFFFFF
        return (h >> 22) ^ h

    return (pcg(pcg(seed ^ ((position * 2654435761) & 0xFFFFFFFF))) >> 8) / (1 << 24)


def need_finite(values: Floats) -> None:
    if not np.isfinite(values).all():
        raise not_finite()


def not_finite() -> NumericCheckFailed:
    return NumericCheckFailed(
        "the model's output is not a number (NaN or infinite)",
        "the file may be damaged: fetch it again; or try --precision high",
    )


def add_bias(logits: Floats, sampling: Sampling) -> Floats:
    """Add the logit bias, in place."""
    for id, value in sampling.logit_bias.items():
        logits[id] += value
    return logits


def penalise(logits: Floats, recent: Sequence[int], sampling: Sampling) -> Floats:
    """Apply the penalties as llama.cpp does, in place."""
    if sampling.penalises and recent:
        counted = Counter(recent)
        seen, counts = np.array(list(counted)), np.array(list(counted.values()))
        values = logits[seen]
        values = np.where(values > 0, values / sampling.repeat_penalty, values * sampling.repeat_penalty)
        logits[seen] = values - counts * sampling.frequency_penalty - sampling.presence_penalty
    return logits


def sample(logits: Floats, sampling: Sampling, number: float) -> int:
    """The token that a random number in 0..1 selects."""
    if sampling.temperature <= 0:
        return int(np.argmax(logits))
    tokens, shares = candidates(logits, sampling)
    at = np.searchsorted(np.cumsum(shares), number * shares.sum(), side="right")
    return int(tokens[min(at, np.flatnonzero(shares)[-1])])


def candidates(logits: Floats, sampling: Sampling) -> tuple[NDArray[np.int64], Floats]:
    """The tokens that may be sampled, and their shares: after top-k, top-p, min-p and temperature.

    The likeliest first; in the order of ids where top-k lets more pass than the device sorts, and the others as many.
    """
    count = min(sampling.top_k, logits.size) if sampling.top_k > 0 else logits.size
    tokens = best(logits, count)
    shares = softmax(logits[tokens])
    kept = shares >= sampling.min_p * shares[0]
    if sampling.top_p < 1:
        kept &= np.cumsum(shares) - shares < sampling.top_p  # the token that crosses p stays
    kept[0] = True
    tokens = tokens[kept]
    if count > SORTED <= tokens.size:
        tokens.sort()
    return tokens, softmax(logits[tokens] / sampling.temperature)


def best(logits: Floats, count: int) -> NDArray[np.int64]:
    """The ids of the largest logits, the largest first, among equals the lowest id."""
    if count < logits.size:
        last = np.partition(logits, logits.size - count)[logits.size - count]
        tokens = np.flatnonzero(logits >= last)
    else:
        tokens = np.arange(logits.size)
    return np.asarray(tokens[np.argsort(-logits[tokens], kind="stable")][:count])


def score(logits: Floats, token: int, count: int) -> Scores:
    """The log probabilities of a token and of the `count` likeliest."""
    logs, ids = log_softmax(logits), best(logits, min(count, logits.size)).tolist() if count else []
    return Scores(float(logs[token]), ids, logs[ids].tolist() if ids else [])


def softmax(values: Floats) -> Floats:
    shares = np.exp(values - values.max())
    return np.asarray(shares / shares.sum())


def log_softmax(logits: Floats) -> Floats:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
