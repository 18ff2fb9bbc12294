"""How models write tool calls: the style that a chat template asks for, and the grammar of calls."""

import json
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamagpu.engine.grammar import JSON_OPTIONS
from llamagpu.files.tokenizer import Tokenizer

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
    id_letters: int = 24
    mark: str = ""  # what templates that ask for it also have


HERMES = ToolStyle(  # Qwen, Hermes, SmolLM
    "<tool_call>", "</tool_call>", forced="<tool_call>\n", closing="\n</tool_call>"
)
LLAMA3 = ToolStyle(
    "<|python_tag|>", arguments="parameters", bare=True, special=True, mark='"parameters": dictionary of argument name'
)
MISTRAL = ToolStyle("[TOOL_CALLS]", special=True, forced="[TOOL_CALLS][", closing="]", id_letters=9)
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
        for style in (MISTRAL, LLAMA3, HERMES):
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
    id, *more = tokenizer.encode(style.begin, bos=False)
    control = tokenizer.is_control(id) and not more
    begin = f"<[{id}]>" if control else json.dumps(style.begin)  # a control token does not match its text
    opening = json.dumps(style.forced.removeprefix(style.begin))
    rules = {
        "start": 'call ("\\n" call)* | answer' if parallel else "call | answer",
        "call": f"{f'({begin})?' if style.bare else begin} {opening} call_object {json.dumps(style.closing)}",
        "call_object": f"%json {json.dumps({**call, 'x-guidance': JSON_OPTIONS})}",
        "answer": f"%json {json.dumps({**answer, 'x-guidance': JSON_OPTIONS})}",
    }
    return "\n".join(f"{name}: {rule}" for name, rule in rules.items())


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
