"""What llguidance does not enforce of JSON schemas: it is mended where that is possible, else refused."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any
from urllib.parse import unquote

from llamagpu.errors import BadArgument

JSON_OPTIONS = {
    # Between JSON tokens: without a bound small models write blanks for ever. The same as in llama.cpp.
    "whitespace_pattern": r" |\n[ \t]{0,20}",
    # Not \u: llguidance takes the key "\u0061" for another one than "a", so that any value could follow it.
    "json_allowed_escapes": 'bfnrt"\\',
}
REMEDY = "correct or simplify it"
# Control characters that JSON writes as \u. No text has them, and llguidance leaves them out of what a string must be.
CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
CONTROL_IN_PATTERN = re.compile(
    CONTROL.pattern
    + r"|\\(?:(?:x|u00|U000000)(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])|[xuU]\{0*(?:[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])\}|[av])"
)
ESCAPED_BACKSLASH, CLASS = re.compile(r"\\\\"), re.compile(r"\[((?:\\.|[^\]\\])*)\]")
# Keywords of JSON schema whose value has schemas by name, or is no schema.
NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
VALUES = ("const", "enum", "default", "examples", "required", "title", "description", "$comment")
EXACT = 1 << 53  # whole numbers up to here are exact as floats, which llguidance makes of bounds
INT64_MAX = (1 << 63) - 1  # and to this it limits integers
BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}


def json_rule(schema: Mapping[str, Any]) -> str:
    """What stands for a value of this schema in a Lark grammar."""
    return "%json " + enforceable(json.dumps({**schema, "x-guidance": JSON_OPTIONS}))


def enforceable(schema: str) -> str:
    """The schema as llguidance enforces it; BadArgument where it does not."""
    own = json.loads(schema)
    schemas = list(_schemas(own))
    for each in schemas:
        _check_counts(each)
        _check_controls(each)
        _check_bounds(each)
    _narrow(schemas)
    return json.dumps(own)


def _schemas(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and all in it, wherever a $ref leads."""
    found: list[Any] = [root]
    seen: set[int] = set()
    for value in found:
        if isinstance(value, list):
            found += value
        if not isinstance(value, dict) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        for key, inner in value.items():
            if key in NAMED and isinstance(inner, dict):
                found += inner.values()
            elif key == "$ref":
                found.append(_referred(root, inner))
            elif key not in VALUES:
                found.append(inner)


def _referred(root: Any, reference: object) -> Any:
    """What a JSON pointer leads to; llguidance refuses one that leads nowhere."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for name in unquote(reference).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal():
            root = dict(enumerate(root)).get(int(name))
        else:
            root = root.get(name) if isinstance(root, dict) else None
    return root


def _check_counts(schema: dict[str, Any]) -> None:
    """Refuse `minProperties` that keys without a name must reach: llguidance counts a key twice that comes twice."""
    least, required = schema.get("minProperties"), schema.get("required")
    named = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > named + 1:
        cause = f"the JSON schema cannot be used: minProperties is {least}, and {named} keys are required"
        raise BadArgument(cause, "name the keys in `required`")


def _check_controls(schema: dict[str, Any]) -> None:
    """Refuse values and patterns that may need a control character, which would be left out. A class has others."""
    keys = schema.get("patternProperties")
    patterns = [schema.get("pattern"), *(keys if isinstance(keys, dict) else ())]
    plain = (CLASS.sub(_only, ESCAPED_BACKSLASH.sub("", each)) for each in patterns if isinstance(each, str))
    exact = _strings([schema.get("const"), schema.get("enum")])
    if any(map(CONTROL_IN_PATTERN.search, plain)) or any(map(CONTROL.search, exact)):
        cause = "the JSON schema cannot be used: a string of it may need a control character"
        raise BadArgument(cause, REMEDY)


def _check_bounds(schema: dict[str, Any]) -> None:
    """Refuse bounds of numbers that llguidance would move outwards, which are large ones: they become floats, and those
    of integers are limited to 64 bits."""
    whole = _is_whole(schema)

    def moved(bound: float, sign: int, exclusive: bool) -> bool:
        """`sign` -1: a lower bound."""
        if abs(bound) <= EXACT:
            return False
        near = int(float(bound)) if isinstance(bound, float) or bound.bit_length() < 1024 else None
        if not whole:
            return exclusive or sign * bound < 0 or near is None or sign * near > sign * bound
        if sign * bound > INT64_MAX or (sign * bound == INT64_MAX and not exclusive):
            return False
        return near != bound or sign * bound < -INT64_MAX

    for name, sign in BOUNDS.items():
        bound = _number(schema, name)
        if bound is not None and moved(bound, sign, name.startswith("exclusive")):
            cause = f"the JSON schema cannot be used: {name} is too far from 0 to be enforced"
            raise BadArgument(cause, f"give one within {EXACT:,}")


def _is_whole(schema: dict[str, Any]) -> bool:
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return "integer" in kinds and "number" not in kinds


def _number(schema: dict[str, Any], name: str) -> float | None:
    value = schema.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _narrow(schemas: list[dict[str, Any]]) -> None:
    """Move whole exclusive bounds of numbers in, by a thousandth of the distance to the other bound, which another part
    of the schema may have: llguidance takes one for inclusive where no whole number lies between the two."""
    nearest: dict[tuple[int, int], float] = {}  # by the sign of a bound and its whole part: its distance from that
    for schema, (name, sign) in product(schemas, BOUNDS.items()):
        other = _number(schema, name)
        if other is not None and abs(other) <= EXACT and sign * (distance := other - int(other)) > 0:
            key = sign, int(other)
            nearest[key] = min(abs(distance), nearest.get(key, 1.0))
    for schema, (name, sign) in product(schemas, (("exclusiveMinimum", -1), ("exclusiveMaximum", 1))):
        bound = _number(schema, name)
        if bound is None or bound != int(bound) or _is_whole(schema):
            continue
        if gap := nearest.get((-sign, int(bound))):
            schema[name] = bound - sign * max(gap / 1000, math.ulp(bound))


def _only(found: re.Match[str]) -> str:
    """What a class of one control character stands for."""
    return found[1] if CONTROL_IN_PATTERN.fullmatch(found[1]) else ""


def _strings(values: list[Any]) -> list[str]:
    """All strings in JSON values, but keys."""
    found = list(values)
    for value in found:
        found += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value for value in found if isinstance(value, str)]
