"""POST /v1/chat/completions: OpenAI's chat API."""

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from llamagpu.llama import Llama
from llamagpu.serve.answer import Delta
from llamagpu.serve.body import decode
from llamagpu.serve.chat import AUTO, NONE, REQUIRED, ChatTask, Message, arguments_object, prepare
from llamagpu.serve.errors import invalid
from llamagpu.serve.formats import FormatFields, format_of
from llamagpu.serve.generating import FINISH, generating, timings, usage
from llamagpu.serve.http import DONE, KEEP_ALIVE, Call, EventStream, event, json_response
from llamagpu.serve.logprobs import ScoredTokens, logprob_objects
from llamagpu.serve.parameters import parameters
from llamagpu.serve.state import Server
from llamagpu.serve.tools import tool_of

MAX_TOP_LOGPROBS = 20


class Part(msgspec.Struct):
    type: str
    text: str | None = None


class Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct):
    function: Function
    id: str = ""


class ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionTool(msgspec.Struct, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(msgspec.Struct):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    function: NamedFunction


class ChatRequest(FormatFields, kw_only=True):
    messages: list[ChatMessage]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolField] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None
    functions: list[Any] | None = None  # before there were tools


async def handle(server: Server, call: Call) -> Response | EventStream:
    request = decode(call.body, ChatRequest)
    if request.stream:
        return EventStream(stream(server, request))
    return json_response(await complete(server, request))


async def complete(server: Server, request: ChatRequest) -> dict[str, Any]:
    head = heading(server, request, "chat.completion")
    task = task_of(request, server.llama)
    wanted = task.parameters.logprobs
    async with generating(server, lambda llama: prepare(task, llama), task.parameters.n) as (jobs, new_answer):
        answers = [new_answer() for _ in jobs]
        messages = [Message() for _ in jobs]
        scored = [ScoredTokens(server.llama, answer.special) for answer in answers]
        async for update in jobs.updates():
            for i, arrived in update:
                messages[i].add(answers[i].push("".join(token.text for token in arrived)))
                scored[i].push(arrived)
        for message, answer in zip(messages, answers, strict=True):
            message.add(answer.end())
        choices = [
            {
                "index": i,
                "message": messages[i].openai(),
                "logprobs": None
                if wanted is None
                else {"content": logprob_objects(scored[i].shown(job), server.llama)},
                "finish_reason": finish_reason(job.finish_reason, answers[i].calls),
            }
            for i, job in enumerate(jobs)
        ]
        return {**head, "choices": choices, "usage": usage(jobs, len(jobs)), "timings": timings(jobs[0])}


async def stream(server: Server, request: ChatRequest) -> AsyncGenerator[bytes, None]:
    head = heading(server, request, "chat.completion.chunk")
    if request.include_usage:
        head["usage"] = None
    task = task_of(request, server.llama)

    def chunk(index: int, delta: Mapping[str, Any], logs: Any = None, reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logs, "finish_reason": reason}
        return event({**head, "choices": [choice], **more})

    async with generating(server, lambda llama: prepare(task, llama), task.parameters.n) as (jobs, new_answer):
        answers = [new_answer() for _ in jobs]
        scored = [ScoredTokens(server.llama, answer.special) for answer in answers]
        yield b"".join(chunk(i, {"role": "assistant", "content": ""}) for i in range(len(jobs)))
        async for update in jobs.updates(server.options.keep_alive_s):
            if not update:
                yield KEEP_ALIVE
            for i, arrived in update:
                deltas = answers[i].push("".join(token.text for token in arrived))
                ended = jobs[i].ended
                if ended:
                    deltas += answers[i].end()
                shown = [delta_object(delta) for delta in joined(deltas)]
                scored[i].push(arrived)
                tokens = scored[i].shown(jobs[i])
                logs = {"content": logprob_objects(tokens, server.llama)} if tokens else None
                if logs and not shown:
                    shown = [{"content": ""}]  # of tokens whose text is held back
                out = [chunk(i, delta, logs if n == 0 else None) for n, delta in enumerate(shown)]
                if ended:
                    reason = finish_reason(jobs[i].finish_reason, answers[i].calls)
                    out.append(chunk(i, {}, reason=reason, timings=timings(jobs[i])))
                if out:
                    yield b"".join(out)
        if request.include_usage:
            yield event({**head, "choices": [], "usage": usage(jobs, len(jobs))})
        yield DONE


def heading(server: Server, request: ChatRequest, kind: str) -> dict[str, Any]:
    model = server.check_model(request.model)
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def task_of(request: ChatRequest, llama: Llama) -> ChatTask:
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    if request.functions:
        raise invalid("functions is not supported: give tools", "functions")
    if set(request.modalities or ()) - {"text"}:
        raise invalid("modalities: only text is supported", "modalities")
    top = top_logprobs(request.top_logprobs)
    return ChatTask(
        messages=[template_message(message, i) for i, message in enumerate(request.messages)],
        parameters=parameters(
            request, llama.sampling, llama.config.vocab, max_tokens, top if request.logprobs else None
        ),
        tools=[tool_of(msgspec.to_builtins(tool.function)) for tool in request.tools or ()],
        tool_choice=tool_choice(request.tool_choice),
        parallel_calls=request.parallel_tool_calls is not False,
        format=format_of(request),
        variables=variables(request.chat_template_kwargs, request.reasoning_effort),
    )


def top_logprobs(top: int | None) -> int:
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise invalid(f"top_logprobs is {top}: give 0 to {MAX_TOP_LOGPROBS}", "top_logprobs")
    return top or 0


def template_message(message: ChatMessage, number: int) -> dict[str, Any]:
    """A message as chat templates take it."""
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    found: dict[str, Any] = {"role": role, "content": text_of(message.content, f"messages[{number}].content")}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call_arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    return found


def call_arguments(arguments: str | dict[str, Any]) -> Any:
    return arguments_object(arguments) if isinstance(arguments, str) else arguments


def text_of(content: str | list[Part] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise invalid(f"{where}[{i}]: {part.type[:40]!r} is not supported, only text", f"{where}[{i}].type")
    return "\n".join(part.text or "" for part in content)


def tool_choice(choice: str | NamedTool | None) -> str:
    if isinstance(choice, NamedTool):
        return f"={choice.function.name}"
    if choice not in (None, AUTO, NONE, REQUIRED):
        raise invalid(f"tool_choice is {choice[:40]!r}: give auto, none, required or a function", "tool_choice")
    return choice or AUTO


def variables(given: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Variables of the template that a request may set: not those that the server sets."""
    found = dict(given or {})
    for name in found.keys() & {"messages", "tools", "bos_token", "eos_token", "add_generation_prompt", "template"}:
        raise invalid(f"chat_template_kwargs must not have {name}", "chat_template_kwargs")
    if effort is not None:
        found.setdefault("reasoning_effort", effort)
        found.setdefault("enable_thinking", effort != "none")
    return found


def finish_reason(reason: str, calls: int) -> str:
    found = FINISH[reason]
    return "tool_calls" if calls and found == "stop" else found


def joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind as one."""
    found: list[Delta] = []
    for delta in deltas:
        if found and found[-1].kind == delta.kind != "call":
            found[-1] = found[-1]._replace(text=found[-1].text + delta.text, end=delta.end)
        else:
            found.append(delta)
    return found


def delta_object(delta: Delta) -> dict[str, Any]:
    if delta.kind == "content":
        return {"content": delta.text}
    if delta.kind == "reasoning":
        return {"reasoning_content": delta.text}
    if delta.kind == "call":
        function = {"name": delta.text, "arguments": ""}
        return {"tool_calls": [{"index": delta.number, "id": delta.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": delta.number, "function": {"arguments": delta.text}}]}
