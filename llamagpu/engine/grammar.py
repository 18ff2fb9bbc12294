"""Grammars that a text has to match. llguidance (an optional package) says which tokens may come next."""

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine.json_schema import JSON_OPTIONS, REMEDY, enforceable
from llamagpu.errors import BadArgument, GrammarFailed, LlamaGpuError, check_argument, install_extra
from llamagpu.files.tokenizer import Tokenizer

MAX_CHARACTERS = 1 << 17  # of a grammar: the slowest of them compile in 12 s
STACK_BYTES = 128 << 20  # llguidance recurses along references, up to 4 KB for each: 8 MB end at some 2,000 rules
STACK_SIZE = threading.Lock()  # that of new threads is the process's: one thread at a time changes it
MAX_GBNF_RULES = 2000  # the converter takes time n * n: 0.5 s for these
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
