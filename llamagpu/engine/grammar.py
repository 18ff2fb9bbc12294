"""Grammars that a text has to match. llguidance (an optional package) says which tokens may come next."""

import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import BadArgument, GrammarFailed, LlamaGpuError, check_argument, install_extra
from llamagpu.files.tokenizer import Tokenizer

MAX_CHARACTERS = 1 << 17  # of a grammar: the slowest of them compile in 12 s
STACK_BYTES = 128 << 20  # llguidance recurses along references, up to 4 KB for each: 8 MB end at some 2,000 rules
STACK_SIZE = threading.Lock()  # that of new threads is the process's: one thread at a time changes it
MAX_GBNF_RULES = 2000  # the converter takes time n * n: 0.5 s for these
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
LARK_RULE = re.compile(r"^\s*(%llguidance\b|start\b[^:\n]*:(?!:))", re.M)  # GBNF has neither
T = TypeVar("T")
UNMATCHED = "NoExtensionBias"  # what llguidance says when no text can match


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a generated text has to match. Needs llguidance: `pip install "llamagpu[grammar]"`.

    A text that ends with finish reason "stop", without a stop string, matches as a whole. A grammar that is wrong, or
    that llguidance cannot enforce, raises BadArgument; one that becomes too complex later raises GrammarFailed.

    >>> schema = {"type": "array", "items": {"enum": ["fox", "dog"]}, "minItems": 1, "maxItems": 2}
    >>> answer = llama.complete("the quick", grammar=Grammar.json_schema(schema))
    >>> set(json.loads(answer.text)) <= {"fox", "dog"}
    True
    """

    kind: str
    source: str  # as llguidance takes it

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> "Grammar":
        """JSON that is valid against a schema, a dict or JSON text. Keywords that are not enforced are refused."""
        expected = "a JSON schema: a dict, or the text of a JSON object"
        check_argument("schema", schema, isinstance(schema, Mapping | str), expected)
        try:
            value = json.loads(schema) if isinstance(schema, str) else dict(schema)
            text = json.dumps(value, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else _one_line(str(error))
            raise BadArgument(f"the schema is not JSON: {reason}", f"give {expected}") from None
        check_argument("schema", value, isinstance(value, dict), expected)
        _check_size(text)
        text = enforceable(text)
        try:
            source = _llguidance().LLMatcher.grammar_from_json_schema(text, JSON_OPTIONS)
        except ValueError as error:
            raise _wrong("JSON schema", str(error)) from None
        return cls._checked("JSON schema", source)

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Text that matches a regular expression as a whole. Look-around and back-references are refused.

        >>> llama.complete("the quick", grammar=Grammar.regex("[a-f]{3}")).text.isalpha()
        True
        """
        _check_text("pattern", pattern)
        return cls._checked("regular expression", _llguidance().LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        """A context-free grammar in llguidance's variant of Lark's syntax.

        >>> brackets = Grammar.lark('start: "(" start ")" | "x"')
        >>> llama.complete("the quick", grammar=brackets, max_tokens=4).text[0] in "(x"
        True
        """
        _check_text("text", text)
        return cls._checked("Lark grammar", _llguidance().LLMatcher.grammar_from_lark(text))

    @classmethod
    def gbnf(cls, text: str) -> "Grammar":
        """A context-free grammar in llama.cpp's syntax.

        >>> llama.complete("the quick", grammar=Grammar.gbnf('root ::= "yes" | "no"')).text in ("yes", "no")
        True
        """
        _check_text("text", text)
        if (rules := text.count("::=")) > MAX_GBNF_RULES:
            raise BadArgument(f"the GBNF grammar has {rules} rules", f"give at most {MAX_GBNF_RULES}")
        guidance = _llguidance()
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            lark = gbnf_to_lark(_plain_characters(text))
        except Exception as error:  # it raises plain Exceptions, IndexError and RecursionError for wrong grammars
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else _one_line(str(error))
            raise BadArgument(f"the GBNF grammar cannot be used: {reason}", REMEDY) from None
        return cls._checked("GBNF grammar", guidance.LLMatcher.grammar_from_lark(lark))

    @classmethod
    def _checked(cls, kind: str, source: str) -> "Grammar":
        validate = _llguidance().LLMatcher.validate_grammar
        if message := _on_large_stack(lambda: validate(source, limits=_limits())):
            raise _wrong(kind, message)
        return cls(kind, source)


class _Tokens:
    """A tokenizer as llguidance reads it. It must not refer to the LLTokenizer: that cycle would never be freed."""

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        ids = range(tokenizer.vocab_size)
        self.ends = [id for id in ids if tokenizer.is_end(id)]
        self.eos_token_id = self.ends[0] if self.ends else None  # None: llguidance adds a token
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(id) for id in ids] + [b""] * (rows - tokenizer.vocab_size)
        # Control tokens have no text, and an end token ends the text: neither may stand for its bytes.
        self.special_token_ids = [id for id in ids if tokenizer.is_control(id) or tokenizer.is_end(id)]
        self._encode = tokenizer.encode_inner

    def __call__(self, text: str) -> list[int]:
        """The tokens of forced text: where a grammar leaves no choice, llguidance allows only these."""
        return self._encode(text)


class GrammarVocabulary:
    """The tokens of a model for llguidance. Built once for a model: 0.9 s for 128,256 tokens.

    `rows` is the number of logits. Rows without a token are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        guidance, tokens = _llguidance(), _Tokens(tokenizer, rows)
        self.tokenizer = guidance.LLTokenizer(guidance.TokenizerWrapper(tokens), eos_token=tokens.ends or None)
        self.rows = rows
        self.words = -(-self.tokenizer.vocab_size // 32)  # int32 words of a mask


class Matcher:
    """Follows one text through a grammar: `mask` says which tokens may come next, `accept` takes one of them."""

    def __init__(self, grammar: Grammar, vocabulary: GrammarVocabulary) -> None:
        self.words, self.rows = vocabulary.words, vocabulary.rows
        make = _llguidance().LLMatcher
        self._matcher = _on_large_stack(
            lambda: make(vocabulary.tokenizer, grammar.source, log_level=0, limits=_limits())
        )
        if not self._matcher.is_error():
            self._matcher.compute_bitmask()  # finds grammars that no text matches
        if self._matcher.is_error():
            raise _wrong(grammar.kind, self._matcher.get_error())

    def mask(self) -> NDArray[np.int32]:
        """Bit i % 32 of word i // 32 is set if token i may come next; some token of the model may."""
        from llguidance.numpy import fill_next_token_bitmask

        words = np.empty(self.words, np.int32)
        fill_next_token_bitmask(self._matcher, words[np.newaxis])
        self._check()
        if not words[: self.rows // 32].any() and not allowed_tokens(words, self.rows).any():
            cause = "the grammar cannot go on: this model has no token for it"
            raise GrammarFailed(cause, "use another grammar or model")
        return words

    def accept(self, token: int) -> None:
        """Append a token that the mask allows."""
        self._matcher.consume_token(token)
        self._check()

    def restart(self, tokens: Sequence[int]) -> None:
        """Go back to the beginning, and through these tokens again."""
        self._matcher.reset()
        self._matcher.consume_tokens(list(tokens))
        self._check()

    @property
    def finished(self) -> bool:
        """Whether the text so far matches."""
        return bool(self._matcher.is_accepting())

    @property
    def stopped(self) -> bool:
        """Whether the text matches and nothing but an end token may follow, or did."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _reason(self._matcher.get_error())
            raise GrammarFailed(f"the grammar cannot go on: {reason}", "use a simpler grammar")


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


def is_gbnf(text: str, name: str = "") -> bool:
    """By the suffix of its file, else by the content. What is not GBNF is Lark."""
    suffix = Path(name).suffix.lower()
    return suffix == ".gbnf" or (suffix != ".lark" and "::=" in text and not LARK_RULE.search(text))


def allowed_tokens(words: NDArray[np.int32], rows: int) -> NDArray[np.bool_]:
    """[rows]: whether the bit of a token is set in a mask."""
    return np.unpackbits(words.view(np.uint8), count=rows, bitorder="little").astype(bool)


def _llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise LlamaGpuError("grammars need the package llguidance", install_extra("grammar")) from None
    return llguidance


def _on_large_stack(compile: Callable[[], T]) -> T:
    """Run it in a thread with a stack of its own: an overflow would end the process."""
    with ThreadPoolExecutor(1) as pool:
        with STACK_SIZE:
            before = threading.stack_size(STACK_BYTES)
            try:
                future = pool.submit(compile)  # returns when the thread has begun
            finally:
                threading.stack_size(before)
        return future.result()


def _limits() -> Any:
    """llguidance's own limits: the slowest step takes seconds, others a fraction of a millisecond."""
    return _llguidance().LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,  # 2 KB each
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def _check_text(name: str, text: object) -> None:
    check_argument(name, text, isinstance(text, str), "a str")
    _check_size(str(text))


def _check_size(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise BadArgument(f"the grammar has {len(text):,} characters", f"give at most {MAX_CHARACTERS:,}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadArgument("the grammar has characters that are not Unicode", "give UTF-8 text") from None


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


def _plain_characters(text: str) -> str:
    """GBNF with the characters themselves for \\uXXXX and \\UXXXXXXXX, which the converter to Lark writes wrongly."""

    def plain(match: re.Match[str]) -> str:
        code = int(match[1] or match[2] or "0", 16)
        if code < 0x80:
            return f"\\x{code:02x}" if match[1] or match[2] else match[0]
        surrogate = 0xD800 <= code < 0xE000
        return match[0] if surrogate or code > 0x10FFFF else chr(code)

    return re.sub(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", plain, text, flags=re.S)


def _wrong(kind: str, message: str) -> BadArgument:
    return BadArgument(f"the {kind} cannot be used: {_reason(message)}", REMEDY)


def _reason(message: str) -> str:
    """llguidance's message in one line. Parse errors come with the text and a line of carets under it."""
    first, *rest = message.splitlines() or [""]
    if first.startswith(UNMATCHED):
        return "no text can match it"
    found = next((line for line in rest if line.startswith("error: ")), "")
    return _one_line(f"{first} {found.removeprefix('error: ')}")


def _one_line(text: str) -> str:
    shown = "".join(letter if letter.isprintable() else " " for letter in text).strip()
    return shown if len(shown) <= 200 else f"{shown[:120]} ... {shown[-70:]}"
