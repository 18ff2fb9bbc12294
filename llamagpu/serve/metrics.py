"""Counters, gauges and histograms in the text format of Prometheus."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PREFIX = "llamagpu_"
# What the engine's thread does: steps that are submitted ahead, steps that wait (with prompts, or tokens that the host
# must see first); while the device computes one of these, giving tokens to the event loop.
ENGINE_STATES = ("decode_ahead", "mixed_step", "hand_over")


class Histogram:
    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def samples(self) -> Iterator[tuple[str, float]]:
        total = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            yield f'_bucket{{le="{bound}"}}', total
        yield "_sum", self.sum
        yield "_count", total


@dataclass(slots=True)
class Metrics:
    requests: dict[tuple[str, int], int] = field(default_factory=dict)  # (route, status)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    cancelled: int = 0
    engine_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ENGINE_STATES, 0.0))
    request_seconds: Histogram = field(default_factory=Histogram)
    first_token_seconds: Histogram = field(default_factory=Histogram)
    inter_token_seconds: Histogram = field(default_factory=Histogram)

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] = self.requests.get((route, status), 0) + 1
        self.request_seconds.add(seconds)

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """The page of /metrics. `gauges`: name to help and value."""
        by_route = [(f'{{route="{route}",status="{status}"}}', n) for (route, status), n in self.requests.items()]
        by_state = [(f'{{state="{state}"}}', seconds) for state, seconds in self.engine_seconds.items()]
        lines = [
            *family("requests_total", "counter", "HTTP requests by route and status.", by_route),
            *counter("prompt_tokens_total", "Tokens of prompts.", self.prompt_tokens),
            *counter("cached_prompt_tokens_total", "Tokens of prompts found in the KV cache.", self.cached_tokens),
            *counter("generated_tokens_total", "Tokens generated.", self.generated_tokens),
            *counter("cancelled_total", "Generations whose client went away, or whose time was over.", self.cancelled),
            *family("engine_seconds_total", "counter", "Time of the engine's thread.", by_state),
            *histogram("request_seconds", "Time of a request.", self.request_seconds),
            *histogram("time_to_first_token_seconds", "From request to first token.", self.first_token_seconds),
            *histogram("inter_token_seconds", "Time between tokens of a text.", self.inter_token_seconds),
        ]
        for name, (help, value) in gauges.items():
            lines += family(name, "gauge", help, [("", value)])
        return "\n".join(lines) + "\n"


def family(name: str, kind: str, help: str, samples: Iterable[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {help}"
    yield f"# TYPE {PREFIX}{name} {kind}"
    for suffix, value in samples:
        yield f"{PREFIX}{name}{suffix} {value:g}" if isinstance(value, float) else f"{PREFIX}{name}{suffix} {value}"


def counter(name: str, help: str, value: int) -> Iterator[str]:
    return family(name, "counter", help, [("", value)])


def histogram(name: str, help: str, values: Histogram) -> Iterator[str]:
    return family(name, "histogram", help, values.samples())
