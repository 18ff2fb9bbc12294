"""The server's other APIs, driven by their own clients: embeddings, responses, Anthropic's messages."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pydantic
import pytest
from serving import EXACT, MODEL, Served, served

from llamagpu import Llama

TIMEOUT_S = 60.0
HELLO: Any = [{"role": "user", "content": "hello you"}]
GREEDY = {"temperature": 0}  # the client of messages has no argument for it
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def server(gpu: Any, folder: Any) -> Iterator[Served]:
    with served(folder) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def claude(server: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=TIMEOUT_S)


# Embeddings


def test_embeddings(client: openai.OpenAI, server: Served, folder: Any, gpu: Any) -> None:
    texts = ["a cat", "the dog sleeps"]
    found = client.embeddings.create(model=MODEL, input=texts)  # the client asks for base64
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    with Llama(folder / f"{MODEL}.gguf", device=gpu, **EXACT) as llama:
        expected, last = llama.embed(texts), llama.embed(texts[1], pooling="last")
        ids = llama.encode(texts[0])
    assert [one.index for one in found.data] == [0, 1] and found.usage.prompt_tokens > 2
    np.testing.assert_allclose([one.embedding for one in found.data], expected, atol=1e-6)
    np.testing.assert_allclose([one.embedding for one in plain.data], expected, atol=1e-6)
    of_ids = client.embeddings.create(model=MODEL, input=ids, encoding_format="float")
    np.testing.assert_allclose(of_ids.data[0].embedding, expected[0], atol=1e-6)
    body = {"input": texts[1], "pooling": "last"}
    row = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=TIMEOUT_S).json()["data"][0]["embedding"]
    np.testing.assert_allclose(row, last, atol=1e-6)
    assert abs(np.linalg.norm(row) - 1) < 1e-5 and abs(float(last @ expected[1])) < 0.999


@pytest.mark.parametrize("body", [{}, {"input": []}, {"input": ""}, {"input": [[]]}, {"input": [5000]}, {"input": {}},
                                  {"input": "a", "dimensions": 5}, {"input": "a", "encoding_format": "hex"},
                                  {"input": "a", "pooling": "max"}, {"input": "a" * 90_000}])  # fmt: skip
def test_embeddings_of_nothing(server: Served, body: dict[str, Any]) -> None:
    found = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=TIMEOUT_S)
    if body == {"input": ""}:
        assert found.status_code == 200  # of BOS
    else:
        assert found.status_code == 400 and found.json()["error"]["message"]


# Responses


def test_responses(client: openai.OpenAI) -> None:
    whole = client.responses.create(
        model=MODEL, input="hello you", instructions="Be brief.", max_output_tokens=8, temperature=0
    )
    assert whole.status == "incomplete" and whole.incomplete_details
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage and whole.usage.output_tokens == 8 and whole.output_text
    again = client.responses.create(
        model=MODEL,
        input=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hello you"}],
        max_output_tokens=8,
        temperature=0,
    )
    assert again.output_text == whole.output_text
    with client.responses.stream(
        model=MODEL, input="hello you", instructions="Be brief.", max_output_tokens=8, temperature=0
    ) as stream:
        events: list[Any] = list(stream)
    kinds = [event.type for event in events]
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert events[-2].item.status == events[-1].response.output[0].status == "incomplete"
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]


@pytest.mark.parametrize("top", [0, 2])
def test_log_probabilities_of_responses(client: openai.OpenAI, top: int) -> None:
    """Of the message's tokens, as chats have them."""
    request: Any = {"model": MODEL, "input": "hello you", "max_output_tokens": 8, "temperature": 0}
    chat = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=8, temperature=0, logprobs=True, top_logprobs=top
    )
    assert chat.choices[0].logprobs and chat.choices[0].logprobs.content
    expected = chat.choices[0].logprobs.content
    request |= {"top_logprobs": top} if top else {"include": ["message.output_text.logprobs"]}
    whole: Any = client.responses.create(**request)
    found = whole.output[0].content[0].logprobs
    assert whole.top_logprobs == top and len(found) == 8
    assert [(log.token, log.bytes) for log in found] == [(log.token, log.bytes) for log in expected]
    assert [log.logprob for log in found] == pytest.approx([log.logprob for log in expected], abs=1e-4)
    assert all([one.token for one in a.top_logprobs] == [one.token for one in b.top_logprobs]
               for a, b in zip(found, expected, strict=True))  # fmt: skip
    assert {len(log.top_logprobs) for log in found} == {top}
    events: list[Any] = list(client.responses.create(**request, stream=True))
    logs = [log.token for event in events if event.type == "response.output_text.delta" for log in event.logprobs]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert logs == [log.token for log in done.logprobs] == [log.token for log in found]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{**request, "top_logprobs": 21})
    assert refused.value.param == "top_logprobs"


def test_structured_and_called_responses(client: openai.OpenAI) -> None:
    class Town(pydantic.BaseModel):
        large: bool

    parsed = client.responses.parse(model=MODEL, input="hello", text_format=Town, temperature=1, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Town) and parsed.status == "completed"
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    stream = client.responses.create(
        model=MODEL, input="hello", tools=[tool], tool_choice="required", max_output_tokens=300, stream=True
    )
    events = list(stream)
    done: Any = events[-1]
    (call,) = done.response.output
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments and json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    later = client.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": "hello"},
            {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "warm"},
        ],
        max_output_tokens=2,
        temperature=0,
    )
    assert later.output
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="hello", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"


def test_strict_tools(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    """Arguments have no keys but those that are named: here none. A random model would write some."""
    free: Any = {"type": "object", "properties": {}}
    tools: Any = [{"type": "function", "name": "f", "parameters": free, "strict": True}]
    request: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 300}
    for seed in range(3):
        found = client.responses.create(**request, tools=tools, tool_choice="required", temperature=1 + seed / 10)
        assert [json.loads(call.arguments) for call in found.output if call.type == "function_call"] == [{}]
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": free, "strict": True}}
    assert json.loads(client.responses.create(**request, text=form).output_text) == {}
    used: Any = claude.messages.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=300,
        tools=[{"name": "f", "input_schema": free, "strict": True}],
        tool_choice={"type": "any"},
    )
    assert [(block.type, block.input) for block in used.content] == [("tool_use", {})]


# Messages


def test_messages(claude: anthropic.Anthropic) -> None:
    request: Any = {"model": MODEL, "messages": HELLO, "system": "Be brief.", "max_tokens": 8}
    request["extra_body"] = GREEDY
    whole = claude.messages.create(**request)
    assert (whole.role, whole.stop_reason, whole.usage.output_tokens) == ("assistant", "max_tokens", 8)
    text = whole.content[0].text  # type: ignore[union-attr]
    with claude.messages.stream(**request) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    assert final.content[0].text == text  # type: ignore[union-attr]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    counted = claude.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.")
    used = whole.usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)
    stopped = claude.messages.create(**{**request, "stop_sequences": ["no such text", text[3]]})
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[3])


def test_messages_with_tools(claude: anthropic.Anthropic) -> None:
    tool: Any = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
    request: Any = {"model": MODEL, "messages": HELLO, "tools": [tool], "max_tokens": 300}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        with claude.messages.stream(**request, tool_choice=choice) as stream:
            final = stream.get_final_message()
        (block,) = final.content
        assert (final.stop_reason, block.type) == ("tool_use", "tool_use")
        assert block.name == "weather" and block.input["city"] in ("Rome", "Oslo")  # type: ignore[union-attr]
        counted = claude.messages.count_tokens(model=MODEL, messages=HELLO, tools=[tool], tool_choice=choice)
        assert counted.input_tokens == final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "warm"}]}
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    assert claude.messages.create(model=MODEL, messages=messages, max_tokens=2, extra_body=GREEDY).content
    think: Any = [{"role": "user", "content": "think"}]
    thought = claude.messages.create(model=MODEL, messages=think, max_tokens=4, extra_body=GREEDY)
    assert thought.content[0].type == "thinking"


def test_structured_messages(claude: anthropic.Anthropic, server: Served) -> None:
    class Town(pydantic.BaseModel):
        large: bool

    request: Any = {"model": MODEL, "max_tokens": 200, "messages": HELLO}
    parsed = claude.messages.parse(**request, output_format=Town)
    assert isinstance(parsed.parsed_output, Town) and parsed.stop_reason == "end_turn"
    form = {"type": "json_schema", "schema": SCHEMA}
    for given in ({"output_config": {"format": form}}, {"output_format": form}):
        found = httpx.post(f"{server.url}/v1/messages", json={**request, **given}, timeout=TIMEOUT_S).json()
        assert json.loads(found["content"][0]["text"])["city"] in ("Rome", "Oslo")
    think: Any = {"model": MODEL, "messages": [{"role": "user", "content": "think"}], "output_config": {"format": form}}
    used = claude.messages.create(**think, max_tokens=2).usage  # the prompt ends the reasoning
    prompt_tokens = used.input_tokens + (used.cache_read_input_tokens or 0)
    assert claude.messages.count_tokens(**think).input_tokens == prompt_tokens
    with claude.messages.stream(**request, output_config={"format": form}) as stream:
        assert json.loads(stream.get_final_text())["city"] in ("Rome", "Oslo")
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("output_config.format.type", {"output_config": {"format": {"type": "text"}}}),
        ("output_config.format", {"output_config": {"format": {"type": "json_schema"}}}),
        ("output_config.format.schema", {"output_config": {"format": {**form, "schema": {"type": 5}}}}),
        ("output_format.type", {"output_format": {"type": "json_object"}}),
        ("output_format.schema", {"output_format": {**form, "schema": {"type": 5}}}),
        ("output_format", {"output_config": {"format": form}, "output_format": form}),
    ]
    for name, given in wrong:
        refused = httpx.post(f"{server.url}/v1/messages", json={**request, **given})
        assert refused.status_code == 400 and name in refused.json()["error"]["message"], refused.text


def test_errors_in_anthropics_shape(claude: anthropic.Anthropic, server: Served) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude", messages=HELLO, max_tokens=2)
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    with pytest.raises(anthropic.BadRequestError, match="image"):
        claude.messages.create(model=MODEL, messages=image, max_tokens=2)
    bodies: list[Any] = [{}, [], {"messages": HELLO}, {"messages": HELLO, "max_tokens": 0}, {"messages": 4}]
    for body in [*bodies, {"messages": HELLO, "max_tokens": 2, "tools": [{"name": "x", "type": "bash_20250124"}]}]:
        found = httpx.post(f"{server.url}/v1/messages", json=body)
        assert found.status_code == 400 and found.json()["type"] == "error"
        assert found.json()["error"]["type"] == "invalid_request_error"
    for path in ("responses", "messages/count_tokens"):
        assert httpx.post(f"{server.url}/v1/{path}", content=b"{").status_code == 400
