"""The cases of a benchmark, and llama-bench's lists and ranges of numbers."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from llamagpu.engine.options import KvType
from llamagpu.errors import LlamaGpuError


class BadValue(LlamaGpuError):
    """An option has a value that it does not take."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One row of the benchmark, with llama-bench's field names."""

    n_batch: int
    n_ubatch: int  # 0: the default of the adapter
    kv_type: KvType | None  # None: the default of the adapter
    n_depth: int
    n_prompt: int
    n_gen: int

    @property
    def name(self) -> str:
        return case_name(self.n_prompt, self.n_gen, self.n_depth)

    @property
    def tokens(self) -> int:
        return self.n_prompt + self.n_gen

    @property
    def start(self) -> int:
        """Positions that are filled before the clock starts. Sampling needs at least one."""
        return self.n_depth if self.n_prompt else max(1, self.n_depth)

    @property
    def chunk(self) -> int:
        return min(self.n_batch, self.n_ubatch)

    def steps(self) -> Iterator[tuple[int, int]]:
        """(token rows, position) of every step of the case."""
        for start in range(0, self.n_prompt, self.chunk):
            yield min(self.chunk, self.n_prompt - start), self.start + start
        yield from ((1, self.start + self.n_prompt + i) for i in range(self.n_gen))


def case_name(n_prompt: int, n_gen: int, n_depth: int) -> str:
    """As llama-bench names it: pp512, tg128, pp512+tg128 @ d1024."""
    parts = [f"pp{n_prompt}"] * (n_prompt > 0) + [f"tg{n_gen}"] * (n_gen > 0)
    return "+".join(parts) + (f" @ d{n_depth}" if n_depth else "")


def numbers(texts: Sequence[str], least: int = 0) -> list[int]:
    """llama-bench's lists: commas, and ranges first-last, first-last+step, first-last*factor."""
    found: list[int] = []
    for item in ",".join(texts).split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?", item.strip())
        if not match:
            raise BadValue(f"{item!r} is no number or range", "such as 512, 128-512, 0-4096+1024 or 1-64*2")
        first, last = int(match[1]), int(match[2] or match[1])
        by = int(match[4] or 1)
        if (match[3] == "*" and (by < 2 or first == 0)) or by == 0 or first < least:
            raise BadValue(f"the range {item!r} never ends, or starts too low", f"start at {max(1, least)}")
        while first <= last:
            found.append(first)
            first = first * by if match[3] == "*" else first + by
    return found


def make_cases(
    prompts: Sequence[int],
    gens: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    depths: Sequence[int],
    batches: Sequence[int],
    ubatches: Sequence[int],
    kv_types: Sequence[KvType | None],
) -> list[BenchCase]:
    """The cases in llama-bench's order."""
    lengths = [(p, 0) for p in prompts] + [(0, n) for n in gens] + list(pairs)
    settings = product(batches, ubatches, kv_types, depths)
    cases = [BenchCase(*setting, *length) for setting in settings for length in lengths if any(length)]
    if not cases:
        raise BadValue("there is nothing to measure: -p and -n are 0", "give one of them a number of tokens")
    return cases


def positions(cases: Sequence[BenchCase]) -> int:
    """Positions that the KV cache must hold for all of the cases."""
    return max(case.start + case.tokens for case in cases) + 4
