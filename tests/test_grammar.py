"""Grammars: every text that ends under one matches it, on real vocabularies, on a device and on the command line."""

import gc
import json
import re
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from gguf_builder import spm_vocab, tiny_llama
from package_data import default_model, vocabulary
from test_cli import run as command  # noqa: F401

from llamagpu import Grammar, Llama, Sampling
from llamagpu.engine import grammar as grammar_module
from llamagpu.engine.grammar import GrammarVocabulary, Matcher, allowed_tokens, is_gbnf
from llamagpu.engine.json_schema import json_rule
from llamagpu.engine.sampler import HostSampler
from llamagpu.errors import BadArgument, GrammarFailed, LlamaGpuError
from llamagpu.files.gguf_file import GgufFile
from llamagpu.files.tokenizer import Tokenizer

GREEDY = Sampling(temperature=0)
SHORT = {"type": "string", "maxLength": 5}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "\u00e9\U0001f600"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "optional": {"type": "object", "properties": {"a": SHORT, "b": SHORT}, "additionalProperties": False},
    "nested": {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "maxItems": 2},
    "scalars": {"enum": [None, True, False, 1.5, -3, "x", 'quote "', "line\nend", "\u00df\u4e2d", [1, {"k": None}]]},
    "union": {"anyOf": [{"type": "null"}, SHORT, {"type": "number", "minimum": -1, "maximum": 1}]},
    "tuple": {"type": "array", "prefixItems": [SHORT, {"const": 7}], "items": False, "minItems": 2},
    "controls": {"enum": ["a\tb\n\u0080", {"k\u0001": 1}]},
    "classes": {"type": "string", "pattern": r"^[^\x00-\x1f]\t[\x01-\x03c]\\x03$"},
    "date": {"type": "string", "format": "date"},
    "length": {"type": "string", "minLength": 2, "maxLength": 4},
    "map": {"type": "object", "additionalProperties": {"type": "integer", "minimum": -9, "maximum": 9}},
    "recursive": {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> tuple[Tokenizer, GrammarVocabulary]:
    """288 tokens and 12 rows of padding."""
    tokenizer = Tokenizer.from_gguf(spm_vocab(288))
    return tokenizer, GrammarVocabulary(tokenizer, 300)


LARGE = (1 << 63) - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", vocab=288, context=512)


@pytest.fixture(scope="module")
def llama(model: Path, gpu: Any) -> Llama:
    """Exact, so that a text is the same again, whichever of its prompt is in the cache."""
    return Llama(model, device=gpu, precision="high", kv_type="f32")


def random_text(grammar: Grammar, tiny: tuple[Tokenizer, GrammarVocabulary], sampling: Sampling) -> str | None:
    """What a model of random logits says; None if it does not end."""
    tokenizer, words = tiny
    matcher, random = Matcher(grammar, words), np.random.default_rng(sampling.seed)
    sample, ids = HostSampler(sampling, []), []
    while not matcher.stopped and len(ids) < 300:
        ids.append(sample(random.standard_normal(300), matcher.mask()))
        matcher.accept(ids[-1])
        assert ids[-1] < tokenizer.vocab_size and not (tokenizer.is_control(ids[-1]) and not tokenizer.is_end(ids[-1]))
    text = b"".join(tokenizer.token_bytes(id) for id in ids if not tokenizer.is_end(id))
    assert matcher.finished or not matcher.stopped
    return text.decode() if matcher.stopped else None


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_texts_are_valid(tiny: Any, name: str) -> None:
    schema, grammar = SCHEMAS[name], Grammar.json_schema(SCHEMAS[name])
    checker = jsonschema.Draft202012Validator(schema)
    samplings = [Sampling(temperature=0, seed=0), *(Sampling(1.5, 0, 1, 0, seed=seed) for seed in range(1, 8))]
    texts = [text for how in samplings if (text := random_text(grammar, tiny, how)) is not None]
    assert len(texts) >= 2
    for text in texts:
        checker.validate(json.loads(text))


@pytest.mark.parametrize(
    "pattern", ["[a-f]{2,5}", "[0-9]{3}-[0-9]{4}", "yes|no|maybe", "(ab*c){1,3}", "\u00e9{1,3}[/\"']x?"]
)
def test_random_texts_match_a_regular_expression(tiny: Any, pattern: str) -> None:
    texts = [random_text(Grammar.regex(pattern), tiny, Sampling(2.0, 0, 1, 0, seed=seed)) for seed in range(6)]
    assert all(text is None or re.fullmatch(pattern, text) for text in texts) and any(texts)


def test_json_object(tiny: Any) -> None:
    texts = [random_text(Grammar.json_object(), tiny, Sampling(1.0, 0, 1, 0, seed=seed)) for seed in range(12)]
    assert all(isinstance(json.loads(text), dict) for text in texts if text) and any(texts)


GBNF = r"""# digits between brackets, then a letter of each range
root ::= list-of [\u00e0-\u00ef] "\u4e2d\U0001F600\x41"
list-of ::= "[" ( digit ("," digit)* )? "]"
digit ::= [0-9]
"""
LARK = 'start: "[" (DIGIT ("," DIGIT)*)? "]" /[\u00e0-\u00ef]/ "\u4e2d\U0001f600A"\nDIGIT: /[0-9]/\n'


@pytest.mark.parametrize("grammar", [Grammar.gbnf(GBNF), Grammar.lark(LARK)], ids=["gbnf", "lark"])
def test_random_texts_match_a_context_free_grammar(tiny: Any, grammar: Grammar) -> None:
    texts = [random_text(grammar, tiny, Sampling(1.0, 0, 1, 0, seed=seed)) for seed in range(6)]
    want = "\\[([0-9](,[0-9])*)?\\][\u00e0-\u00ef]\u4e2d\U0001f600A"
    assert all(text is None or re.fullmatch(want, text) for text in texts) and any(texts)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"properties": {"a": {"type": "integer"}}}, '{"a":1,"b":"x"}', ['{"a":1,"\\u0061":"x"}', '{"a":1,"a":"x"}']),
        ({"minProperties": 1}, '{"":[]}', ["{}"]),
        ({"required": ["z"], "minProperties": 2}, '{"z":1,"y":1}', ['{"z":1,"z":1}', '{"z":1}', '{"y":1}']),
        ({"properties": {"\u00e9\n": {"const": 1}}}, '{"\u00e9\\n":1}', ['{"\u00e9\\n":2}', '{"\u00e9\\u000a":2}']),
    ],
)
def test_keys(tiny: Any, schema: dict[str, Any], valid: str, invalid: list[str]) -> None:
    """A key that is written in another way, or twice, is the same key."""
    for text in (valid, *invalid):
        assert matches(Grammar.json_schema({"type": "object", **schema}), tiny, text) == (text == valid), text


def matches(grammar: Grammar, tiny: Any, text: str) -> bool:
    tokenizer, words = tiny
    matcher = Matcher(grammar, words)
    byte_ids = {tokenizer.token_bytes(id): id for id in range(3, 259)}  # the byte tokens
    try:
        for byte in text.encode():
            matcher.accept(byte_ids[bytes([byte])])
    except GrammarFailed:
        return False
    return matcher.finished


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5"], ["0", "-0", "0.0", "0.51"]),
        ({"exclusiveMinimum": 2, "exclusiveMaximum": 2.5}, ["2.25"], ["2", "2.0", "2.5"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.01"], ["-0", "0", "-0.51"]),
        ({"allOf": [{"exclusiveMinimum": -3}], "maximum": -2.5}, ["-2.5"], ["-3", "-2"]),
        ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 8}, ["6", "7"], ["5", "8"]),
        ({"type": "integer", "minimum": 0, "maximum": LARGE}, ["0", str(LARGE)], ["-1", str(LARGE + 1)]),
        ({"exclusiveMinimum": 10.0}, ["10.5", "11"], ["10", "10.0"]),
        ({"exclusiveMinimum": 0, "maximum": 1e-6}, ["0.000001", "0.0000005"], ["0", "0.000002"]),
        ({"exclusiveMinimum": 0, "const": 1e-6}, ["0.000001"], ["0"]),
        ({"exclusiveMinimum": 0, "maximum": 1}, ["0.00000001", "1"], ["0", "1.1"]),
        ({"anyOf": [{"maximum": 0.5}, {"maximum": 7}], "exclusiveMinimum": 0}, ["0.5", "6"], ["0", "8"]),
        ({"type": "integer", "exclusiveMinimum": 17 * 10**14}, ["1700000000000001"], ["1700000000000000"]),
        ({"type": "integer", "minimum": 10**16, "maximum": 10**16 + 4}, [f"{10**16}"], [f"{10**16 - 1}", "5"]),
        ({"type": ["integer", "null"], "minimum": 0, "maximum": LARGE}, [str(LARGE), "null"], [str(LARGE + 1)]),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": LARGE + 1}, [str(LARGE)], [str(LARGE + 1)]),
    ],
    ids=str,
)
def test_bounds_of_numbers(tiny: Any, schema: dict[str, Any], valid: list[str], invalid: list[str]) -> None:
    schema, want = {"type": "number", **schema}, {text: text in valid for text in (*valid, *invalid)}
    for grammar in (Grammar.json_schema(schema), Grammar.lark(f"start: {json_rule(schema)}")):
        assert {text: matches(grammar, tiny, text) for text in want} == want


def test_a_schema_stays_as_it_was() -> None:
    schema = {"properties": {"a": {"exclusiveMinimum": 1}}}
    Grammar.json_schema(schema)
    assert schema == {"properties": {"a": {"exclusiveMinimum": 1}}}


# Vocabularies


@pytest.mark.parametrize("name", ["llama-spm", "gpt-2"])
def test_the_tokens_of_a_valid_text_are_allowed(name: str) -> None:
    """Tokens of several characters, bytes of one character in several tokens, forced text; control tokens never are."""
    tokenizer = Tokenizer.from_gguf(GgufFile(vocabulary(name)).metadata)
    rows = tokenizer.vocab_size + 70
    matcher = Matcher(Grammar.json_schema(PERSON), GrammarVocabulary(tokenizer, rows))
    text = '{"name": "Anna", "age": 17, "tags": ["\u00e9\U0001f600", "a"]}'
    for id in tokenizer.encode_inner(text):
        allowed = np.flatnonzero(allowed_tokens(matcher.mask(), rows))
        assert id in allowed and not any(tokenizer.is_control(i) or i >= tokenizer.vocab_size for i in allowed.tolist())
        assert not matcher.finished and not matcher.stopped
        matcher.accept(id)
    assert matcher.finished and matcher.stopped
    assert all(tokenizer.is_end(id) for id in np.flatnonzero(allowed_tokens(matcher.mask(), rows)).tolist())


def test_a_vocabulary_without_an_end_token() -> None:
    keys = spm_vocab(288)
    tokenizer = Tokenizer.from_gguf(keys)
    tokenizer._ends = set()
    words = GrammarVocabulary(tokenizer, 288)
    matcher = Matcher(Grammar.regex("ab"), words)
    while not matcher.stopped:
        matcher.accept(int(allowed_tokens(matcher.mask(), 288).argmax()))
    with pytest.raises(GrammarFailed, match="no token"):
        Matcher(Grammar.regex(""), words).mask()


def test_a_vocabulary_is_freed() -> None:
    tokenizer = Tokenizer.from_gguf(spm_vocab(288))
    words = GrammarVocabulary(tokenizer, 288)
    kept = weakref.ref(tokenizer)
    del tokenizer, words
    gc.collect()
    assert kept() is None


# Wrong grammars

DEEP = json.loads('{"items":' * 400 + "{}" + "}" * 400)
WRONG: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "type": (Grammar.json_schema, ({"type": "strin"},), "Invalid type: strin"),
    "keyword": (Grammar.json_schema, ({"uniqueItems": True},), "uniqueItems"),
    "unsatisfiable": (Grammar.json_schema, ({"enum": []},), "Unsatisfiable"),
    "false": (Grammar.json_schema, ("false",), "schema is False"),
    "not json": (Grammar.json_schema, ("{'a': 1}",), "not JSON: .*line 1 column 2"),
    "not a schema": (Grammar.json_schema, ("[1]",), r"schema is \[1\]"),
    "no json value": (Grammar.json_schema, ({"const": {1, 2}},), "not JSON"),
    "nan": (Grammar.json_schema, ({"const": float("nan")},), "not JSON"),
    "injected": (Grammar.json_schema, ('{}}], "x": [{',), "not JSON"),
    "bytes": (Grammar.json_schema, (b"{}",), "schema is b'{}'"),
    "deep": (Grammar.json_schema, (DEEP,), "recursion limit|too deep"),
    "deep text": (Grammar.json_schema, ("[" * 100_000,), "nested too deeply"),
    "huge": (Grammar.json_schema, ({"enum": ["x" * 100] * 20_000},), "characters"),
    "many": (Grammar.json_schema, ({"allOf": [{"properties": {f"k{i}": {}}} for i in range(2000)]},), "too large"),
    "uncountable": (Grammar.json_schema, ({"items": [{"minProperties": 2}]},), "minProperties is 2, and 0 keys"),
    "large": (Grammar.json_schema, ({"minimum": 10**25, "maximum": 10**25 + 3},), "minimum is too far from 0"),
    "large exclusive": (
        Grammar.json_schema,
        ({"type": "integer", "exclusiveMaximum": LARGE},),
        "exclusiveMaximum is too",
    ),
    "inexact": (Grammar.json_schema, ({"properties": {"maximum": {"maximum": LARGE}}},), "maximum is too far"),
    "huge number": (Grammar.json_schema, ({"maximum": 10**400},), "maximum is too far"),
    "no names": (Grammar.json_schema, ({"patternProperties": 5},), "patternProperties"),
    "missing ref": (Grammar.json_schema, ({"$ref": "#/$defs/x"},), "does not exist"),
    "remote ref": (Grammar.json_schema, ({"$ref": "https://example.com/x"},), "example.com"),
    "bracket": (Grammar.regex, ("[",), "unclosed character class"),
    "look-ahead": (Grammar.regex, ("(?=a)b",), "look-around"),
    "long": (Grammar.regex, ("(" * 50_000,), r"\.\.\."),
    "number": (Grammar.regex, (5,), "pattern is 5"),
    "surrogate": (Grammar.regex, ("\ud800",), "not Unicode"),
    "unknown": (Grammar.lark, ("start: x",), "unknown name"),
    "empty": (Grammar.lark, ("",), "Empty grammar"),
    "deep lark": (Grammar.lark, ("start: " + "(" * 20_000,), "nested"),
    "no root": (Grammar.gbnf, ('x ::= "a"',), "No 'root' rule"),
    "no rule": (Grammar.gbnf, ("root ::= x",), "Rule 'x' not found"),
    "cut": (Grammar.gbnf, ('root ::= "\\',), "index"),
    "deep gbnf": (Grammar.gbnf, ("root ::= " + "(" * 5000,), "nested too deeply"),
    "many rules": (Grammar.gbnf, ("a ::= b\n" * 2001,), "2001 rules"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_grammar_is_refused(name: str) -> None:
    make, arguments, cause = WRONG[name]
    with pytest.raises(BadArgument, match=cause) as caught:
        make(*arguments)
    assert caught.value.cause.isprintable() and len(caught.value.cause) < 300 and caught.value.remedy
    assert caught.value.cause.count("cannot be used") <= 1


@pytest.mark.parametrize(
    ("schema", "cause", "remedy"),
    [
        ({"minProperties": 3}, "minProperties is 3, and 0 keys are required", "name the keys in `required`"),
        ({"const": "\u0007"}, "a string of it may need a control character", "correct or simplify it"),
        ({"minimum": 1 << 60}, "minimum is too far from 0 to be enforced", "give one within 9,007,199,254,740,992"),
    ],
)
def test_what_is_said_of_a_schema_that_is_refused(schema: dict[str, Any], cause: str, remedy: str) -> None:
    with pytest.raises(BadArgument) as caught:
        Grammar.json_schema(schema)
    assert (caught.value.cause, caught.value.remedy) == (f"the JSON schema cannot be used: {cause}", remedy)


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}])
def test_a_grammar_that_no_text_matches(llama: Llama, schema: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match="no text can match"):
        llama.generate("a", grammar=Grammar.json_schema(schema))


CONTROLS = ("\u0007", "\u001f", "\u007f", "x\u0000y")


@pytest.mark.parametrize(
    "schema",
    [
        *({"const": f"a{text}b"} for text in CONTROLS),
        *({"properties": {"p": {"enum": [1, {"q": [text]}]}}} for text in CONTROLS),
        *({"anyOf": [{"type": "string", "pattern": f"^a{text}b$"}]} for text in CONTROLS),
        *({"pattern": f"^a{text}b$"} for text in (r"\x03", r"\x1e", r"\u001F", r"\x{7}", r"\x{01f}", r"\a", r"\v")),
        *({"pattern": f"^a{text}b$"} for text in (r"\u{3}", r"\U{03}", r"\U00000003", r"[\u{3}]")),
        {"$ref": "#/more/p", "more": {"p": {"const": "\u0007"}}},
        {"$ref": "#/components/a~1b/title", "components": {"a/b": {"title": {"const": "\u0007"}}}},
        {"$ref": "#/default", "default": {"const": "\u0007"}},
        {"$ref": "#/x-of/1", "x-of": [{}, {"anyOf": [{"const": "\u0007"}]}]},
        {"pattern": r"^a[\x03]b$"},
        {"patternProperties": {r"^a\x7f$": {}}},
    ],
    ids=str,
)
def test_control_characters_that_would_be_left_out_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match="a string of it may need a control character"):
        Grammar.json_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"patternProperties": True, "minProperties": {"type": "integer"}}},
        {"properties": {"const": {"type": "string", "description": "bell \u0007"}}},
        {"type": "string", "examples": [{"const": "\u0007"}], "default": {"pattern": "\u0007"}},
        {"type": "string", "pattern": r"^\x{10FFFF}\u{1F600}\x{70}$"},
    ],
    ids=str,
)
def test_names_examples_and_other_characters_are_no_reason_to_refuse(schema: dict[str, Any]) -> None:
    Grammar.json_schema(schema)


def test_a_grammar_that_becomes_too_complex(llama: Llama) -> None:
    """It ends that generation alone, with what was said so far."""
    run = llama.generate("a", grammar=Grammar.lark('start: "a" start'), sampling=GREEDY)
    with pytest.raises(GrammarFailed, match=r"cannot go on: .*Too many items") as caught:
        run.result()
    assert caught.value.exit_code == 1 and caught.value.remedy and set(run.text) <= {"a"}
    assert llama.complete("a", grammar=Grammar.regex("ab"), sampling=GREEDY).text == "ab"


def chain(kind: str, count: int) -> Grammar:
    """Rules of which each refers to the next."""
    if kind == "lark":
        rules = (f'a{i}: "x" a{i + 1}' for i in range(count))
        return Grammar.lark("\n".join(["start: a0", *rules, f'a{count}: "y"']))
    rules = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return Grammar.json_schema({"$ref": "#/$defs/d0", "$defs": {**rules, f"d{count}": {"const": 1}}})


@pytest.mark.parametrize(("kind", "count"), [("lark", 7000), ("json", 3500)])
def test_long_chains_of_rules_overflow_no_stack(tiny: Any, kind: str, count: int) -> None:
    Matcher(chain(kind, count), tiny[1])


def test_threads_that_make_grammars_leave_the_stack_size_as_it_was() -> None:
    """It is the process's. Each of them also has the large stack that it needs."""
    before = threading.stack_size()
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda i: chain("lark", 7000) if i % 4 == 0 else Grammar.regex(f"a{i}"), range(40)))
    assert len(made) == 40 and threading.stack_size() == before


def test_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(LlamaGpuError, match="need the package llguidance") as caught:
        Grammar.regex("a")
    assert "llamagpu[grammar]" in caught.value.remedy and caught.value.exit_code == 1


# Generation


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, seed=3), Sampling(1.5, 0, 1, 0, 1.3, seed=4)], ids=str)
def test_generated_json_is_valid(llama: Llama, sampling: Sampling) -> None:
    grammar = Grammar.json_schema(PERSON)
    answer = llama.complete("the quick", grammar=grammar, sampling=sampling, max_tokens=400)
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), PERSON)
    run = llama.complete("the quick", grammar=grammar, sampling=sampling, max_tokens=400, stream=True)
    assert "".join(token.text for token in run) == answer.text and tuple(run.ids) == answer.ids


def test_the_default_model() -> None:
    with Llama(default_model(), context=256) as llama:
        messages = [{"role": "user", "content": "Name a colour, as JSON."}]
        colour = {"colour": {"enum": ["red", "green", "blue"]}}
        schema = {"type": "object", "properties": colour, "required": ["colour"], "additionalProperties": False}
        answer = llama.chat(messages, grammar=Grammar.json_schema(schema), sampling=GREEDY, max_tokens=40)
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.text), schema)


def test_where_the_grammar_can_only_end_the_text_ends(llama: Llama) -> None:
    """Without an end token, at the last of max_tokens too, and whatever ignore_eos says."""
    grammar = Grammar.regex("abc")
    answer = llama.complete("a", grammar=grammar, sampling=GREEDY)
    assert (answer.text, answer.finish_reason) == ("abc", "stop") and not llama.tokenizer.is_end(answer.ids[-1])
    exact = llama.complete("a", grammar=grammar, sampling=GREEDY, max_tokens=len(answer.ids))
    assert (exact.text, exact.finish_reason) == ("abc", "stop")
    run = llama.generate("a", grammar=Grammar.regex("(abc)?"), ignore_eos=True, sampling=GREEDY)
    assert run.result().text in ("", "abc") and run.finish_reason == "stop"


def test_length_and_stop_strings(llama: Llama) -> None:
    grammar = Grammar.json_schema(PERSON)
    cut = llama.complete("a", grammar=grammar, sampling=GREEDY, max_tokens=5)
    assert cut.finish_reason == "length" and len(cut.ids) == 5
    stopped = llama.complete("a", grammar=grammar, sampling=GREEDY, stop="name")
    assert stopped.finish_reason == "stop" and re.fullmatch(r'\{\s*"', stopped.text)


def test_log_probabilities_are_those_of_the_model(llama: Llama) -> None:
    plain = llama.complete("a", sampling=GREEDY, logprobs=2, max_tokens=1).logprobs[0].top
    answer = llama.complete("a", grammar=Grammar.regex("[xyz]{3}"), sampling=GREEDY, logprobs=2)
    assert len(answer.logprobs) == len(answer.ids) and answer.logprobs[0].top == plain
    assert [logprob.text for logprob in answer.logprobs] == list(answer.text)


def test_one_grammar_serves_many_generations(llama: Llama) -> None:
    grammar = Grammar.regex("[ab]{4}")
    texts = {llama.complete("a", grammar=grammar, sampling=Sampling(5.0, seed=seed)).text for seed in range(8)}
    assert len(texts) > 1 and all(re.fullmatch("[ab]{4}", text) for text in texts)


@pytest.mark.parametrize("when", [0, 1, -1])  # after the first token, the second, the last
def test_an_interrupt_between_a_grammars_step_and_its_token(
    llama: Llama, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    """Ctrl-C reaches whoever runs the step; the text that the grammar was taking a token of goes on as if alone."""
    grammar = Grammar.regex("[ab]{3}c?d")
    want = llama.complete("a", grammar=grammar, sampling=GREEDY)
    (other,) = llama.submit("b", sampling=GREEDY, max_tokens=40)
    (run,) = llama.submit("a", grammar=grammar, sampling=GREEDY)
    calls, accept = iter(range(len(want.ids))), Matcher.accept

    def interrupted(self: Matcher, token: int) -> None:
        accept(self, token)
        if next(calls) == when % len(want.ids):
            raise KeyboardInterrupt

    monkeypatch.setattr(Matcher, "accept", interrupted)
    with pytest.raises(KeyboardInterrupt):
        other.result()
    monkeypatch.undo()
    got = run.result()
    other.close()
    assert (got.ids, got.text, got.finish_reason) == (want.ids, want.text, want.finish_reason)


# The command line


def test_command_line(command: Any, model: Path, tmp_path: Path) -> None:  # noqa: F811
    schema, gbnf, lark, other = (tmp_path / name for name in ("s.json", "g.gbnf", "g.lark", "g.txt"))
    schema.write_text('\ufeff{"enum": ["x", "y"]}', "utf-8")
    gbnf.write_text('root ::= "yes"')
    lark.write_text('start: "::=" | "no"')
    other.write_text('root ::= "other"')
    common = ["generate", "-m", model, "-p", "a", "--temp", "0", "-q"]
    for args, texts in (
        (["--json-schema", schema], ('"x"', '"y"')),
        (["-j", '{"const": 5}'], ("5",)),
        (["--grammar", gbnf], ("yes",)),
        (["--grammar-file", lark], ("::=", "no")),
        (["--grammar", other], ("other",)),
        (["--grammar", 'start: "text"'], ("text",)),
        (["--regex", "[0-9]{4}", "--json"], None),
    ):
        result = command(*common, *args)
        assert result.code == 0 and not result.err, result.err
        if texts:
            assert result.out.decode().removesuffix("\n") in texts
        else:
            assert re.fullmatch("[0-9]{4}", result.json["text"]) and result.json["finish_reason"] == "stop"


def test_chat(command: Any, tmp_path: Path) -> None:  # noqa: F811
    """Each answer matches; one that fails does not end the conversation."""
    template = {"tokenizer.chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}"}
    common = ["chat", "-m", tiny_llama(tmp_path / "chat.gguf", context=64, metadata=template), "--temp", "0", "-q"]
    result = command(*common, "--regex", "(ab){2}", stdin=b"one\ntwo\n")
    assert (result.code, result.out.decode(), result.err) == (0, "abab\nabab\n", "")
    result = command(*common, "--grammar", 'start: "a" start', stdin=b"one\ntwo\n")
    assert result.code == 1 and result.err.count("the grammar cannot go on") == 2
    result = command(*common, "--regex", "a{500}", stdin=b"one\ntwo\nthree\n")
    assert result.code == 0 and re.fullmatch("(a+\n){3}", result.out.decode())
    assert "64 is full" in command(*common[:-1], "--regex", "a{500}", stdin=b"one\n").err


@pytest.mark.parametrize(
    ("args", "code", "cause"),
    [
        (["--json-schema", "none.json"], 1, "none.json: No such file"),
        (["--json-schema", "."], 1, r"\.: Is a directory"),
        (["--json-schema", "/dev/zero"], 1, "more than 4 MiB"),
        (["--json-schema", "text"], 2, "text: the schema is not JSON"),
        (["--json-schema", "binary"], 1, "not UTF-8"),
        (["-j", '{"type": 5}'], 2, "the JSON schema cannot be used"),
        (["--grammar", "text"], 2, "text: the Lark grammar cannot be used"),
        (["--grammar", 'root ::= "'], 2, "the GBNF grammar cannot be used"),
        (["--regex", "("], 2, "unclosed group"),
        (["--regex", "a", "--grammar", "text"], 2, "--grammar and --regex are given"),
    ],
)
def test_wrong_options(
    command: Any,  # noqa: F811
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    code: int,
    cause: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("hello")
    Path("binary").write_bytes(b"\xff\xfe\x00")
    result = command("generate", "-m", model, "-p", "a", *args)
    assert result.code == code and re.search(cause, result.err) and not result.out
    assert len(result.err.strip().splitlines()) == 2


def test_kinds_of_grammar_files() -> None:
    assert is_gbnf('root ::= "a"', "") and is_gbnf('start ::= "a"\nroot ::= start', "x.txt") and is_gbnf("", "a.GBNF")
    assert not is_gbnf('start: "::="', "") and not is_gbnf("a ::= b", "x.lark") and not is_gbnf("hello", "")
    assert not is_gbnf('%llguidance {}\nstart[temperature=1]: "::="', "")


def test_escapes_of_gbnf() -> None:
    plain = grammar_module._plain_characters
    assert plain(r"\u00e9 \\u00e9 \u0022 \U0001F600 \n \ud800") == "\u00e9 \\\\u00e9 \\x22 \U0001f600 \\n \\ud800"
