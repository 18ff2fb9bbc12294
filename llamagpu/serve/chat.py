"""What the chat APIs ask for, in one form: messages, tools, a format; and the prompt, grammar and parser of it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamagpu.errors import LlamaGpuError
from llamagpu.llama import Generation, Llama
from llamagpu.serve.answer import THINK_TAGS, Answer, Delta
from llamagpu.serve.errors import ApiError, as_api_error, invalid
from llamagpu.serve.formats import Format
from llamagpu.serve.generating import check_length, generations
from llamagpu.serve.parameters import Parameters
from llamagpu.serve.tools import (
    HARMONY,
    Tool,
    ToolStyle,
    call_or_answer,
    call_schema,
    described,
    harmony_calls,
    harmony_messages,
    style_of,
    with_generic_prompt,
)

AUTO, NONE, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True, slots=True)
class ChatTask:
    messages: list[dict[str, Any]]  # as templates take them: content is text, arguments of calls are objects
    parameters: Parameters
    tools: Sequence[Tool] = ()
    tool_choice: str = AUTO  # or NONE, REQUIRED, or "=" and the name of a function
    parallel_calls: bool = True  # whether an answer beside a schema may be several calls
    format: Format | None = None  # that the answer has to match
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template

    @property
    def offered(self) -> Sequence[Tool]:
        """The tools that may be called."""
        if self.tool_choice == NONE:
            return ()
        if self.tool_choice.startswith("="):
            return [tool for tool in self.tools if tool["function"]["name"] == self.tool_choice[1:]]
        return self.tools

    @property
    def forced(self) -> bool:
        return self.tool_choice not in (AUTO, NONE)


NewAnswer = Callable[[], Answer]


def prepare(task: ChatTask, llama: Llama) -> tuple[list[Generation], NewAnswer]:
    """The generations of a task, and what reads their texts."""
    style, ids, thinking = prompt(task, llama)
    form = format_with_calls(task, style, llama)
    grammar = form.grammar() if form else None
    names = {tool["function"]["name"] for tool in task.offered}

    def new_answer() -> Answer:
        return Answer(style if names else None, names, thinking, task.forced, llama.tokenizer.has_channels)

    special, param = new_answer().special, form.param if form else None
    runs = generations(llama, ids, task.parameters, grammar, special=special, grammar_param=param)
    return runs, new_answer


def prompt(task: ChatTask, llama: Llama) -> tuple[ToolStyle, list[int], str | None]:
    """As `render`, in tokens and with the beginning that the answer must have."""
    check(task)
    style, text, thinking = render(task, llama)
    check_length(text, llama, "messages")
    if thinking and (task.forced or task.format):  # the grammar is of the answer, not of the reasoning
        text, thinking = f"{text.rstrip()}\n\n{thinking}\n\n", None
    if task.forced:
        text += style.forced
    elif task.format and not task.offered:
        text += style.answer
    return style, llama.encode_rendered(text), thinking


def check(task: ChatTask) -> None:
    if not task.messages:
        raise invalid("messages is empty", "messages")
    if task.forced and not task.offered:
        missing = f"there is no tool {task.tool_choice[1:]!r}" if task.tool_choice.startswith("=") else "there is none"
        raise invalid(f"tool_choice wants a tool, and {missing}", "tool_choice")


def render(task: ChatTask, llama: Llama) -> tuple[ToolStyle, str, str | None]:
    """The style of calls, the prompt's text, and the end tag of reasoning if the prompt begins it."""
    template = llama.tokenizer.chat_template
    if template is None:
        raise ApiError(400, "the model has no chat template: use /v1/completions", param="messages")
    style, knows_tools = style_of(template)
    messages, variables = task.messages, dict(task.variables)
    if style is HARMONY:
        messages = harmony_messages(messages)
    if task.offered and knows_tools:
        variables["tools"] = [described(tool) if style is HARMONY else tool for tool in task.offered]
    elif task.offered or (not knows_tools and any(m["role"] == "tool" or m.get("tool_calls") for m in messages)):
        messages = with_generic_prompt(messages, task.offered)
    try:
        text = llama.render_chat(messages, **variables)
    except LlamaGpuError as error:
        raise as_api_error(error, "messages") from error
    thinking = next((end for begin, end in THINK_TAGS if text.rstrip().endswith(begin)), None)
    return style, text, thinking


def format_with_calls(task: ChatTask, style: ToolStyle, llama: Llama) -> Format | None:
    """Of the call that must come, or of the answer; where tools are offered beside a schema, of either."""
    answer = task.format
    if not task.offered:
        return answer
    schema, tokenizer = call_schema(task.offered, style), llama.tokenizer
    calls = Format("tools", schema)
    if answer is None:
        if not task.forced:
            return None
    elif isinstance(answer.source, str):
        raise invalid(f"{answer.param} beside tools is not supported: leave one of them out", answer.param)
    elif not task.forced:
        for form in (calls, answer):
            form.grammar()  # a schema that cannot be used is refused with the name of its field
        if style is HARMONY:
            return Format(answer.param, harmony_calls(task.offered, tokenizer, answer.source))
        return Format(answer.param, call_or_answer(schema, answer.source, style, tokenizer, task.parallel_calls))
    if style is HARMONY:
        calls.grammar()
        return Format("tools", harmony_calls(task.offered, tokenizer))
    return calls


@dataclass(slots=True)
class Message:
    """A whole answer, put together of its deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)  # OpenAI's form

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.kind == "content":
                self.content += delta.text
            elif delta.kind == "reasoning":
                self.reasoning += delta.text
            elif delta.kind == "call":
                function = {"name": delta.text, "arguments": ""}
                self.calls.append({"id": delta.id, "type": "function", "function": function})
            else:
                self.calls[delta.number]["function"]["arguments"] += delta.text

    def openai(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message |= {"content": self.content or None, "tool_calls": self.calls}
        return message


def arguments_object(text: str) -> Any:
    """The arguments of an earlier call as templates take them; text that is no JSON stays text."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
