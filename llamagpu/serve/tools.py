"""How models write tool calls: the style that a chat template asks for, and the grammar of calls."""

import json
import random
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from llamagpu.engine.json_schema import json_rule
from llamagpu.files.tokenizer import FINAL_CHANNEL, Tokenizer

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": ...}}


@dataclass(frozen=True, slots=True)
class ToolStyle:
    begin: str  # what stands before a call, or before all of them
    end: str = ""  # what stands after each call
    arguments: str = "arguments"  # the key beside "name"
    bare: bool = False  # whether an answer that begins with a call has nothing in front of it
    special: bool = False  # whether `begin` is a control token
    forced: str = ""  # the beginning of an answer that must be a call: the JSON object of one follows
    closing: str = ""  # what stands after that object
    answer: str = ""  # the beginning of an answer that must match a format
    id_letters: int = 24
    mark: str = ""  # what templates that ask for it also have


HERMES = ToolStyle(  # Qwen, Hermes, SmolLM
    "<tool_call>", "</tool_call>", forced="<tool_call>\n", closing="\n</tool_call>"
)
LLAMA3 = ToolStyle(
    "<|python_tag|>", arguments="parameters", bare=True, special=True, mark='"parameters": dictionary of argument name'
)
MISTRAL = ToolStyle("[TOOL_CALLS]", special=True, forced="[TOOL_CALLS][", closing="]", id_letters=9)
CALL_HEADER = "<|channel|>commentary to=functions."
# gpt-oss, in OpenAI's harmony format: a message's header has the name, its text is the JSON object of the arguments.
HARMONY = ToolStyle(
    CALL_HEADER,
    forced=CALL_HEADER,
    answer=FINAL_CHANNEL,
    mark="<|start|>functions.",
)
HEADER_END = " <|constrain|>json<|message|>"  # after the name
GENERIC_PROMPT = """You can call functions. Each line describes one:
{tools}

To call a function, answer with its name and its arguments as JSON, one block a call:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


OTHER_STYLES = ("<function=", "<arg_key>")  # calls that are not JSON


def style_of(template: str) -> tuple[ToolStyle, bool]:
    """The style of a model with this template, and whether the template is to tell the model about tools.

    Where it would ask for a style that is not known here, GENERIC_PROMPT asks for one that is.
    """
    if "tools" in template and not any(mark in template for mark in OTHER_STYLES):
        for style in (MISTRAL, LLAMA3, HERMES, HARMONY):
            if style.begin in template or (style.mark and style.mark in template):
                return style, True
    return HERMES, False


def generic_prompt(tools: Sequence[Tool]) -> str:
    return GENERIC_PROMPT.format(tools="\n".join(json.dumps(tool["function"]) for tool in tools))


def with_generic_prompt(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The messages for a template that knows no tools: they are described in the system message, and calls and
    results are messages of assistant and user."""
    rest = [plain(message) for message in messages]
    if not tools:
        return rest
    text = generic_prompt(tools)
    if rest and rest[0]["role"] == "system":
        text = f"{rest.pop(0)['content']}\n\n{text}"
    return [{"role": "system", "content": text}, *rest]


def harmony_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for the template of gpt-oss: each has one call at most, whose result comes next, and what was
    reasoned or said before a call is `thinking`."""
    found: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []  # of the latest calls, without those that are in `found`
    for i, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        if calls:
            results = list(takewhile(lambda m: m["role"] == "tool", messages[i + 1 :]))
        elif message["role"] != "tool" or not any(message is placed for placed in found):
            found.append(message)
        said = "\n\n".join(filter(None, (message.get("reasoning_content"), message["content"])))
        for call in calls:
            thinking = {"thinking": said} if said and call is calls[0] else {}
            found.append({"role": "assistant", "content": "", "tool_calls": [call], **thinking})
            own = [result for result in results if result.get("tool_call_id") == call["id"]]
            unnamed = [result for result in results if not result.get("tool_call_id")]
            if result := next(iter(own + unnamed), None):
                found.append(result)
                results = [other for other in results if other is not result]
    return found


def described(tool: Tool) -> Tool:
    """As gpt-oss' template needs it: with a description, and defaults that are text where it does not convert them."""
    function = {"description": "", **tool["function"]}
    schema = function.get("parameters")
    if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
        properties = {name: with_text_default(value) for name, value in schema["properties"].items()}
        function["parameters"] = {**schema, "properties": properties}
    return {**tool, "function": function}


def with_text_default(schema: Any) -> Any:
    if not isinstance(schema, dict) or not schema.keys() & {"enum", "oneOf"} or "default" not in schema:
        return schema
    default = schema["default"]
    return {**schema, "default": default if isinstance(default, str) else json.dumps(default)}


def plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = "\n".join(
        f"<tool_call>\n{json.dumps({key: call['function'][key] for key in ('name', 'arguments')})}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    )
    return {"role": message["role"], "content": "\n".join(filter(None, (message["content"], calls)))}


def tool_of(function: Mapping[str, Any]) -> Tool:
    """A tool as templates take it. With `strict`, the arguments have no keys but those that are named."""
    found = {key: value for key, value in function.items() if key != "strict" and value is not None}
    if function.get("strict"):
        found["parameters"] = closed(found.get("parameters", {"type": "object"}))
    return {"type": "function", "function": found}


def closed(schema: Any) -> Any:
    """A schema whose objects have no keys but those that it names, unless it says otherwise: `strict` asks for it."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in found.keys() & {"properties", "$defs", "definitions"}:
        if isinstance(found[key], dict):
            found[key] = {name: closed(value) for name, value in found[key].items()}
    for key in found.keys() & {"anyOf", "oneOf", "prefixItems"}:
        if isinstance(found[key], list):
            found[key] = [closed(value) for value in found[key]]
    for key in found.keys() & {"items", "additionalProperties"}:
        found[key] = closed(found[key])
    kinds = found.get("type")
    if "properties" in found or kinds == "object" or (isinstance(kinds, list) and "object" in kinds):
        found.setdefault("additionalProperties", False)
    return found


def call_schema(tools: Sequence[Tool], style: ToolStyle) -> dict[str, Any]:
    """The JSON schema of a call of one of the tools."""
    choices, definitions = [], {}
    for i, tool in enumerate(tools):
        function = tool["function"]
        definitions[f"tool{i}"] = moved(function.get("parameters") or {"type": "object"}, f"#/$defs/tool{i}")
        choices.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    style.arguments: {"$ref": f"#/$defs/tool{i}"},
                },
                "required": ["name", style.arguments],
                "additionalProperties": False,
            }
        )
    return {"anyOf": choices, "$defs": definitions}


def call_or_answer(
    call: Mapping[str, Any], answer: Mapping[str, Any], style: ToolStyle, tokenizer: Tokenizer, parallel: bool = True
) -> str:
    """A Lark grammar: a call of one schema, or several if `parallel`, or an answer of another schema."""
    begin = lark(style.begin, tokenizer)
    opening = json.dumps(style.forced.removeprefix(style.begin))
    rules = {
        "start": 'call ("\\n" call)* | answer' if parallel else "call | answer",
        "call": f"{f'({begin})?' if style.bare else begin} {opening} call_object {json.dumps(style.closing)}",
        "call_object": json_rule(call),
        "answer": json_rule(answer),
    }
    return "\n".join(f"{name}: {rule}" for name, rule in rules.items())


def harmony_calls(tools: Sequence[Tool], tokenizer: Tokenizer, answer: Mapping[str, Any] | None = None) -> str:
    """A Lark grammar: the rest of a call after HARMONY.forced; with the schema of an answer, a call or an answer."""
    rules = {}
    for i, function in enumerate(tool["function"] for tool in tools):
        rules[f"call{i}"] = f"{lark(function['name'] + HEADER_END, tokenizer)} arguments{i}"
        rules[f"arguments{i}"] = json_rule({**(function.get("parameters") or {}), "type": "object"})
    start = " | ".join(f"call{i}" for i in range(len(tools)))
    if answer is not None:
        start = f"{lark(HARMONY.begin, tokenizer)} ({start}) | {lark(HARMONY.answer, tokenizer)} answer"
        rules["answer"] = json_rule(answer)
    return "\n".join(f"{name}: {rule}" for name, rule in {"start": start, **rules}.items())


def lark(text: str, tokenizer: Tokenizer) -> str:
    """The text in a Lark grammar. A control token does not match its text."""
    found = []
    for part in filter(None, re.split(r"(<\|\w+\|>)", text)):
        id, *more = tokenizer.encode(part, bos=False)
        found.append(f"<[{id}]>" if tokenizer.is_control(id) and not more else json.dumps(part))
    return " ".join(found)


def moved(schema: Any, root: str) -> Any:
    """A schema whose references to itself hold at another place of a document."""
    if isinstance(schema, list):
        return [moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: moved(value, root) for key, value in schema.items()}
    reference = found.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        found["$ref"] = root + reference[1:]
    return found


def call_id(style: ToolStyle) -> str:
    """Mistral's templates refuse ids that are not of nine letters and digits."""
    letters = "".join(random.choices(string.ascii_letters + string.digits, k=style.id_letters))
    return letters if style is MISTRAL else f"call_{letters}"
