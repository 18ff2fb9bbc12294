"""What a text has to match: `response_format` of OpenAI's API, `json_schema` and `grammar` of llama.cpp's server."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from llamagpu.engine.grammar import is_gbnf
from llamagpu.errors import LlamaGpuError
from llamagpu.llama import Grammar
from llamagpu.serve.errors import as_api_error, invalid
from llamagpu.serve.parameters import SamplingFields
from llamagpu.serve.tools import closed


class JsonSchema(msgspec.Struct):
    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None  # llama.cpp's place for it


class FormatFields(SamplingFields, kw_only=True):
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None  # GBNF or Lark


@dataclass(frozen=True, slots=True)
class Format:
    param: str  # the field that asks for it
    source: Mapping[str, Any] | str  # a JSON schema, or the text of a grammar

    def grammar(self) -> Grammar:
        """Refused with the name of the field if it cannot be used."""
        try:
            if not isinstance(self.source, str):
                return Grammar.json_schema(self.source)
            return Grammar.gbnf(self.source) if is_gbnf(self.source) else Grammar.lark(self.source)
        except LlamaGpuError as error:
            raise as_api_error(error, self.param) from error


def format_of(fields: FormatFields) -> Format | None:
    given: dict[str, Mapping[str, Any] | str | None] = {
        "response_format": schema_of(fields.response_format),
        "json_schema": fields.json_schema,
        "grammar": fields.grammar or None,
    }
    found = [Format(param, source) for param, source in given.items() if source is not None]
    if len(found) > 1:
        names = " and ".join(one.param for one in found)
        raise invalid(f"{names} are given: give one of them, a text has one grammar", found[-1].param)
    return found[0] if found else None


def schema_of(form: ResponseFormat | None) -> Mapping[str, Any] | None:
    if form is None or form.type == "text":
        return None
    schema = form.json_schema.schema if form.json_schema else form.schema
    if form.type == "json_object":
        return schema or {"type": "object"}
    if schema is None:
        raise invalid("response_format has no schema", "response_format.json_schema.schema")
    return closed(schema) if form.json_schema and form.json_schema.strict else schema
