"""Choosing a token from logits on the host: the chain of llama.cpp's defaults, with its names."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamagpu.errors import NumericCheckFailed


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 0.8  # 0: the likeliest token
    top_k: int = 40  # keep the k likeliest; 0: all
    top_p: float = 0.95  # keep the likeliest that together reach p
    min_p: float = 0.05  # drop what is less likely than this share of the likeliest
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # how far back the penalty looks
    seed: int | None = None  # None: a new one each time

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0 and self.repeat_penalty == 1.0


def make_sampler(sampling: Sampling, prompt: Sequence[int]) -> Callable[[np.ndarray[Any, Any]], int]:
    """A chooser that remembers what it chose; the same seed and logits give the same tokens."""
    random = np.random.default_rng(sampling.seed)
    recent = deque(prompt, maxlen=max(1, sampling.repeat_last_n))

    def choose(logits: np.ndarray[Any, Any]) -> int:
        need_finite(logits)
        token = draw(penalise(logits.astype(np.float64), recent, sampling), sampling, random)
        recent.append(token)
        return token

    return choose


def need_finite(logits: np.ndarray[Any, Any]) -> None:
    if not np.isfinite(logits).all():
        raise NumericCheckFailed(
            "the model's output is not a number (NaN or infinite)",
            "the file may be damaged: fetch it again; or try --precision high",
        )


def penalise(logits: np.ndarray[Any, Any], recent: Sequence[int], sampling: Sampling) -> np.ndarray[Any, Any]:
    if sampling.repeat_penalty != 1.0 and sampling.repeat_last_n:
        seen = np.unique(np.fromiter(recent, np.int64))
        kept = logits[seen]
        logits[seen] = np.where(kept > 0, kept / sampling.repeat_penalty, kept * sampling.repeat_penalty)
    return logits


def draw(logits: np.ndarray[Any, Any], sampling: Sampling, random: np.random.Generator) -> int:
    if sampling.temperature <= 0:
        return int(np.argmax(logits))
    order, shares = candidates(logits, sampling)
    return int(order[np.searchsorted(np.cumsum(shares), random.random() * shares.sum(), side="right")])


def candidates(
    logits: np.ndarray[Any, Any], sampling: Sampling
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What may be drawn, likeliest first, and how likely: after top-k, top-p, min-p and temperature."""
    count = min(sampling.top_k, logits.size) if sampling.top_k > 0 else logits.size
    order = np.argpartition(-logits, count - 1)[:count] if count < logits.size else np.arange(logits.size)
    order = order[np.lexsort((order, -logits[order]))]
    shares = softmax(logits[order])
    keep = np.cumsum(shares) - shares < sampling.top_p  # the token that crosses p stays
    keep &= shares >= sampling.min_p * shares[0]
    keep[0] = True
    order = order[keep]
    return order, softmax(logits[order] / sampling.temperature)


def softmax(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shares = np.exp(values - values.max())
    return shares / shares.sum()  # type: ignore[no-any-return]
