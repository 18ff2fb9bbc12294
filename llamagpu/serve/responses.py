"""POST /v1/responses: OpenAI's newer API, with its typed events. Nothing is stored."""

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from llamagpu.llama import Llama
from llamagpu.serve.answer import Delta
from llamagpu.serve.body import decode
from llamagpu.serve.chat import AUTO, NONE, REQUIRED, ChatTask, arguments_object, prepare
from llamagpu.serve.chat_completions import Part, text_of, top_logprobs
from llamagpu.serve.chat_completions import variables as template_variables
from llamagpu.serve.engine_thread import Job
from llamagpu.serve.errors import ApiError, invalid
from llamagpu.serve.formats import Format
from llamagpu.serve.generating import generating
from llamagpu.serve.http import KEEP_ALIVE, Call, EventStream, event, json_response, reported
from llamagpu.serve.logprobs import ScoredTokens, logprob_objects
from llamagpu.serve.parameters import SamplingFields, parameters
from llamagpu.serve.state import Server
from llamagpu.serve.tools import Tool, closed, tool_of

LOGPROBS = "message.output_text.logprobs"  # in `include`
ROLES = {"developer": "system"}


class Item(msgspec.Struct):
    """An item of the input. Which fields it has depends on its type."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[Part] = ""


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None


class ResponseTool(msgspec.Struct, omit_defaults=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(msgspec.Struct):
    type: str
    name: str = ""


class Reasoning(msgspec.Struct):
    effort: str | None = None


class ResponseRequest(msgspec.Struct, kw_only=True):
    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None


async def handle(server: Server, call: Call) -> Response | EventStream:
    request = decode(call.body, ResponseRequest)
    if request.stream:
        return EventStream(stream(server, request))
    return json_response(await complete(server, request))


async def complete(server: Server, request: ResponseRequest) -> dict[str, Any]:
    head, task = heading(server, request), task_of(request, server.llama)
    async with generating(server, lambda llama: prepare(task, llama), 1) as (jobs, new_answer):
        answer = new_answer()
        items = Items(server.llama, answer.special)
        async for update in jobs.updates():
            for _, arrived in update:
                items.scored.push(arrived)
                list(items.add(answer.push("".join(token.text for token in arrived))))
        list(items.add(answer.end()))
        end = ending(jobs[0])
        list(items.close(end["status"]))
        return {**head, **end, "output": items.found}


async def stream(server: Server, request: ResponseRequest) -> AsyncGenerator[bytes, None]:
    head, task = heading(server, request), task_of(request, server.llama)
    number = -1

    def typed(value: Mapping[str, Any]) -> bytes:
        nonlocal number
        number += 1
        return event({**value, "sequence_number": number}, value["type"])

    async with generating(server, lambda llama: prepare(task, llama), 1) as (jobs, new_answer):
        answer, job = new_answer(), jobs[0]
        items = Items(server.llama, answer.special)
        yield b"".join(typed({"type": f"response.{name}", "response": head}) for name in ("created", "in_progress"))
        try:
            async for update in jobs.updates(server.options.keep_alive_s):
                if not update:
                    yield KEEP_ALIVE
                for _, arrived in update:
                    items.scored.push(arrived)
                    deltas = answer.push("".join(token.text for token in arrived))
                    if job.ended:
                        deltas += answer.end()
                    if out := b"".join(map(typed, items.add(deltas))):
                        yield out
            end = ending(job)
        except Exception as error:
            end = failure(reported(error))
        closing = b"".join(map(typed, items.close(end["status"])))
        response = {**head, **end, "output": items.found}
        yield closing + typed({"type": f"response.{end['status']}", "response": response})


class Items:
    """The items of an output, and the events that tell of them."""

    def __init__(self, llama: Llama, special: bool) -> None:
        self.found: list[dict[str, Any]] = []
        self.scored, self._llama = ScoredTokens(llama, special), llama

    def add(self, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        for delta in deltas:
            if delta.kind == "call":
                call = {"call_id": delta.id, "name": delta.text, "arguments": ""}
                yield from self._open({"id": new_id("fc"), "type": "function_call", "status": "in_progress", **call})
            elif delta.kind == "arguments":
                self.found[-1]["arguments"] += delta.text
                yield self._event("response.function_call_arguments.delta", delta=delta.text)
            else:
                yield from self._text(delta)

    def _text(self, delta: Delta) -> Iterator[dict[str, Any]]:
        kind = "message" if delta.kind == "content" else "reasoning"
        if not self.found or self.found[-1]["type"] != kind:
            item: dict[str, Any] = {"id": new_id("msg"), "type": kind, "status": "in_progress"}
            item["role" if kind == "message" else "summary"] = "assistant" if kind == "message" else []
            yield from self._open({**item, "content": []})
            self.found[-1]["content"].append(part_of(kind))
            yield self._event("response.content_part.added", content_index=0, part=part_of(kind))
        part = self.found[-1]["content"][0]
        part["text"] += delta.text
        more = {}
        if kind == "message":
            tokens = self.scored.take(delta.end - len(delta.text), delta.end)
            more["logprobs"] = logprob_objects(tokens, self._llama)
            part["logprobs"] += more["logprobs"]
        yield self._event(f"response.{part['type']}.delta", content_index=0, delta=delta.text, **more)

    def close(self, response_status: str = "completed") -> Iterator[dict[str, Any]]:
        """The end of the item that is open."""
        if not self.found:
            return
        item = self.found[-1]
        item["status"] = "completed" if response_status == "completed" else "incomplete"
        if item["type"] == "function_call":
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **named)
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._event(f"response.{part['type']}.done", content_index=0, text=part["text"], **more)
            yield self._event("response.content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.found) - 1, "item": item}

    def _open(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        yield {"type": "response.output_item.added", "output_index": len(self.found), "item": item}
        self.found.append(item)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self.found[-1]["id"], "output_index": len(self.found) - 1, **more}


def part_of(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def heading(server: Server, request: ResponseRequest) -> dict[str, Any]:
    """The response before its output."""
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": server.check_model(request.model),
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}} if request.text is None else msgspec.to_builtins(request.text),
        "tool_choice": msgspec.to_builtins(request.tool_choice or AUTO),
        "tools": msgspec.to_builtins(request.tools or []),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "usage": None,
    }


def ending(job: Job) -> dict[str, Any]:
    complete, used = job.finish_reason == "stop", job.usage
    return {
        "status": "completed" if complete else "incomplete",
        "incomplete_details": None if complete else {"reason": "max_output_tokens"},
        "usage": {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {"cached_tokens": used.cached_tokens},
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used.prompt_tokens + used.completion_tokens,
        },
    }


def failure(error: ApiError) -> dict[str, Any]:
    """The end of a response that has begun: its status was sent. The API has few codes for it."""
    code = "server_error" if error.status >= 500 else "invalid_prompt"
    return {"status": "failed", "error": {"code": code, "message": error.message}}


def task_of(request: ResponseRequest, llama: Llama) -> ChatTask:
    for name in ("previous_response_id", "background"):
        if getattr(request, name):
            raise invalid(f"{name} is not supported: nothing is stored", name)
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise invalid("max_output_tokens: give a whole number from 1 up", "max_output_tokens")
    fields = SamplingFields(temperature=request.temperature, top_p=request.top_p)
    top = top_logprobs(request.top_logprobs)
    scored = bool(top) or LOGPROBS in (request.include or ())
    effort = request.reasoning.effort if request.reasoning else None
    return ChatTask(
        messages=messages_of(request),
        parameters=parameters(
            fields, llama.sampling, llama.config.vocab, request.max_output_tokens, top if scored else None
        ),
        tools=[tool_object(tool) for tool in request.tools or ()],
        tool_choice=tool_choice(request.tool_choice),
        parallel_calls=request.parallel_tool_calls is not False,
        format=format_of(request.text),
        variables=template_variables(None, effort),
    )


def messages_of(request: ResponseRequest) -> list[dict[str, Any]]:
    items = [Item(content=request.input)] if isinstance(request.input, str) else request.input
    found = [{"role": "system", "content": request.instructions}] if request.instructions else []
    return found + [message for i, item in enumerate(items) for message in template_messages(item, f"input[{i}]")]


def template_messages(item: Item, where: str) -> Iterator[dict[str, Any]]:
    if item.type == "message":
        yield {"role": ROLES.get(item.role, item.role), "content": text_of(item.content, f"{where}.content")}
    elif item.type == "function_call":
        function = {"name": item.name, "arguments": arguments_object(item.arguments)}
        call = {"id": item.call_id, "type": "function", "function": function}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
    elif item.type == "function_call_output":
        yield {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output, f"{where}.output")}
    elif item.type != "reasoning":
        raise invalid(f"{where}: {item.type[:40]!r} is not supported", f"{where}.type")


def tool_object(tool: ResponseTool) -> Tool:
    if tool.type != "function" or not tool.name:
        raise invalid(f"tools: {tool.type[:40]!r} is not supported, only functions with a name", "tools")
    function = msgspec.to_builtins(tool)
    del function["type"]
    return tool_of(function)


def tool_choice(choice: str | NamedTool | None) -> str:
    if isinstance(choice, NamedTool):
        return f"={choice.name}"
    if choice not in (None, AUTO, NONE, REQUIRED):
        raise invalid(f"tool_choice is {choice[:40]!r}: give auto, none, required or a function", "tool_choice")
    return choice or AUTO


def format_of(options: TextOptions | None) -> Format | None:
    form = options.format if options else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Format("text.format", {"type": "object"})
    if form.schema is None:
        raise invalid("text.format has no schema", "text.format.schema")
    return Format("text.format.schema", closed(form.schema) if form.strict else form.schema)
