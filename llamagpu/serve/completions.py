"""POST /v1/completions: OpenAI's older API, which continues a text."""

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from llamagpu.llama import Generation, Llama
from llamagpu.serve.body import decode
from llamagpu.serve.errors import invalid
from llamagpu.serve.formats import Format, FormatFields, format_of
from llamagpu.serve.generating import FINISH, check_length, generating, generations, timings, usage
from llamagpu.serve.http import DONE, KEEP_ALIVE, Call, EventStream, event, json_response
from llamagpu.serve.logprobs import PlacedToken, ScoredTokens, logprob_number
from llamagpu.serve.parameters import Parameters, parameters
from llamagpu.serve.state import Server

DEFAULT_MAX_TOKENS = 16  # as the API has it
MAX_LOGPROBS = 20
MAX_PROMPTS = 1024
QUICK_CHARS = 1000  # of a prompt that is encoded in the event loop: 0.3 ms, at most 3 where all words are new


class CompletionRequest(FormatFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    model: str | None = None
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


async def handle(server: Server, call: Call) -> Response | EventStream:
    request = decode(call.body, CompletionRequest)
    if request.stream:
        return EventStream(stream(server, request))
    return json_response(await complete(server, request))


async def complete(server: Server, request: CompletionRequest) -> dict[str, Any]:
    head, task = begin(server, request)
    wanted = task.parameters
    async with generating(server, lambda llama: prepare(task, llama), task.count, task.quick) as (jobs, echoes):
        texts, scored = ["" for _ in jobs], [ScoredTokens(server.llama) for _ in jobs]
        async for update in jobs.updates():
            for i, arrived in update:
                texts[i] += "".join(token.text for token in arrived)
                scored[i].push(arrived)
        choices = [
            {
                "index": i,
                "text": (echoes[i] if request.echo else "") + texts[i],
                "logprobs": text_logprobs(scored[i].shown(job)) if wanted.logprobs is not None else None,
                "finish_reason": FINISH[job.finish_reason],
            }
            for i, job in enumerate(jobs)
        ]
        return {**head, "choices": choices, "usage": usage(jobs, wanted.n), "timings": timings(jobs[0])}


async def stream(server: Server, request: CompletionRequest) -> AsyncGenerator[bytes, None]:
    head, task = begin(server, request)
    wanted = task.parameters
    if request.include_usage:
        head["usage"] = None

    def chunk(index: int, text: str, logs: Any = None, reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logs, "finish_reason": reason}
        return event({**head, "choices": [choice], **more})

    async with generating(server, lambda llama: prepare(task, llama), task.count, task.quick) as (jobs, echoes):
        yield b"".join(chunk(i, echo) for i, echo in enumerate(echoes)) if request.echo else KEEP_ALIVE
        scored = [ScoredTokens(server.llama) for _ in jobs]
        async for update in jobs.updates(server.options.keep_alive_s):
            if not update:
                yield KEEP_ALIVE
            for i, arrived in update:
                text = "".join(token.text for token in arrived)
                scored[i].push(arrived)
                tokens = scored[i].shown(jobs[i])
                logs = text_logprobs(tokens) if tokens else None
                out = [chunk(i, text, logs)] if text or logs else []
                if jobs[i].ended:
                    out.append(chunk(i, "", reason=FINISH[jobs[i].finish_reason], timings=timings(jobs[i])))
                if out:
                    yield b"".join(out)
        if request.include_usage:
            yield event({**head, "choices": [], "usage": usage(jobs, wanted.n)})
        yield DONE


def begin(server: Server, request: CompletionRequest) -> tuple[dict[str, Any], "Task"]:
    """What stands in every answer, and what is to be done."""
    model, llama = server.check_model(request.model), server.llama
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model}
    top = request.logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise invalid(f"logprobs is {top}: give 0 to {MAX_LOGPROBS}", "logprobs")
    if request.suffix:
        raise invalid("suffix is not supported: leave it out", "suffix")
    if request.echo and top is not None:
        raise invalid("echo with logprobs is not supported: leave one of them out", "echo")
    wanted = parameters(request, llama.sampling, llama.config.vocab, request.max_tokens, top)
    if request.best_of not in (None, 1, wanted.n):
        raise invalid("best_of is not supported: leave it out, or give it the value of n", "best_of")
    return head, Task(prompts_of(request.prompt, llama), wanted, format_of(request))


@dataclass(frozen=True, slots=True)
class Task:
    prompts: list[str | list[int]]
    parameters: Parameters
    format: Format | None  # that the texts have to match

    @property
    def count(self) -> int:
        return len(self.prompts) * self.parameters.n

    @property
    def quick(self) -> bool:
        return len(self.prompts) == 1 and len(self.prompts[0]) <= QUICK_CHARS and self.format is None


def prompts_of(prompt: str | list[str | int | list[int]], llama: Llama, param: str = "prompt") -> list[str | list[int]]:
    """One text, one list of ids, or several of either."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(item, int) for item in prompt):
        prompt = [[item for item in prompt if isinstance(item, int)]]
    found = [item for item in prompt if not isinstance(item, int)]
    if not found or len(found) != len(prompt):
        raise invalid(f"{param}: give a text, token ids, or a list of either", param)
    if len(found) > MAX_PROMPTS:
        raise invalid(f"{param}: give at most {MAX_PROMPTS} of them", param)
    for item in found:
        if not isinstance(item, str) and not all(0 <= id < llama.config.vocab for id in item):
            raise invalid(f"{param} has token ids outside 0..{llama.config.vocab - 1}", param)
    return found


def prepare(task: Task, llama: Llama) -> tuple[list[Generation], list[str]]:
    """The generations of all prompts, and each one's prompt as text."""
    wanted, form, runs, echoes = task.parameters, task.format, list[Generation](), list[str]()
    grammar, grammar_param = (form.grammar(), form.param) if form else (None, None)
    for prompt in task.prompts:
        if isinstance(prompt, str):
            check_length(prompt, llama, "prompt")
        ids = llama.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        runs += generations(llama, ids, wanted, grammar, grammar_param=grammar_param, param="prompt")
        echoes += [prompt if isinstance(prompt, str) else llama.tokenizer.decode(ids)] * wanted.n
    return runs, echoes


def text_logprobs(tokens: list[PlacedToken]) -> dict[str, Any]:
    logs = [token.logprob for token in tokens]
    return {
        "tokens": [log.text for log in logs],
        "token_logprobs": [logprob_number(log) for log in logs],
        "top_logprobs": [{top.text: logprob_number(top) for top in log.top} for log in logs],
        "text_offset": [token.begin for token in tokens],
    }
