"""How models write tool calls: the style that a chat template asks for, and the grammar of a call that must come."""

import json
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": ...}}


@dataclass(frozen=True, slots=True)
class ToolStyle:
    begin: str  # what stands before a call, or before all of them
    end: str = ""  # what stands after each call
    arguments: str = "arguments"  # the key beside "name"
    bare: bool = False  # whether an answer that begins with a call has nothing in front of it
    special: bool = False  # whether `begin` is a control token
    forced: str = ""  # the beginning of an answer that must be a call: the JSON object of one follows
    id_letters: int = 24
    mark: str = ""  # what templates that ask for it also have


HERMES = ToolStyle("<tool_call>", "</tool_call>", forced="<tool_call>\n")  # Qwen, Hermes, SmolLM
LLAMA3 = ToolStyle(
    "<|python_tag|>", arguments="parameters", bare=True, special=True, mark='"parameters": dictionary of argument name'
)
MISTRAL = ToolStyle("[TOOL_CALLS]", special=True, forced="[TOOL_CALLS][", id_letters=9)
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
