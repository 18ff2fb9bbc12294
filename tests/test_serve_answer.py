"""Tool calls and reasoning in the text of an answer, however the text is cut into pieces."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from gguf_builder import spm_vocab
from package_data import templates

from llamagpu.engine.grammar import Grammar, GrammarVocabulary, Matcher, allowed_tokens
from llamagpu.files.chat_template import render
from llamagpu.files.tokenizer import Tokenizer
from llamagpu.results import Logprob, Token
from llamagpu.serve.answer import Answer
from llamagpu.serve.logprobs import ScoredTokens
from llamagpu.serve.messages import Blocks
from llamagpu.serve.tools import (
    HARMONY,
    HERMES,
    LLAMA3,
    MISTRAL,
    ToolStyle,
    call_id,
    call_or_answer,
    call_schema,
    closed,
    described,
    harmony_calls,
    harmony_messages,
    style_of,
    with_generic_prompt,
)

FINAL = "<|start|>assistant<|channel|>final<|message|>"
ARGUMENTS = '{"a": "}\\"{", "b": [1, {"c": 2}]}'
HERMES_CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
F = [("call", "f"), ("arguments", ARGUMENTS)]
ONE = [("call", "f"), ("arguments", '{"x": 1}')]
TO_F = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'
TO_G = TO_F.replace("functions.f", "functions.g")
CASES: list[tuple[str, dict[str, Any], list[tuple[str, str]]]] = [
    ("hello <b> <tool_call", {"style": HERMES}, [("content", "hello <b> <tool_call")]),
    (HERMES_CALL, {"style": HERMES}, F),
    (HERMES_CALL, {}, [("content", HERMES_CALL)]),  # no tools were offered
    (f"Sure.\n{HERMES_CALL}\n{HERMES_CALL}\n", {"style": HERMES}, [("content", "Sure.\n"), *F, *F]),
    (f"{HERMES_CALL} and more", {"style": HERMES}, [*F, ("content", " and more")]),
    ("<tool_call>\nno JSON</tool_call> x", {"style": HERMES}, [("content", "<tool_call>\nno JSON</tool_call> x")]),
    (HERMES_CALL.replace('"f"', '"g"'), {"style": HERMES}, [("content", HERMES_CALL.replace('"f"', '"g"'))]),
    ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', {"style": HERMES}, ONE),
    ('<tool_call>{"name": "f"}</tool_call>', {"style": HERMES}, [("call", "f"), ("arguments", "{}")]),
    ('{"name": "f", "parameters": {"x": 1}}', {"style": LLAMA3}, ONE),
    ('{"type": "function", "name": "f", "parameters": {"x": 1}}', {"style": LLAMA3}, ONE),
    ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "f", "parameters": {"x": 1}}',
     {"style": LLAMA3}, [*ONE, *ONE]),
    ('{"answer": 42}', {"style": LLAMA3}, [("content", '{"answer": 42}')]),
    ('so {"name": "f"}', {"style": LLAMA3}, [("content", 'so {"name": "f"}')]),
    ('[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 1}}]',
     {"style": MISTRAL}, [*ONE, *ONE]),
    ('[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]f[ARGS]{"x": 1}', {"style": MISTRAL}, [*ONE, *ONE]),
    ('[TOOL_CALLS]f{"x": 1}', {"style": MISTRAL}, ONE),
    ("[TOOL_CALLS] hello you", {"style": MISTRAL}, [("content", "[TOOL_CALLS] hello you")]),
    ("<think>\nhm\n\nwell\n</think>\n\nanswer", {}, [("reasoning", "hm\n\nwell"), ("content", "answer")]),
    (f"hm</think>\n\n{HERMES_CALL}", {"style": HERMES, "thinking": "</think>"}, [("reasoning", "hm"), *F]),
    ("[THINK]hm[/THINK]answer", {}, [("reasoning", "hm"), ("content", "answer")]),
    ("<think>no end\n", {}, [("reasoning", "no end\n")]),
    (f"<|channel|>analysis<|message|>hm\n<|end|>{FINAL}answer", {}, [("reasoning", "hm"), ("content", "answer")]),
    (f"<|channel|>analysis<|message|>a<|end|>{FINAL.replace('final', 'analysis')}b<|end|>{FINAL}answer", {},
     [("reasoning", "ab"), ("content", "answer")]),
    (FINAL.removeprefix("<|start|>assistant") + "answer", {"style": HERMES}, [("content", "answer")]),
    ("<|channel|>commentary<|message|>x", {}, [("content", "x")]),
    (f"<|channel|>commentary<|message|>x<|end|>{FINAL}y", {}, [("content", "xy")]),
    (f"<|channel|>analysis<|message|>hm<|end|>{TO_F}", {"style": HARMONY}, [("reasoning", "hm"), *ONE]),
    (f"<|channel|>commentary<|message|>I look.<|end|>{TO_F}", {"style": HARMONY}, [("content", "I look."), *ONE]),
    (f"{TO_F}<|end|>{TO_F} ", {"style": HARMONY}, [*ONE, *ONE]),
    ('<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}', {"style": HARMONY}, ONE),
    (' to=functions.f<|channel|>commentary <|constrain|>json<|message|>\n{"x": 1}', {"style": HARMONY}, ONE),
    ('<|channel|>analysis to=functions.f code<|message|>{"x": 1}', {"style": HARMONY}, ONE),
    ('<|channel|>commentary to=functions.f<|message|>{"x"', {"style": HARMONY},
     [("call", "f"), ("arguments", '{"x"')]),
    ("<|channel|>commentary to=functions.f <|constr", {"style": HARMONY}, []),
    ("<|channel|>commentary to=functions.f<|message|>", {"style": HARMONY}, [("call", "f"), ("arguments", "{}")]),
    (f"{TO_G}<|end|>{TO_F}", {"style": HARMONY}, [("content", TO_G), *ONE]),
    (f"{TO_F[:-8]}code<|end|>{FINAL}x", {"style": HARMONY}, [("content", TO_F[:-8] + "codex")]),
    (f"<|channel|>analysis to=python code<|message|>1<|end|>{FINAL}x", {"style": HARMONY},
     [("content", "<|channel|>analysis to=python code<|message|>1x")]),
    ('to=functions.f<|channel|>commentary  <|constrain|> json<|message|>{"x": 1}', {"style": HARMONY}, ONE),
    ("<|start|>assistant hello there", {"style": HARMONY}, [("content", "<|start|>assistant hello there")]),
    (f"<|start|>assistant\n{HERMES_CALL}", {"style": HERMES, "channels": False},
     [("content", "<|start|>assistant\n"), *F]),
    (f"{FINAL}x<|end|>", {"channels": False}, [("content", f"{FINAL}x<|end|>")]),
    (TO_G, {"style": HARMONY}, [("content", TO_G)]),  # no such function
    (TO_G[:-8] + "code", {"style": HARMONY}, [("content", TO_G[:-8] + "code")]),
    (TO_F, {}, [("content", TO_F)]),  # no tools were offered
    (f"{FINAL} to=functions.f <tool_call>", {"style": HARMONY}, [("content", " to=functions.f <tool_call>")]),
    (" to be", {"style": HARMONY}, [("content", " to be")]),
    ('f <|constrain|>json<|message|>{"x": 1}', {"style": HARMONY, "in_call": True}, ONE),
    ("f <|cons", {"style": HARMONY, "in_call": True}, []),
    ("<|sta", {}, [("content", "<|sta")]),
    ("<thin", {}, [("content", "<thin")]),
    (" <thing>", {}, [("content", " <thing>")]),
    ("", {}, []),
    ('{"name": "f", "arguments": {"x": 1}}', {"style": HERMES, "in_call": True}, ONE),
    ('{"name": "f", "arguments": {"x"', {"style": HERMES, "in_call": True}, [("call", "f"), ("arguments", '{"x"')]),
    ('{"na', {"style": HERMES, "in_call": True}, []),
    ('{"name": "f", "arg', {"style": LLAMA3, "in_call": True}, []),
    ('<tool_call>\n{"name": "f", "ar', {"style": HERMES}, []),
    ('so <tool_call>\n{"name": "f", "ar', {"style": HERMES}, [("content", "so ")]),
    ('<tool_call>{"name": "f"</tool_call>', {"style": HERMES}, [("content", '<tool_call>{"name": "f"</tool_call>')]),
    ('<tool_call>{"name": "f", "arguments": {"x": "</tool_call>', {"style": HERMES},
     [("call", "f"), ("arguments", '{"x": "</tool_call>')]),
    (f"{HERMES_CALL}\n<tool", {"style": HERMES}, F),
    (f"{HERMES_CALL}\n<tool_call>\n", {"style": HERMES}, F),
    (f"{HERMES_CALL} <b", {"style": HERMES}, [*F, ("content", " <b")]),
    ('{"name": "f", "parameters": {"x": 1}}', {"style": LLAMA3, "in_call": True}, ONE),
    ('{"answer": 4', {"style": LLAMA3}, [("content", '{"answer": 4')]),
    ('[TOOL_CALLS][{"name"', {"style": MISTRAL}, []),
    ("[TOOL_CALLS]f[AR", {"style": MISTRAL}, []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "options", "expected"), CASES)
def test_answers(text: str, options: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    for size in (1, 2, 3, 7, 1000):
        answer, found = Answer(names=("f",), **options), []
        pieces = [delta for i in range(0, len(text), size) for delta in answer.push(text[i : i + size])]
        for delta in pieces + answer.end():
            if found and found[-1][0] == delta.kind != "call":
                found[-1] = (delta.kind, found[-1][1] + delta.text)
            else:
                found.append((delta.kind, delta.text))
        assert found == expected, size
        assert answer.calls == sum(kind == "call" for kind, _ in found)


@pytest.mark.parametrize(("text", "options", "expected"), CASES)
def test_scored_tokens_are_those_of_the_content(
    text: str, options: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    """Not those of tags, reasoning and calls."""
    llama: Any = SimpleNamespace(tokenizer=Tokenizer.from_gguf(spm_vocab(289)))
    for size in (1, 2, 3, 7, 1000):
        answer, scored, found = Answer(names=("f",), **options), ScoredTokens(llama), ""
        for i in range(0, len(text) + 1, size):
            letters = [Token(3 + ord(c), c, Logprob(3 + ord(c), c, -1.0)) for c in text[i : i + size]]  # bytes
            scored.push(letters)
            for delta in answer.push(text[i : i + size]) + (answer.end() if i + size > len(text) else []):
                if delta.kind == "content":
                    tokens = scored.take(delta.end - len(delta.text), delta.end)
                    found += "".join(token.logprob.text for token in tokens)
        assert found == "".join(text for kind, text in expected if kind == "content"), size


def test_arguments_arrive_before_the_call_is_complete() -> None:
    answer = Answer(HERMES, ("f",))
    deltas = answer.push('<tool_call>{"name": "f", "arguments": {"x": "abc')
    assert [(delta.kind, delta.text) for delta in deltas] == [("call", "f"), ("arguments", '{"x": "abc')]


def test_styles() -> None:
    assert style_of("{{ messages }}") == (HERMES, False)
    assert style_of("{% if tools %}<tool_call>{% endif %}") == (HERMES, True)
    assert style_of("{% if tools %}[TOOL_CALLS]{% endif %}") == (MISTRAL, True)
    assert style_of("{% if tools %}<|python_tag|>{% endif %}") == (LLAMA3, True)
    assert style_of("{% if tools %}<|start|>functions.{% endif %}") == (HARMONY, True)
    assert style_of("{% if tools %}<tool_call><function=f>{% endif %}") == (HERMES, False)
    assert len(call_id(MISTRAL)) == 9 and call_id(MISTRAL).isalnum() and call_id(HERMES).startswith("call_")


@pytest.mark.parametrize(
    ("name", "style", "knows_tools"),
    [
        ("meta-llama-Llama-3.2-3B-Instruct", LLAMA3, True),
        ("Qwen-Qwen2.5-7B-Instruct", HERMES, True),
        ("Qwen-Qwen3-0.6B", HERMES, True),
        ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", HERMES, True),
        ("mistralai-Mistral-Nemo-Instruct-2407", MISTRAL, True),
        ("Mistral-Small-3.2-24B-Instruct-2506", MISTRAL, True),
        ("openai-gpt-oss-120b", HARMONY, True),
        ("Qwen3-Coder", HERMES, False),  # calls in XML
        ("google-gemma-2-2b-it", HERMES, False),
        ("microsoft-Phi-3.5-mini-instruct", HERMES, False),
    ],
)
def test_styles_of_real_templates(name: str, style: ToolStyle, knows_tools: bool) -> None:
    assert style_of(templates()[name]) == (style, knows_tools)


def test_tools_for_a_template_that_knows_none() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "warm", "tool_call_id": "1"},
    ]
    system, user, assistant, result = with_generic_prompt(messages, [tool])
    assert system["content"].startswith("Be brief.\n\n") and '{"name": "f", "parameters": {}}' in system["content"]
    assert (user, result["role"]) == (messages[1], "user")
    assert assistant["content"] == '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert with_generic_prompt(messages, [])[0] == messages[0]


def test_schemas_of_calls_keep_their_references() -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "null"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    found = call_schema([tool], LLAMA3)
    assert found["$defs"]["tool0"]["properties"]["x"] == {"$ref": "#/$defs/tool0/$defs/X"}
    assert json.loads(json.dumps(found))["anyOf"][0]["required"] == ["name", "parameters"]


@pytest.mark.parametrize(
    "name", ["meta-llama-Llama-3.2-3B-Instruct", "Qwen-Qwen3-0.6B", "mistralai-Mistral-Nemo-Instruct-2407"]
)
def test_real_templates_show_tools_calls_and_results(name: str) -> None:
    style, _ = style_of(templates()[name])
    tool = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {}}}
    call = {"id": call_id(style), "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "warm", "tool_call_id": call["id"]},
    ]
    text = render(templates()[name], messages, bos_token="<s>", eos_token="</s>", tools=[tool])
    assert '"of a city"' in text and '"city": "Rome"' in text and "warm" in text


def test_the_template_of_gpt_oss_shows_calls_and_results() -> None:
    """It has one call in a message, and names the result after the last call."""
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": {"city": city}}}
        for name, city in (("weather", "Rome"), ("time", "Oslo"))
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "noon", "tool_call_id": "time"},
        {"role": "tool", "content": "warm", "tool_call_id": "weather"},
    ]
    tools = [described({"type": "function", "function": {"name": name}}) for name in ("weather", "time")]
    text = render(
        templates()["openai-gpt-oss-120b"], harmony_messages(messages), bos_token="", eos_token="", tools=tools
    )
    assert "type weather = () => any;" in text
    assert text.endswith(
        "<|start|>user<|message|>hello<|end|><|start|>assistant<|channel|>analysis<|message|>hm\n\nI look.<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"warm"<|end|>'
        '<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
        '<|start|>functions.time to=assistant<|channel|>commentary<|message|>"noon"<|end|><|start|>assistant'
    )
    rest = [{"role": "assistant", "content": "a", "reasoning_content": "b"}, {"role": "tool", "content": "c"}]
    assert harmony_messages(rest) == rest


@pytest.mark.parametrize("ids", [("0", "1", "0"), ("", "", ""), ("0", "0", "0")])
def test_results_follow_their_calls(ids: tuple[str, ...]) -> None:
    """Also where ids begin anew in every turn, or are missing: results are then in the order of the calls."""

    def turn(*numbers: int) -> list[dict[str, Any]]:
        calls = [{"id": ids[i], "function": {"name": f"f{i}", "arguments": {}}} for i in numbers]
        results = [{"role": "tool", "content": f"r{i}", "tool_call_id": ids[i]} for i in numbers]
        return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]

    messages = [*turn(0, 1), {"role": "assistant", "content": "so"}, *turn(2)]
    shown = [m["content"] or m["tool_calls"][0]["function"]["name"] for m in harmony_messages(messages)]
    assert shown == ["f0", "r0", "f1", "r1", "so", "f2", "r2"]


@pytest.mark.parametrize(
    "schema", [{"type": "integer", "enum": [1, 2], "default": 1}, {"enum": ["a"], "default": None}]
)
def test_defaults_that_the_template_of_gpt_oss_would_refuse(schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema, "y": {}}}}}
    messages = [{"role": "user", "content": "hello"}]
    text = render(templates()["openai-gpt-oss-120b"], messages, bos_token="", eos_token="", tools=[described(tool)])
    assert f"default: {json.dumps(schema['default'])}" in text


def test_blocks_of_several_calls_keep_their_inputs() -> None:
    blocks, answer = Blocks(), Answer(HERMES, ("f",))
    other = HERMES_CALL.replace(ARGUMENTS, "{}")
    list(blocks.add([*answer.push(f"{HERMES_CALL}\n{other}\n{HERMES_CALL}"), *answer.end()]))
    list(blocks.close())
    assert [block["input"] for block in blocks.found] == [json.loads(ARGUMENTS), {}, json.loads(ARGUMENTS)]


def test_closed_schemas() -> None:
    """Wherever a schema has objects; not what only looks like one, and not what says it."""
    one: dict[str, Any] = {"type": "object", "properties": {"a": {}}}
    shut, free = {**one, "additionalProperties": False}, {"type": ["object", "null"], "additionalProperties": True}
    plain: list[Any] = [
        free,
        True,
        {"enum": [one]},
        {"const": one},
        {"type": 5},
        {"properties": {"type": {}}}["properties"],
    ]
    for schema in plain:
        assert closed(schema) == schema
    assert closed(one) == shut and closed({"type": ["object", "null"]})["additionalProperties"] is False
    for key in ("properties", "$defs", "definitions"):
        assert closed({key: {"b": one}})[key] == {"b": shut}
    for key in ("anyOf", "oneOf", "prefixItems"):
        assert closed({key: [one, one]})[key] == [shut, shut]
    assert closed({"items": {"items": one}}) == {"items": {"items": shut}}
    assert closed({"type": "object", "additionalProperties": one})["additionalProperties"] == shut


CALL = '{"name": "f", "arguments": {"x": 1}}'
LLAMA3_CALL = CALL.replace("arguments", "parameters")
EITHER = [  # style, texts that match, texts that do not
    (HERMES, [f"<tool_call>\n{CALL}\n</tool_call>"], [CALL, "<tool_call>\n{}\n</tool_call>"]),
    (LLAMA3, [LLAMA3_CALL, f"<|python_tag|>{LLAMA3_CALL}"], [CALL, "<|python_tag|>true"]),
    (MISTRAL, [f"[TOOL_CALLS][{CALL}]"], [CALL, f"[TOOL_CALLS]{CALL}", "[TOOL_CALLS][true]"]),
]


@pytest.mark.parametrize(("style", "calls", "others"), EITHER, ids=["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("control", [True, False])
def test_a_call_or_an_answer(style: ToolStyle, calls: list[str], others: list[str], control: bool) -> None:
    """Where the beginning of a call is a control token, and where it is text."""
    vocabulary = spm_vocab(289)
    if control:
        vocabulary["tokenizer.ggml.tokens"][288] = style.begin
        vocabulary["tokenizer.ggml.token_type"][288] = 3
    tokenizer = Tokenizer.from_gguf(vocabulary)
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}
    tool = {"function": {"name": "f", "parameters": parameters}}
    schemas = call_schema([tool], style), {"type": "boolean"}
    several, single = (Grammar.lark(call_or_answer(*schemas, style, tokenizer, parallel)) for parallel in (True, False))
    tokens = GrammarVocabulary(tokenizer, 289)

    def matches(text: str, grammar: Grammar = several) -> bool:
        ids = [id for part in re.split(f"({re.escape(style.begin)})", text) for id in pieces(part)]
        matcher = Matcher(grammar, tokens)
        for id in ids:
            if not allowed_tokens(matcher.mask(), 289)[id]:
                return False
            matcher.accept(id)
        return matcher.finished

    def pieces(part: str) -> list[int]:
        return tokenizer.encode(part, bos=False) if part == style.begin and control else tokenizer.encode_inner(part)

    for text in ["true", *calls, f"{calls[0]}\n{calls[0]}"]:
        assert matches(text), text
    for text in ["tru", "1", "", *others]:
        assert not matches(text), text
    assert matches(calls[0], single) and matches("true", single) and not matches(f"{calls[0]}\n{calls[0]}", single)


MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")


@pytest.mark.parametrize("control", [True, False])
def test_calls_of_gpt_oss(control: bool) -> None:
    """Forced after the beginning of their header, and beside an answer."""
    vocabulary = spm_vocab(288 + len(MARKS))
    if control:
        vocabulary["tokenizer.ggml.tokens"][288:] = list(MARKS)
        vocabulary["tokenizer.ggml.token_type"][288:] = 3
    tokenizer = Tokenizer.from_gguf(vocabulary)
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}
    tools = [
        {"function": {"name": "f", "parameters": schema}},
        {"function": {"name": "g", "parameters": {"title": "G"}}},
    ]
    tokens = GrammarVocabulary(tokenizer, tokenizer.vocab_size)

    def matches(text: str, answer: Any) -> bool:
        matcher = Matcher(Grammar.lark(harmony_calls(tools, tokenizer, answer)), tokens)
        for part in re.split(r"(<\|\w+\|>)", text):
            for id in tokenizer.encode(part, bos=False) if part in MARKS and control else tokenizer.encode_inner(part):
                if not allowed_tokens(matcher.mask(), tokenizer.vocab_size)[id]:
                    return False
                matcher.accept(id)
        return matcher.finished

    def call(name: str, arguments: str) -> str:
        return f"{name} <|constrain|>json<|message|>{arguments}"

    right = call("f", '{"x": 1}')
    assert matches(right, None) and matches(call("g", '{"y": "z"}'), None)
    for wrong in (call("f", '{"y": 1}'), call("g", "null"), call("h", '{"x": 1}'), '{"x": 1}', "true"):
        assert not matches(wrong, None), wrong
    boolean = {"type": "boolean"}
    assert matches("<|channel|>final<|message|>true", boolean) and matches(HARMONY.begin + right, boolean)
    for wrong in ("true", right, HARMONY.begin + call("f", "true")):
        assert not matches(wrong, boolean), wrong
