#!/usr/bin/env python
"""Load test: many clients at once against a real server; a part of them goes away in the middle.

Every text that is finished must equal that of the same request alone, and afterwards no slot and no page may be held.
Prints tokens per second and the times between tokens. `--fuzz SECONDS` sends random requests, valid and not, instead.

    scripts/load_test.py -m MODEL --clients 64 --requests 256 [--parallel 32]
    scripts/load_test.py --url http://127.0.0.1:8080 --clients 16
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = "the quick brown fox jumps over a lazy dog and then it sleeps in the warm sun for an hour"
TIMEOUT_S = 600.0


@dataclass
class Report:
    texts: dict[int, str] = field(default_factory=dict)  # by request, of those that were finished
    gone: int = 0
    refused: int = 0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)  # seconds between two events of a stream
    first: list[float] = field(default_factory=list)  # seconds to the first token
    seconds: float = 0.0


def body(number: int, args: argparse.Namespace) -> dict[str, Any]:
    """A request of a length of its own; most are sampled, with a seed."""
    rng = random.Random(number)
    prompt = " ".join(rng.choice(WORDS.split()) for _ in range(rng.choice([2, 8, 30, 100])))
    return {
        "prompt": prompt,
        "max_tokens": rng.randint(2, args.longest),
        "temperature": 0 if args.greedy else rng.choice([0, 0.7, 1.0]),
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def one(client: httpx.AsyncClient, request: dict[str, Any], leave_after: int | None, report: Report) -> None:
    """Send a request and read its stream; `leave_after` so many events the client goes away."""
    parts, began, latest = [], time.perf_counter(), 0.0
    while True:
        async with client.stream("POST", "/v1/completions", json=request) as response:
            if response.status_code == 429:
                report.refused += 1
                await asyncio.sleep(min(2.0, float(response.headers["Retry-After"])))
                continue
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event, now = json.loads(line[6:]), time.perf_counter()
                if event["choices"] and event["choices"][0]["text"]:
                    (report.gaps if latest else report.first).append(now - (latest or began))
                    latest = now
                    parts.append(event["choices"][0]["text"])
                if event.get("usage"):
                    report.tokens += event["usage"]["completion_tokens"]
                if leave_after is not None and len(parts) >= leave_after:
                    report.gone += 1
                    return
        report.texts[request["seed"]] = "".join(parts)
        return


async def load(url: str, headers: dict[str, str], args: argparse.Namespace) -> Report:
    report, rng, numbers = Report(), random.Random(args.seed), iter(range(args.requests))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits) as client:

        async def work() -> None:
            for number in numbers:
                leaves = rng.random() < args.leaving
                await one(client, body(number, args), rng.randint(0, 8) if leaves else None, report)

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(args.clients)))
        report.seconds = time.perf_counter() - began
    return report


async def differing(url: str, headers: dict[str, str], report: Report, args: argparse.Namespace) -> list[int]:
    """The requests whose text alone is another one; a sample of them is asked again."""
    numbers = random.Random(args.seed).sample(sorted(report.texts), min(args.checked, len(report.texts)))
    alone = Report()
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S) as client:
        for number in numbers:
            await one(client, body(number, args), None, alone)
    return [number for number in numbers if alone.texts[number] != report.texts[number]]


def leaked(url: str, headers: dict[str, str]) -> dict[str, float]:
    """What is still held when nobody asks any more. Clients that left may need a moment."""
    names = ("llamagpu_kv_pages_used", "llamagpu_requests_processing", "llamagpu_requests_deferred")
    deadline = time.monotonic() + 30
    while True:
        lines = httpx.get(f"{url}/metrics", headers=headers, timeout=TIMEOUT_S).text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        held = {name: float(values[name]) for name in names if float(values[name])}
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(0.1)


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e-300, 2**31, 2**63, 2**200, -(2**70)),
    *("", "text", "\x00", "é😀\u2028", "a" * 5000, [], [[]], {}, {"a": {"b": [1]}}, ["x"], [1, 2], [None]),
    *({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}),
    *({"include_usage": True}, [{"type": "function", "function": {"name": "f"}}], "required", "auto", {"5": -100}),
]
FIELDS = (
    "temperature top_p top_k min_p repeat_penalty presence_penalty frequency_penalty seed stop n logprobs "
    "top_logprobs logit_bias stream stream_options response_format tools tool_choice max_completion_tokens messages "
    "prompt input model system cache_prompt chat_template_kwargs echo suffix tokens content encoding_format text"
)
PATHS = (
    "/v1/chat/completions /v1/completions /v1/responses /v1/embeddings /v1/messages /v1/messages/count_tokens "
    "/tokenize /detokenize /apply-template"
)


def fuzz(url: str, headers: dict[str, str], seconds: float, seed: int) -> Counter[int]:
    """Random requests until the time is over; the statuses. A 500 ends it with the request."""
    rng, statuses, end = random.Random(seed), Counter[int](), time.monotonic() + seconds
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S) as client:
        while time.monotonic() < end:
            fields = {"messages": [{"role": "user", "content": "hello"}], "prompt": "hello", "input": "hello"}
            value: dict[str, Any] = {
                **fields,
                "content": "hello",
                "tokens": [1],
                "max_tokens": 2,
                "max_output_tokens": 2,
            }
            value |= {name: rng.choice(VALUES) for name in rng.sample(FIELDS.split(), rng.randint(0, 4))}
            raw = json.dumps(value).encode()
            if rng.random() < 0.2:  # cut, or with a byte of another kind
                cut = rng.randrange(len(raw))
                raw = raw[:cut] + rng.choice([b"", bytes([rng.randrange(256)]) + raw[cut + 1 :]])
            path = rng.choice(PATHS.split())
            response = client.post(path, content=raw)
            statuses[response.status_code] += 1
            if response.status_code >= 500:
                sys.exit(f"{path} gave {response.status_code} {response.text}\nfor {raw!r}")
    return statuses


@contextmanager
def server(args: argparse.Namespace) -> Iterator[str]:
    """The URL of a server: one that runs, or one for this test."""
    if args.url:
        yield args.url
        return
    command = [sys.executable, "-m", "llamagpu", "serve", "-m", args.model, "--port", "0", "-np", str(args.parallel)]
    process = subprocess.Popen([*command, *args.serve_arguments], stderr=subprocess.PIPE, text=True)
    assert process.stderr
    try:
        url = next((found[1] for line in process.stderr if (found := re.search(r"is ready at (\S+)", line))), None)
        if url is None:
            sys.exit(f"the server ended with status {process.wait()}")
        threading.Thread(target=lambda: process.stderr and process.stderr.read(), daemon=True).start()
        yield url
    finally:
        process.terminate()
        process.wait()


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1] if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--url", help="a server that runs already; without it one is started")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--longest", type=int, default=64, help="tokens of the longest answer")
    parser.add_argument("--greedy", action="store_true", help="temperature 0 for all, as `bench --parallel` has it")
    parser.add_argument("--leaving", type=float, default=1 / 3, help="share of clients that go away")
    parser.add_argument("--checked", type=int, default=32, help="finished texts that are compared with those alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fuzz", type=float, metavar="SECONDS", help="random requests instead")
    parser.add_argument("serve_arguments", nargs="*", help="after --: further arguments of llamagpu serve")
    args = parser.parse_args()
    headers = {"Authorization": f"Bearer {args.api_key}"}
    with server(args) as url:
        if args.fuzz:
            print(dict(sorted(fuzz(url, headers, args.fuzz, args.seed).items())))
        else:
            report = asyncio.run(load(url, headers, args))
            wrong = asyncio.run(differing(url, headers, report, args))
            print(
                f"{args.clients} clients, {len(report.texts)} finished, {report.gone} gone, {report.refused} refused; "
                f"{report.tokens / report.seconds:.1f} tok/s in {report.seconds:.1f} s; first token p50 "
                f"{1000 * percentile(report.first, 0.5):.0f} ms, between events p50 "
                f"{1000 * percentile(report.gaps, 0.5):.1f} ms, p95 {1000 * percentile(report.gaps, 0.95):.1f} ms"
            )
            if wrong:
                sys.exit(f"the texts of requests {wrong} differ from those alone")
        if held := leaked(url, headers):
            sys.exit(f"still held: {held}")
        print("no text differs, nothing is held" if not args.fuzz else "no server error, nothing is held")


if __name__ == "__main__":
    main()
