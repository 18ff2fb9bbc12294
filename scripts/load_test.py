#!/usr/bin/env python
"""Load test: many clients at once against a real server; a part of them goes away in the middle.

Every text that is finished must equal that of the same request alone, and afterwards no slot and no page may be held.
Prints tokens per second and the times between tokens. `--fuzz SECONDS` sends random requests, valid and not, instead.

    scripts/load_test.py -m MODEL --clients 64 --requests 256 [--parallel 32]
    scripts/load_test.py --synthetic llama-3.2-1b --compare --clients 64 --parallel 64 --requests 640
    scripts/load_test.py --url http://127.0.0.1:8080 --clients 16

`--compare` gives the server the work of `llamagpu bench --parallel` and prints its share of that speed. `--synthetic`
serves random weights of these shapes with the tokens of MODEL.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from llamagpu.convert.gguf_header import encode_header, padding, tensor_bytes
from llamagpu.engine.synthetic import SCALES, SyntheticFile, synthetic_metadata
from llamagpu.errors import LlamaGpuError
from llamagpu.files.gguf_file import BLOCKS, GgufFile
from llamagpu.files.storage import Storage
from llamagpu.hub.registry import resolve

WORDS = "the quick brown fox jumps over a lazy dog and then it sleeps in the warm sun for an hour"
TIMEOUT_S = 600.0
METRIC = "llamagpu_"
UNUSED = 5  # the type of a token that stands for nothing
BLOCK_SCALES = {
    "Q4_0": (0, SCALES[Storage.Q4]),
    "Q6_K": (208, SCALES[Storage.Q6] / 64),
    "Q8_0": (0, SCALES[Storage.Q8]),
}  # where a block has its scale, and one of random weights; of Q6_K its product with a sub-scale
COMPARED_PROMPT, COMPARED_NEW = 128, 64  # words and tokens of a request with --compare


@dataclass
class Report:
    texts: dict[int, str] = field(default_factory=dict)  # by request, of those that were finished
    gone: int = 0
    refused: int = 0
    prompt_tokens: int = 0  # of finished requests, as is the next
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)  # seconds between two events of a stream
    first: list[float] = field(default_factory=list)  # seconds to the first token
    began: float = field(default_factory=time.monotonic)  # all processes have the same clock
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def add(self, other: "Report") -> None:
        self.texts |= other.texts
        self.began, self.ended = min(self.began, other.began), max(self.ended, other.ended)
        for name in ("gone", "refused", "prompt_tokens", "tokens", "gaps", "first"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Connection:
    """HTTP/1.1 in few instructions: with httpx the clients need more time for an event than the server."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self.url = urlsplit(url)
        self.head = "".join(f"{name}: {value}\r\n" for name, value in {"Host": self.url.netloc, **headers}.items())
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, value: Any) -> tuple[int, dict[str, str]]:
        """Send a request; the status and headers of its response."""
        if self.streams is None:
            self.streams = await asyncio.open_connection(
                self.url.hostname, self.url.port, ssl=True if self.url.scheme == "https" else None
            )
        reader, writer = self.streams
        content = json.dumps(value).encode()
        head = f"POST {path} HTTP/1.1\r\n{self.head}Content-Type: application/json\r\nContent-Length: {len(content)}"
        writer.write(f"{head}\r\n\r\n".encode() + content)
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        found = (line.partition(":") for line in lines)
        return int(status.split()[1]), {name.lower(): value.strip() for name, _, value in found}

    async def events(self) -> AsyncIterator[bytes]:
        """The data of each event of a chunked response."""
        assert self.streams
        reader, held = self.streams[0], b""
        while size := int(await reader.readline(), 16):
            held += (await reader.readexactly(size + 2))[:-2]
            *complete, held = held.split(b"\n\n")
            for event in complete:
                if event.startswith(b"data: "):
                    yield event[6:]
        await reader.readline()

    def close(self) -> None:
        if self.streams:
            self.streams[1].transport.abort()
            self.streams = None


def body(number: int, args: argparse.Namespace) -> dict[str, Any]:
    """A request of a length of its own; most are sampled, with a seed. Those to compare are all alike."""
    rng = random.Random(args.seed * args.requests + number)
    words = COMPARED_PROMPT if args.compare else rng.choice([2, 8, 30, 100])
    return {
        "prompt": " ".join(rng.choices(WORDS.split(), k=words)),
        "max_tokens": COMPARED_NEW if args.compare else rng.randint(2, args.longest),
        "temperature": 0 if args.greedy or args.compare else rng.choice([0, 0.7, 1.0]),
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def one(connection: Connection, request: dict[str, Any], leave_after: int | None, report: Report) -> None:
    """Send a request and read its stream; `leave_after` so many events the client goes away."""
    parts, began, latest = [], time.perf_counter(), 0.0
    while True:
        status, headers = await connection.post("/v1/completions", request)
        if status == 200:
            break
        connection.close()
        if status != 429:
            raise RuntimeError(f"request {request['seed']} gave {status}")
        report.refused += 1
        await asyncio.sleep(min(2.0, float(headers["retry-after"])))
    async for data in connection.events():
        if data == b"[DONE]":
            continue
        event, now = json.loads(data), time.perf_counter()
        if event["choices"] and event["choices"][0]["text"]:
            (report.gaps if latest else report.first).append(now - (latest or began))
            latest = now
            parts.append(event["choices"][0]["text"])
        if event.get("usage"):
            report.prompt_tokens += event["usage"]["prompt_tokens"]
            report.tokens += event["usage"]["completion_tokens"]
        if leave_after is not None and len(parts) >= leave_after:
            report.gone += 1
            connection.close()
            return
    report.texts[request["seed"]] = "".join(parts)


async def load(url: str, headers: dict[str, str], args: argparse.Namespace, numbers: range) -> Report:
    """The requests of these numbers, by a share of the clients."""
    report, rng, left = Report(), random.Random(args.seed + numbers.start), iter(numbers)

    async def work() -> None:
        connection = Connection(url, headers)
        for number in left:
            leaves = rng.random() < args.leaving
            await one(connection, body(number, args), rng.randint(0, 8) if leaves else None, report)
        connection.close()

    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*(work() for _ in range(-(-args.clients // args.processes))))
    report.ended = time.monotonic()
    return report


def run_load(url: str, headers: dict[str, str], args: argparse.Namespace, numbers: range) -> Report:
    return asyncio.run(load(url, headers, args, numbers))


def load_by_processes(url: str, headers: dict[str, str], args: argparse.Namespace, numbers: range) -> Report:
    """Every process has a share of clients and requests; they begin together."""
    if args.processes == 1:
        return run_load(url, headers, args, numbers)
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.processes, context.Barrier(args.processes).wait) as pool:
        shares = [(url, headers, args, numbers[i :: args.processes]) for i in range(args.processes)]
        first, *others = pool.starmap(run_load, shares, chunksize=1)
    for other in others:
        first.add(other)
    return first


async def differing(url: str, headers: dict[str, str], report: Report, args: argparse.Namespace) -> list[int]:
    """The requests whose text alone is another one; a sample of them is asked again."""
    numbers = random.Random(args.seed).sample(sorted(report.texts), min(args.checked, len(report.texts)))
    alone, connection = Report(), Connection(url, headers)
    for number in numbers:
        await one(connection, body(number, args), None, alone)
    connection.close()
    return [number for number in numbers if alone.texts[number] != report.texts[number]]


def metrics(url: str, headers: dict[str, str]) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", headers=headers, timeout=TIMEOUT_S).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix(METRIC): float(value) for name, value in pairs}


def leaked(url: str, headers: dict[str, str]) -> dict[str, float]:
    """What is still held when nobody asks any more. Clients that left may need a moment."""
    names = ("kv_pages_used", "requests_processing", "requests_deferred")
    deadline = time.monotonic() + 30
    while True:
        values = metrics(url, headers)
        held = {name: values[name] for name in names if values[name]}
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(0.1)


def described(report: Report, spent: dict[str, float], clients: int) -> str:
    """`spent`: how much the server's metrics have grown."""
    seconds = report.seconds
    engine = {name.split('"')[1]: value for name, value in spent.items() if name.startswith("engine_seconds")}
    generated, prompts = spent["generated_tokens_total"], spent["prompt_tokens_total"]
    computed = prompts - spent["cached_prompt_tokens_total"]
    busy = ", ".join(f"{state} {100 * value / seconds:.0f} %" for state, value in engine.items())
    return (
        f"{clients} clients, {len(report.texts)} finished, {report.gone} gone, {report.refused} refused; "
        f"{report.tokens / seconds:.1f} tok/s in {seconds:.1f} s; first token p50 "
        f"{1000 * percentile(report.first, 0.5):.0f} ms, between events p50 "
        f"{1000 * percentile(report.gaps, 0.5):.1f} ms, p95 {1000 * percentile(report.gaps, 0.95):.1f} ms, longest "
        f"{1000 * max(report.gaps, default=0.0):.0f} ms\n"
        f"with those for clients that left: {generated / seconds:.1f} tok/s of {generated:.0f}; "
        f"prompts: {computed / seconds:.1f} tok/s of {prompts:.0f}, {prompts - computed:.0f} found in the cache\n"
        f"engine: {busy}"
    )


def compared(report: Report, args: argparse.Namespace) -> str:
    """The speed of prompts and texts together; beside it that of `bench --parallel` with requests of the same size."""
    finished, speed = len(report.texts), (report.prompt_tokens + report.tokens) / report.seconds
    prompt, new = round(report.prompt_tokens / finished), round(report.tokens / finished)
    result = f"prompts of {prompt} and {new} new tokens: {speed:.1f} tok/s in all"
    if args.url:
        return result
    command = [sys.executable, "-m", "llamagpu", "bench", "-m", args.model, "-p", str(prompt), "-n", str(new)]
    command += ["-npl", str(args.parallel), "-o", "jsonl", *args.serve_arguments]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    row = json.loads(output.stdout)
    return (
        f"{result}, {100 * speed / row['speed']:.0f} % of bench --parallel {args.parallel}: {row['speed']:.1f} tok/s "
        f"({row['t_pp']:.3f} s prompts, {row['t_tg']:.3f} s texts)"
    )


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e-300, 2**31, 2**63, 2**200, -(2**70)),
    *("", "text", "\x00", "é😀\u2028", "a" * 5000, [], [[]], {}, {"a": {"b": [1]}}, ["x"], [1, 2], [None]),
    *({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}),
    *('root ::= "a"', {"format": {"type": "json_schema", "schema": {"type": "object"}}}),
    *({"include_usage": True}, [{"type": "function", "function": {"name": "f"}}], "required", "auto", {"5": -100}),
]
FIELDS = (
    "temperature top_p top_k min_p repeat_penalty presence_penalty frequency_penalty seed stop n logprobs "
    "top_logprobs logit_bias stream stream_options response_format tools tool_choice max_completion_tokens messages "
    "prompt input model system cache_prompt chat_template_kwargs echo suffix tokens content encoding_format text "
    "json_schema grammar output_config output_format include"
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


def write_synthetic(shapes: str, tokens: Path, path: Path) -> None:
    """A file of these shapes in Q4_0, with random weights and the tokenizer of `tokens`, whose tokens must be fewer."""
    file, rng = SyntheticFile(shapes), np.random.default_rng(0)
    with closing(GgufFile(tokens)) as source:
        metadata = {key: value for key, value in source.metadata.items() if key.startswith("tokenizer.")}
    known = metadata["tokenizer.ggml.tokens"]
    if (missing := file.config.vocab - len(known)) < 0:
        raise LlamaGpuError(f"{tokens} has {len(known)} tokens, {shapes} only {file.config.vocab}")
    metadata["tokenizer.ggml.tokens"] = [*known, *(f"<unused {i}>" for i in range(missing))]
    for name, value in (("token_type", UNUSED), ("scores", 0)):
        if (key := f"tokenizer.ggml.{name}") in metadata:
            metadata[key] = np.append(metadata[key], np.full(missing, value, metadata[key].dtype))
    tensors = file.tensors.values()
    header = encode_header(synthetic_metadata(shapes) | metadata, [(t.name, t.ggml_type, t.shape) for t in tensors])
    with path.open("wb") as out:
        out.write(header)
        for tensor in tensors:
            size = tensor_bytes(tensor.ggml_type, tensor.shape)
            if tensor.ggml_type == "F32":
                blocks = np.ones(size // 4, np.float32)
            else:
                first, scale = BLOCK_SCALES[tensor.ggml_type]
                block = BLOCKS[tensor.ggml_type][1]
                blocks = rng.integers(0, 256, (size // block, block), np.uint8)
                scales = rng.choice(np.array([[-scale], [scale]], np.float16), len(blocks))
                blocks[:, first : first + 2] = scales.view(np.uint8)
            out.write(blocks.tobytes() + padding(size))


@contextmanager
def synthetic(args: argparse.Namespace) -> Iterator[None]:
    """With --synthetic, the model is a file that is removed afterwards."""
    if not args.synthetic:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{args.synthetic}.gguf"
        try:
            write_synthetic(args.synthetic, resolve(args.model), path)
        except LlamaGpuError as error:
            sys.exit(str(error))
        args.model = str(path)
        yield


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
    parser.add_argument("--synthetic", metavar="SHAPES", help="random weights, for the speed alone; see `bench --help`")
    parser.add_argument("--url", help="a server that runs already; without it one is started")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--longest", type=int, default=64, help="tokens of the longest answer")
    parser.add_argument("--greedy", action="store_true", help="temperature 0 for all, as `bench --parallel` has it")
    parser.add_argument("--leaving", type=float, default=1 / 3, help="share of clients that go away")
    parser.add_argument("--checked", type=int, default=32, help="finished texts that are compared with those alone")
    parser.add_argument("--processes", type=int, default=1, help="that the clients are in")
    parser.add_argument("--warmup", type=int, default=0, metavar="REQUESTS", help="before the measurement")
    parser.add_argument(
        "--compare",
        action="store_true",
        help=f"greedy requests of {COMPARED_PROMPT} words and {COMPARED_NEW} new tokens, nobody leaves; "
        "then `bench --parallel` on the same model",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fuzz", type=float, metavar="SECONDS", help="random requests instead")
    parser.add_argument("serve_arguments", nargs="*", help="after --: for llamagpu serve, and bench with --compare")
    args = parser.parse_args()
    if args.compare:
        args.leaving, args.warmup = 0.0, args.warmup or 2 * args.requests
    headers = {"Authorization": f"Bearer {args.api_key}"}
    with synthetic(args):
        run(args, headers)


def run(args: argparse.Namespace, headers: dict[str, str]) -> None:
    report: Report | None = None
    with server(args) as url:
        if args.fuzz:
            print(dict(sorted(fuzz(url, headers, args.fuzz, args.seed).items())))
        else:
            report = measured(url, headers, args)
            if wrong := asyncio.run(differing(url, headers, report, args)):
                sys.exit(f"the texts of requests {wrong} differ from those alone")
        if held := leaked(url, headers):
            sys.exit(f"still held: {held}")
        print("no text differs, nothing is held" if not args.fuzz else "no server error, nothing is held")
    if args.compare and report:
        print(compared(report, args))


def measured(url: str, headers: dict[str, str], args: argparse.Namespace) -> Report:
    if args.warmup:
        load_by_processes(url, headers, args, range(args.requests, args.requests + args.warmup))
    before = metrics(url, headers)
    report = load_by_processes(url, headers, args, range(args.requests))
    after = metrics(url, headers)
    print(described(report, {name: value - before.get(name, 0) for name, value in after.items()}, args.clients))
    return report


if __name__ == "__main__":
    main()
