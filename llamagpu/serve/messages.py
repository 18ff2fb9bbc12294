"""POST /v1/messages: Anthropic's API, with its typed events."""

import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from llamagpu.llama import Llama
from llamagpu.serve.answer import Delta
from llamagpu.serve.body import decode
from llamagpu.serve.chat import AUTO, NONE, REQUIRED, ChatTask, arguments_object, prepare
from llamagpu.serve.engine_thread import Job
from llamagpu.serve.errors import invalid
from llamagpu.serve.formats import Format
from llamagpu.serve.generating import generating
from llamagpu.serve.http import Call, EventStream, event, json_response
from llamagpu.serve.parameters import SamplingFields, parameters
from llamagpu.serve.state import Server
from llamagpu.serve.tools import Tool, tool_of


class Block(msgspec.Struct):
    """A part of a message's content. Which fields it has depends on its type."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: "str | list[Block] | None" = None


class AnthropicMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""


class Thinking(msgspec.Struct):
    type: str


class OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    format: OutputFormat | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    messages: list[AnthropicMessage]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # where it stood before


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


async def handle(server: Server, call: Call) -> Response | EventStream:
    request = decode(call.body, MessagesRequest)
    if request.stream:
        return EventStream(stream(server, request))
    return json_response(await complete(server, request))


async def complete(server: Server, request: MessagesRequest) -> dict[str, Any]:
    model, task = server.check_model(request.model), task_of(request, server.llama)
    async with generating(server, lambda llama: prepare(task, llama), 1) as (jobs, new_answer):
        answer, blocks = new_answer(), Blocks()
        async for update in jobs.updates():
            for _, arrived in update:
                list(blocks.add(answer.push("".join(token.text for token in arrived))))
        list(blocks.add(answer.end()))
        list(blocks.close())
        return message_object(model, blocks.found, jobs[0], answer.calls)


async def stream(server: Server, request: MessagesRequest) -> AsyncGenerator[bytes, None]:
    model, task = server.check_model(request.model), task_of(request, server.llama)
    async with generating(server, lambda llama: prepare(task, llama), 1) as (jobs, new_answer):
        answer, blocks, job = new_answer(), Blocks(), jobs[0]
        yield typed({"type": "message_start", "message": message_object(model, [], job, 0)})
        async for update in jobs.updates(server.options.keep_alive_s):
            if not update:
                yield typed({"type": "ping"})
            for _, arrived in update:
                deltas = answer.push("".join(token.text for token in arrived))
                if job.ended:
                    deltas += answer.end()
                if out := b"".join(map(typed, blocks.add(deltas))):
                    yield out
        end = message_object(model, [], job, answer.calls)
        delta = {"stop_reason": end["stop_reason"], "stop_sequence": end["stop_sequence"]}
        last = {"type": "message_delta", "delta": delta, "usage": end["usage"]}
        yield b"".join(map(typed, [*blocks.close(), last, {"type": "message_stop"}]))


def typed(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])


class Blocks:
    """The blocks of an answer, and the events that tell of them."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self._json = ""  # the input of a tool_use block, as far as it has come

    def add(self, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        for delta in deltas:
            if delta.kind == "call":
                yield from self._open({"type": "tool_use", "id": delta.id, "name": delta.text, "input": {}})
                self._json = ""
            elif delta.kind == "arguments":
                self._json += delta.text
                yield self._delta({"type": "input_json_delta", "partial_json": delta.text})
            else:
                kind = "text" if delta.kind == "content" else "thinking"
                if not self.found or self.found[-1]["type"] != kind:
                    yield from self._open({"type": kind, kind: "", **({} if kind == "text" else {"signature": ""})})
                self.found[-1][kind] += delta.text
                yield self._delta({"type": f"{kind}_delta", kind: delta.text})

    def close(self) -> Iterator[dict[str, Any]]:
        """The end of the block that is open."""
        if self.found:
            if self.found[-1]["type"] == "tool_use":
                given = arguments_object(self._json)
                self.found[-1]["input"] = given if isinstance(given, dict) else {}
            yield {"type": "content_block_stop", "index": len(self.found) - 1}

    def _open(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        yield {"type": "content_block_start", "index": len(self.found), "content_block": dict(block)}
        self.found.append(block)

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.found) - 1, "delta": delta}


def message_object(model: str, content: list[dict[str, Any]], job: Job, calls: int) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop_reason(job, calls),
        "stop_sequence": job.stopped_by or None,
        "usage": {
            "input_tokens": job.prompt_tokens - job.usage.cached_tokens,
            "cache_read_input_tokens": job.usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": job.usage.completion_tokens,
        },
    }


def stop_reason(job: Job, calls: int) -> str | None:
    if not job.finish_reason:
        return None
    if job.finish_reason != "stop":
        return "max_tokens"
    return "stop_sequence" if job.stopped_by else "tool_use" if calls else "end_turn"


def task_of(request: CountRequest, llama: Llama) -> ChatTask:
    max_tokens, fields = 1, SamplingFields()
    if isinstance(request, MessagesRequest):
        max_tokens = request.max_tokens
        fields = SamplingFields(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop=request.stop_sequences,
        )
    if max_tokens < 1:
        raise invalid(f"max_tokens is {max_tokens}: give a whole number from 1 up", "max_tokens")
    messages = [found for i, message in enumerate(request.messages) for found in template_messages(message, i)]
    if request.system:
        messages.insert(0, {"role": "system", "content": text_of(request.system, "system")})
    return ChatTask(
        messages=messages,
        parameters=parameters(fields, llama.sampling, llama.config.vocab, max_tokens),
        tools=[tool_object(tool) for tool in request.tools or ()],
        tool_choice=tool_choice(request.tool_choice),
        format=format_of(request),
        variables={"enable_thinking": request.thinking is not None and request.thinking.type != "disabled"},
    )


def format_of(request: CountRequest) -> Format | None:
    form, older = request.output_config and request.output_config.format, request.output_format
    if form and older:
        raise invalid("output_config.format and output_format are given: give one of them", "output_format")
    if form:
        return Format("output_config.format.schema", form.schema)
    return Format("output_format.schema", older.schema) if older else None


def template_messages(message: AnthropicMessage, number: int) -> Iterator[dict[str, Any]]:
    """A message as chat templates take it: results of tools are messages of their own, before the rest."""
    where = f"messages[{number}].content"
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    for block in message.content:
        if block.type == "tool_result":
            content = text_of(block.content or "", where)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in message.content
        if block.type == "tool_use"
    ]
    rest = [block for block in message.content if block.type not in ("tool_result", "tool_use", "redacted_thinking")]
    thinking = "".join(block.thinking for block in rest if block.type == "thinking")
    text = text_of([block for block in rest if block.type != "thinking"], where)
    if rest or calls:
        found: dict[str, Any] = {"role": message.role, "content": text}
        found |= {"tool_calls": calls} if calls else {}
        yield found | ({"reasoning_content": thinking} if thinking else {})


def text_of(content: str | Sequence[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        if block.type != "text":
            raise invalid(f"{where}[{i}]: {block.type[:40]!r} is not supported, only text", f"{where}[{i}].type")
    return "\n".join(block.text for block in content)


def tool_object(tool: AnthropicTool) -> Tool:
    if tool.type not in (None, "custom"):
        raise invalid(f"tools: {tool.type[:40]!r} is not supported, only custom tools", "tools")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return tool_of({**function, "strict": tool.strict})


def tool_choice(choice: ToolChoice | None) -> str:
    if choice is None:
        return AUTO
    return {"auto": AUTO, "any": REQUIRED, "tool": f"={choice.name}", "none": NONE}[choice.type]
