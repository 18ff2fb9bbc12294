"""The server, driven by real clients: OpenAI's chat and completions, operation, hostile requests."""

import asyncio
import dataclasses
import http.client as http_client
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import openai
import pydantic
import pytest
from serving import MODEL, Served, served

from llamagpu import Sampling

KEY = "a key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
SLOTS, QUEUE = 4, 2
DEADLINE_S = 60.0
HELLO = [{"role": "user", "content": "hello you"}]
GREEDY = {"temperature": 0, "max_tokens": 12}
SEEDED = {"temperature": 1, "seed": 3, "max_tokens": 12}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/Days"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"Days": {"type": "integer", "minimum": 0, "maximum": 9}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}


@pytest.fixture(scope="module")
def server(gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    with served(folder, "-np", str(SLOTS), "--queue", str(QUEUE), "--api-key", KEY, "--max-body", "1") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=HEADERS, timeout=DEADLINE_S) as found:
        yield found


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of all events; the last one is [DONE]."""
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line and not line.startswith(":")]
    assert data.pop() == "[DONE]"
    return [json.loads(line) for line in data]


def busy_slots(http: httpx.Client) -> int:
    return sum(slot["is_processing"] for slot in http.get("/slots").json())


def wait_until_idle(http: httpx.Client) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while busy_slots(http):
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Chat


def test_chat_and_its_stream_agree(client: openai.OpenAI, http: httpx.Client) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, **SEEDED)
    choice = whole.choices[0]
    assert (choice.finish_reason, choice.message.role, whole.model) == ("length", "assistant", MODEL)
    assert whole.usage and whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    body = {"messages": HELLO, **SEEDED, "stream_options": {"include_usage": True}}
    first, *middle, finish, usage = events(http, "/v1/chat/completions", body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == choice.message.content
    assert finish["choices"][0]["delta"] == {} and finish["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 12
    assert all(chunk["usage"] is None for chunk in (first, *middle, finish))
    assert {chunk["object"] for chunk in (first, finish, usage)} == {"chat.completion.chunk"}


def test_choices_have_seeds_of_their_own(client: openai.OpenAI) -> None:
    several = client.chat.completions.create(model=MODEL, messages=HELLO, n=3, **SEEDED)
    alone = [client.chat.completions.create(model=MODEL, messages=HELLO, **{**SEEDED, "seed": 3 + i}) for i in range(3)]
    assert [c.message.content for c in several.choices] == [one.choices[0].message.content for one in alone]
    assert len({c.message.content for c in several.choices}) == 3
    assert several.usage and several.usage.completion_tokens == 36


def test_concurrent_requests_get_what_they_get_alone(server: Served, client: openai.OpenAI) -> None:
    def body(i: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"hello you {'and you ' * i}"}]
        return {"model": MODEL, "messages": messages, "temperature": i % 2, "seed": i, "max_tokens": 4 + 3 * i}

    async def together() -> list[str | None]:
        many = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=DEADLINE_S)
        async with many:
            found = await asyncio.gather(*(many.chat.completions.create(**body(i)) for i in range(SLOTS + QUEUE)))
        return [one.choices[0].message.content for one in found]

    alone = [client.chat.completions.create(**body(i)).choices[0].message.content for i in range(SLOTS + QUEUE)]
    assert asyncio.run(together()) == alone


def test_log_probabilities(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, **GREEDY)
    logs = found.choices[0].logprobs
    assert logs and logs.content and len(logs.content) == 12
    for log in logs.content:
        assert log.logprob <= 0 and [log.token, log.logprob] == [log.top_logprobs[0].token, log.top_logprobs[0].logprob]
        assert len(log.top_logprobs) == 2 and log.bytes
    streamed = client.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, stream=True, **GREEDY
    )
    seen = [log for chunk in streamed if (found := chunk.choices[0].logprobs) for log in found.content or []]
    assert [log.logprob for log in seen] == pytest.approx([log.logprob for log in logs.content], abs=1e-4)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "logit_bias"])
def test_sampling_fields_work_or_are_refused(client: openai.OpenAI, name: str) -> None:
    value: Any = {"10": -100} if name == "logit_bias" else 1.5
    if name in {field.name for field in dataclasses.fields(Sampling)}:
        assert client.chat.completions.create(model=MODEL, messages=HELLO, **GREEDY, **{name: value}).choices
    else:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=HELLO, **GREEDY, **{name: value})
        assert caught.value.param == name
    zero: Any = {} if name == "logit_bias" else 0
    assert client.chat.completions.create(model=MODEL, messages=HELLO, **GREEDY, **{name: zero}).choices


def test_structured_output(client: openai.OpenAI) -> None:
    class Animal(pydantic.BaseModel):
        tame: bool
        legs: int = pydantic.Field(ge=0, le=8)

    found = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Animal, temperature=1, seed=1, max_tokens=200
    )
    assert isinstance(found.choices[0].message.parsed, Animal) and found.choices[0].finish_reason == "stop"
    body: Any = {"messages": HELLO, "response_format": {"type": "json_object"}, "temperature": 1, "seed": 5}
    text = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(model=MODEL, stream=True, max_tokens=30, **body)
    )
    assert text.startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_tool_calls(client: openai.OpenAI, choice: Any) -> None:
    tools: Any = [WEATHER] if choice == "required" else [TIME, WEATHER]
    request: Any = {"tools": tools, "tool_choice": choice, "temperature": 1, "seed": 2, "max_tokens": 200}
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, **request)
    assert whole.choices[0].finish_reason == "tool_calls" and whole.choices[0].message.tool_calls
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    name, pieces, reasons = "", [], []
    for chunk in client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **request):
        reasons.append(chunk.choices[0].finish_reason)
        for part in chunk.choices[0].delta.tool_calls or ():
            assert part.index == 0 and part.function
            name += part.function.name or ""
            pieces.append(part.function.arguments or "")
    assert (name, "".join(pieces), reasons[-1]) == ("weather", call.function.arguments, "tool_calls")
    assert len(pieces) > 2  # they arrive as they are generated


@pytest.mark.parametrize(
    ("choice", "first", "called"),
    [("auto", "<", True), ("auto", "{", False), ("none", "<", False), ("required", "{", True)],
)
def test_tools_with_a_schema(client: openai.OpenAI, choice: Any, first: str, called: bool) -> None:
    """A call or an answer, as the model begins. The bias decides that, and that the text ends where it may."""

    class Animal(pydantic.BaseModel):
        tame: bool

    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    request: Any = {"tools": [strict], "tool_choice": choice, "response_format": Animal, "max_tokens": 200}
    request |= {"logit_bias": {str(3 + ord(first)): 100, "2": 100}, "temperature": 1, "seed": 4}
    found = client.chat.completions.parse(model=MODEL, messages=HELLO, **request).choices[0]
    if called:
        assert found.finish_reason == "tool_calls" and not found.message.content and found.message.tool_calls
        assert json.loads(found.message.tool_calls[0].function.arguments)["city"] in ("Rome", "Oslo")
    else:
        assert found.finish_reason == "stop" and isinstance(found.message.parsed, Animal)
        assert not found.message.tool_calls


TOWNS = {
    "type": "object",
    "properties": {"towns": {"type": "array", "items": {"$ref": "#/$defs/Town"}, "minItems": 1, "maxItems": 1}},
    "required": ["towns"],
    "$defs": {"Town": {"type": "object", "properties": {"large": {"type": "boolean"}}, "required": ["large"]}},
}


@pytest.mark.parametrize("strict", [True, False])
def test_strict_schemas_have_no_other_keys(client: openai.OpenAI, http: httpx.Client, strict: bool) -> None:
    """The bias has a comma wherever one may come: another key follows."""
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": TOWNS, "strict": strict}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": TOWNS, "strict": strict}}
    request: Any = {"messages": HELLO, "max_tokens": 200, "logit_bias": {str(3 + ord(",")): 100}, "temperature": 0}
    called = client.chat.completions.create(model=MODEL, tools=[tool], tool_choice="required", **request).choices[0]
    answered = client.chat.completions.create(model=MODEL, response_format=form, **request).choices[0]
    assert called.message.tool_calls and answered.message.content
    for text in (called.message.tool_calls[0].function.arguments, answered.message.content):
        if strict:
            (town,) = json.loads(text)["towns"]
            assert json.loads(text).keys() == {"towns"} and town.keys() == {"large"}
        else:
            with pytest.raises(json.JSONDecodeError):
                json.loads(text)
    prompt = http.post("/apply-template", json={"messages": HELLO, "tools": [tool]}).json()["prompt"]
    assert "strict" not in prompt and ("additionalProperties" in prompt) == strict


@pytest.mark.parametrize("count", [1, 8, 40])
def test_calls_that_are_cut_short(client: openai.OpenAI, count: int) -> None:
    """They are no content, with their name or without."""
    request: Any = {"tools": [WEATHER], "tool_choice": "required", "temperature": 1, "seed": 2, "max_tokens": count}
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, **request).choices[0]
    assert whole.finish_reason == "length" and not whole.message.content
    assert bool(whole.message.tool_calls) == (count == 40)
    for chunk in client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, **request):
        assert not chunk.choices[0].delta.content


def test_tool_results_reach_the_prompt(http: httpx.Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "warm"}]},
    ]
    prompt = http.post("/apply-template", json={"messages": messages, "tools": [WEATHER]}).json()["prompt"]
    assert '<tool_call>{"arguments": {"city": "Rome"}' in prompt or '{"name": "weather"' in prompt
    assert "<|im_start|>tool\nwarm<|im_end|>" in prompt and "The weather of a city" in prompt
    without = http.post("/apply-template", json={"messages": messages, "tools": [WEATHER], "tool_choice": "none"})
    assert "The weather of a city" not in without.json()["prompt"]


def test_reasoning_is_separated(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "think"}]
    found = client.chat.completions.create(model=MODEL, messages=messages, **SEEDED)
    message: Any = found.choices[0].message
    assert message.content == "" and message.reasoning_content
    schema = {"name": "flag", "schema": {"type": "boolean"}}
    form: Any = {"type": "json_schema", "json_schema": schema}
    answer = client.chat.completions.create(model=MODEL, messages=messages, response_format=form)
    assert answer.choices[0].message.content in ("true", "false")  # the grammar is of the answer


# Completions


def test_completions(client: openai.OpenAI, http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"content": "the quick", "add_special": True}).json()["tokens"]
    both = client.completions.create(model=MODEL, prompt=["the quick", "hello"], temperature=0)
    of_ids = client.completions.create(model=MODEL, prompt=ids, temperature=0)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert of_ids.choices[0].text == both.choices[0].text
    assert of_ids.usage and of_ids.usage.completion_tokens == 16  # the API's default
    echoed = client.completions.create(model=MODEL, prompt="the quick", temperature=0, echo=True, max_tokens=4)
    assert echoed.choices[0].text.startswith("the quick")
    chunks = events(http, "/v1/completions", {"prompt": "the quick", "temperature": 0})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == of_ids.choices[0].text
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_log_probabilities_of_completions(client: openai.OpenAI) -> None:
    letters = {str(id): 100 for id in range(260, 286)}  # the model's other tokens are bytes
    request: Any = {"model": MODEL, "prompt": "the quick", "temperature": 0, "logprobs": 1, "logit_bias": letters}
    choice = client.completions.create(**request).choices[0]
    logs = choice.logprobs
    assert logs and logs.tokens and logs.token_logprobs and len(logs.token_logprobs) == 16
    assert "".join(logs.tokens) == choice.text and logs.text_offset == list(range(16))
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(stream=True, **request)]
    assert [offset for found in streamed if found for offset in found.text_offset or ()] == logs.text_offset


def test_log_probabilities_end_with_the_text(client: openai.OpenAI, http: httpx.Client) -> None:
    """What a stop string cuts off has none, in streams either."""
    letters = {str(id): 100 for id in range(260, 286)}
    sampled: Any = {"temperature": 1, "seed": 11, "max_tokens": 30, "logit_bias": letters}
    request: Any = {**sampled, "prompt": "the quick", "logprobs": 1}
    text = client.completions.create(model=MODEL, **request).choices[0].text
    request["stop"] = [text[10:13], text[10:12] + "!"]
    ended = client.completions.create(model=MODEL, **request).choices[0]
    assert ended.text == text[: text.index(text[10:13])] and ended.logprobs and ended.logprobs.tokens
    assert "".join(ended.logprobs.tokens) == ended.text
    streamed = [chunk["choices"][0] for chunk in events(http, "/v1/completions", request)]
    assert [t for one in streamed if one["logprobs"] for t in one["logprobs"]["tokens"]] == ended.logprobs.tokens
    chat: Any = {**sampled, "messages": HELLO, "logprobs": True}
    content = client.chat.completions.create(model=MODEL, **chat).choices[0].message.content
    chat["stop"] = content[10:13]
    whole = client.chat.completions.create(model=MODEL, **chat).choices[0]
    logs = whole.logprobs.content
    assert whole.message.content == "".join(log.token for log in logs) == content[: content.index(content[10:13])]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in events(http, "/v1/chat/completions", chat)]
    assert [log["token"] for one in streamed if one for log in one["content"]] == [log.token for log in logs]


def test_stop_strings(client: openai.OpenAI, http: httpx.Client) -> None:
    request: Any = {"prompt": "the quick", "temperature": 1, "seed": 11, "max_tokens": 40}
    text = client.completions.create(model=MODEL, **request).choices[0].text
    stop = text[10:13]
    ended = client.completions.create(model=MODEL, stop=[stop, "no such text"], **request).choices[0]
    assert (ended.text, ended.finish_reason) == (text[: text.index(stop)], "stop")
    chunks = events(http, "/v1/completions", {**request, "stop": stop})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ended.text


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}},
        {"response_format": {"type": "text"}, "json_schema": {"enum": ["yes", "no"]}},
        {"grammar": 'root ::= "\\"yes\\"" | "\\"no\\""'},
        {"grammar": 'start: "\\"yes\\"" | "\\"no\\""', "tools": [WEATHER], "tool_choice": "none"},
    ],
    ids=["response_format", "json_schema", "gbnf", "lark"],
)
def test_formats(http: httpx.Client, given: dict[str, Any]) -> None:
    """Of both endpoints, and of streams. `grammar` and `json_schema` are llama.cpp's."""
    body = {**given, "temperature": 1, "seed": 1, "max_tokens": 30}
    text = http.post("/v1/completions", json={"prompt": "one two", "n": 2, **body}).json()["choices"][1]["text"]
    chat = http.post("/v1/chat/completions", json={"messages": HELLO, **body}).json()["choices"][0]
    chunks = events(http, "/v1/completions", {"prompt": "one two", **body})
    streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert {text, chat["message"]["content"], streamed} <= {'"yes"', '"no"'} and chat["finish_reason"] == "stop"


def test_formats_that_are_refused(http: httpx.Client) -> None:
    json_object, grammar = {"type": "json_object"}, 'root ::= "a"'
    cases: list[tuple[str, dict[str, Any]]] = [
        ("json_schema", {"response_format": json_object, "json_schema": {}}),
        ("grammar", {"response_format": json_object, "grammar": grammar}),
        ("grammar", {"json_schema": {}, "grammar": grammar}),
        ("grammar", {"grammar": "root ::= other"}),
        ("grammar", {"grammar": 5}),
        ("json_schema", {"json_schema": {"type": 5}}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("top_p", {"response_format": json_object, "top_p": 2}),
    ]
    chat = ("/v1/chat/completions", {"messages": HELLO})
    for path, body in (chat, ("/v1/completions", {"prompt": "one two"})):
        for name, given in cases:
            response = http.post(path, json={**body, "max_tokens": 2, **given})
            check_error(response)
            assert name in response.json()["error"]["param"], (path, given, response.text)
    for choice in ("auto", "required"):
        given = {"grammar": grammar, "tools": [WEATHER], "tool_choice": choice}
        assert http.post(chat[0], json={**chat[1], **given}).json()["error"]["param"] == "grammar"
    assert http.post(chat[0], json={**chat[1], "grammar": "", "json_schema": None, "max_tokens": 2}).status_code == 200


def test_prompts_are_cached_unless_told_otherwise(http: httpx.Client) -> None:
    body = {"prompt": "a prompt of this test " * 6, "temperature": 0, "max_tokens": 2}
    cached = [
        http.post("/v1/completions", json={**body, "cache_prompt": keep}).json()["usage"]["prompt_tokens_details"]
        for keep in (True, True, False)
    ]
    assert [found["cached_tokens"] > 64 for found in cached] == [False, True, False]


# Operation


def test_models_and_keys(server: Served, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    for key in ("a ke", "another", "é"):
        found = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}".encode()})
        assert found.status_code == 401 and found.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": KEY}).status_code == 200
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_other_origins_are_refused(server: Served) -> None:
    foreign = httpx.get(f"{server.url}/health", headers={"Origin": "https://example.com"})
    assert foreign.status_code == 403 and "access-control-allow-origin" not in foreign.headers
    assert httpx.get(f"{server.url}/health", headers={"Origin": server.url}).status_code == 200


def test_tokens_and_templates(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"content": "the quick fox"}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["content"].strip() == "the quick fox"
    pieces = http.post("/tokenize", json={"content": "ab", "with_pieces": True}).json()["tokens"]
    assert "".join(piece["piece"] for piece in pieces).strip() == "ab"
    prompt = http.post("/apply-template", json={"messages": HELLO}).json()["prompt"]
    assert prompt == "<|im_start|>user\nhello you<|im_end|>\n<|im_start|>assistant\n"


def test_metrics(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "temperature": 0})
    text = http.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["llamagpu_generated_tokens_total"]) >= 3
    assert float(values['llamagpu_requests_total{route="/v1/completions",status="200"}']) >= 1
    assert values["llamagpu_slots"] == str(SLOTS)
    for name in ("time_to_first_token_seconds", "inter_token_seconds"):
        assert values[f'llamagpu_{name}_bucket{{le="+Inf"}}'] == values[f"llamagpu_{name}_count"] != "0"


def test_access_log(server: Served, http: httpx.Client) -> None:
    http.get("/v1/models/no%0asuch%1bmodel")
    deadline = time.monotonic() + DEADLINE_S
    while not (found := [line for line in server.lines if "such" in line]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert found[0].startswith("127.0.0.1 GET /v1/models/no?such?model 404 ")


# Clients that go away, and too many of them

LONG = {"messages": HELLO, "max_tokens": 1900, "temperature": 0}


def test_a_client_that_goes_away_frees_its_slot(server: Served, http: httpx.Client) -> None:
    with http.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as response:
        next(response.iter_lines())
    wait_until_idle(http)
    body = json.dumps(LONG).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}"
    )
    for half_closed in (True, False):
        with socket.create_connection(server.url.removeprefix("http://").split(":")) as connection:  # type: ignore[arg-type]
            connection.sendall(f"{head}\r\n\r\n".encode() + body)
            deadline = time.monotonic() + DEADLINE_S
            while not busy_slots(http):
                assert time.monotonic() < deadline
            if half_closed:
                connection.shutdown(socket.SHUT_WR)
                wait_until_idle(http)
        wait_until_idle(http)
    pages = [line for line in http.get("/metrics").text.splitlines() if line.startswith("llamagpu_kv_pages_used ")]
    assert pages == ["llamagpu_kv_pages_used 0"]


def test_a_client_that_does_not_read(server: Served, http: httpx.Client) -> None:
    """It holds up nobody, and gets all of its text when it reads. HTTP/1.0 has no chunks."""
    wanted = {**LONG, "max_tokens": 300, "logprobs": True, "top_logprobs": 20, "stream": True}
    lines = http.post("/v1/chat/completions", json=wanted).text.splitlines()
    body = json.dumps(wanted).encode()
    for version in ("1.1", "1.0"):
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, port = server.url.removeprefix("http://").split(":")
            connection.connect((host, int(port)))
            head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: x\r\nAuthorization: Bearer {KEY}"
            head += f"\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            assert http.post("/v1/chat/completions", json={**LONG, "max_tokens": 2}).status_code == 200
            wait_until_idle(http)
            response = http_client.HTTPResponse(connection)
            response.begin()
            assert (response.getheader("Transfer-Encoding") == "chunked") == (version == "1.1")
            found = response.read().decode().splitlines()
        assert content_of(found) == content_of(lines) and found[-2:] == ["data: [DONE]", ""]


def content_of(lines: list[str]) -> str:
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def test_a_full_queue_refuses(server: Served, http: httpx.Client) -> None:
    async def fill() -> httpx.Response:
        async with httpx.AsyncClient(base_url=server.url, headers=HEADERS, timeout=DEADLINE_S) as many:
            streams = [
                many.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) for _ in range(SLOTS + QUEUE)
            ]
            await asyncio.gather(*(stream.__aenter__() for stream in streams))
            refused = await many.post("/v1/chat/completions", json=LONG)
            await asyncio.gather(*(stream.__aexit__(None, None, None) for stream in streams))
            return refused

    refused = asyncio.run(fill())
    assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    wait_until_idle(http)


# Hostile requests

DEEP = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
NESTED = b'{"messages": [], "x": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001
BODIES = [
    b"", b"null", b"[]", b"{", b'"text"', b"\xff\xfe", b"{}", b"\x00", DEEP, NESTED,
    b'{"messages": NaN}', b'{"messages": null}', b'{"messages": []}', b'{"messages": [{}]}', b'{"messages": [1]}',
    b'{"messages": [{"role": "king", "content": "x"}]}', b'{"messages": [{"role": "user", "content": 1}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"messages": [{"role": "user", "content": "\xff"}]}',
]  # fmt: skip
FIELDS: list[tuple[str, Any]] = [
    ("temperature", -1), ("temperature", "hot"), ("temperature", 1e400), ("temperature", True), ("top_p", 2),
    ("top_k", -5), ("top_k", 1.5), ("min_p", 10**40), ("max_tokens", -7), ("max_tokens", "many"), ("n", 0),
    ("n", 10**9), ("seed", "x"), ("stop", 5), ("stop", ["x"] * 100), ("stop", ["x" * 5000]), ("logit_bias", {"x": 1}),
    ("logit_bias", {"99999999999999999999": 1}), ("logit_bias", [1]), ("top_logprobs", 3), ("stream_options", 4),
    ("response_format", {"type": "xml"}), ("response_format", {"type": "json_schema"}), ("response_format", "json"),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/no"}}}),
    ("tools", [{"type": "function"}]), ("tools", "all"), ("tool_choice", "required"), ("tool_choice", "maybe"),
    ("tool_choice", {"type": "function", "function": {"name": "no"}}), ("model", 5), ("model", "other"),
    ("chat_template_kwargs", {"messages": []}), ("repeat_penalty", 0),
    ("n", SLOTS + QUEUE + 1), ("functions", [{"name": "f"}]), ("modalities", ["text", "audio"]),
    ("messages", [{"role": "user", "content": "a" * 90_000}]),
]  # fmt: skip


def check_error(response: httpx.Response) -> None:
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert isinstance(error["message"], str) and error["message"] and {"type", "param", "code"} <= error.keys()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_bodies_that_are_no_requests(http: httpx.Client, path: str) -> None:
    for body in BODIES:
        check_error(http.post(path, content=body))
    assert http.get("/health").status_code == 200


def test_fields_with_wrong_values(http: httpx.Client) -> None:
    for name, value in FIELDS:
        raw = json.dumps({"messages": HELLO, "max_tokens": 2, name: value}).replace("Infinity", "1e400")
        response = http.post("/v1/chat/completions", content=raw)
        check_error(response)
        assert name in (response.json()["error"]["param"] or ""), (name, response.text)


@pytest.mark.parametrize(
    "path, body, name",
    [
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "a"}]}, "messages[0].role"),
        ("/v1/responses", {}, "input"),
        ("/tokenize", {}, "content"),
    ],
)
def test_fields_that_are_missing(http: httpx.Client, path: str, body: Any, name: str) -> None:
    response = http.post(path, json=body)
    check_error(response)
    assert response.json()["error"]["param"] == name


@pytest.mark.parametrize(
    "prompt",
    [5, [], [[]], ["a", 1], [-1], [10**30], [[1, 288]], "", "a" * 90_000, {"a": 1}, [None], [["a"]]],
    ids=lambda value: repr(value)[:12],
)
def test_prompts_that_are_none(http: httpx.Client, prompt: Any) -> None:
    response = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    if prompt == "":
        assert response.status_code == 200  # the model begins with BOS
    else:
        check_error(response)


def test_deep_schemas(http: httpx.Client) -> None:
    for levels in (20, 120, 200, 300, 460):
        schema: dict[str, Any] = {"type": "object"}
        for _ in range(levels):
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
        form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}
        for more in ({"tools": [tool]}, {"tools": [tool], "tool_choice": "required"}, {"response_format": form}):
            raw = msgspec.json.encode({"messages": HELLO, "max_tokens": 2, **more})
            assert http.post("/v1/chat/completions", content=raw).status_code in (200, 400)


def test_sizes_paths_and_methods(http: httpx.Client, server: Served) -> None:
    assert http.post("/v1/chat/completions", content=b" " * (1 << 20) + b"{}").status_code == 413
    pieces = (b" " * 65536 for _ in range(40))
    assert http.post("/v1/chat/completions", content=pieces).status_code == 413
    assert http.post("/v1/no/such/path").json()["error"]["type"] == "invalid_request_error"
    assert http.get("/v1/chat/completions").status_code == 405
    host, port = server.url.removeprefix("http://").split(":")
    for junk in (b"\x16\x03\x01\x02\x00", b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/9\r\n\r\n"):
        with socket.create_connection((host, int(port)), DEADLINE_S) as connection:
            connection.sendall(junk)
            connection.shutdown(socket.SHUT_WR)
            assert not connection.recv(1000).startswith(b"HTTP/1.1 5")
    assert http.get("/health").status_code == 200


def test_random_requests_give_no_server_error(http: httpx.Client) -> None:
    rng = random.Random(0)
    values: list[Any] = [
        None,
        0,
        1,
        -1,
        0.5,
        2**70,
        "",
        "text",
        "\x00\u2028é😀",
        [],
        {},
        [[]],
        True,
        ["a"],
        {"a": None},
    ]
    names = ["temperature", "top_p", "top_k", "n", "stop", "seed", "tools", "tool_choice", "response_format", "stream"]
    names += [
        "json_schema",
        "grammar",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "stream_options",
        "messages",
        "max_completion_tokens",
    ]
    for _ in range(100):
        body: dict[str, Any] = {"messages": HELLO, "max_tokens": 1}
        body |= {name: rng.choice(values) for name in rng.sample(names, rng.choice([1, 1, 2, 3]))}
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code in (200, 400), (body, response.text)
    wait_until_idle(http)
