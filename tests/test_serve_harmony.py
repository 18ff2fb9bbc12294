"""Tools and formats of gpt-oss, with its own template and a random model that has its control tokens."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from gguf_builder import spm_vocab, tiny_llama
from package_data import templates
from serving import EXACT, MODEL, served_here

from llamagpu import Llama

DEADLINE_S = 60.0
MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"]
VOCAB = 288 + len(MARKS)
CITIES = ("Rome", "Oslo")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("a/weather", "time")]
FORM: Any = {"type": "json_schema", "json_schema": {"name": "town", "schema": SCHEMA}}
REQUEST: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "temperature": 1, "seed": 3}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocabulary = spm_vocab(VOCAB) | {"tokenizer.chat_template": templates()["openai-gpt-oss-120b"]}
    vocabulary["tokenizer.ggml.tokens"][288:] = MARKS
    vocabulary["tokenizer.ggml.token_type"][288:] = 3
    folder = tmp_path_factory.mktemp("channels")
    return tiny_llama(folder / f"{MODEL}.gguf", vocab=VOCAB, context=2048, metadata=vocabulary)


def ask(path: Path, gpu: Any, **request: Any) -> Any:
    async def main() -> Any:
        async with served_here(lambda: Llama(path, device=gpu, **EXACT)) as api:
            if not request.get("stream"):
                return (await api.chat.completions.create(**REQUEST | request)).choices[0]
            return [chunk.choices[0] async for chunk in await api.chat.completions.create(**REQUEST | request)]

    return asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_a_call_that_must_come(path: Path, gpu: Any) -> None:
    found = ask(path, gpu, tools=TOOLS, tool_choice="required", max_tokens=200)
    (call,) = found.message.tool_calls
    assert found.finish_reason == "tool_calls" and not found.message.content
    assert call.function.name in ("a/weather", "time") and json.loads(call.function.arguments)["city"] in CITIES
    chunks = ask(path, gpu, tools=TOOLS, tool_choice="required", max_tokens=200, stream=True)
    parts = [part.function for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert "".join(part.name or "" for part in parts) == call.function.name
    assert "".join(part.arguments or "" for part in parts) == call.function.arguments and len(parts) > 3
    named = ask(path, gpu, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "time"}}, max_tokens=200)
    assert [call.function.name for call in named.message.tool_calls] == ["time"]


def test_an_answer_in_a_format(path: Path, gpu: Any) -> None:
    found = ask(path, gpu, response_format=FORM, max_tokens=200)
    assert json.loads(found.message.content)["city"] in CITIES and not found.message.tool_calls


@pytest.mark.parametrize("letter", "cf")
def test_a_call_or_an_answer(path: Path, gpu: Any, letter: str) -> None:
    """As the name of the channel begins: commentary or final."""
    bias = {str(id): 100 for id in (3 + ord(letter), 260 + ord(letter) - ord("a"))}
    found = ask(path, gpu, tools=TOOLS, response_format=FORM, logit_bias=bias, max_tokens=200)
    text = found.message.tool_calls[0].function.arguments if letter == "c" else found.message.content
    assert json.loads(text)["city"] in CITIES
    assert found.finish_reason == ("tool_calls" if letter == "c" else "stop")
    assert not (found.message.content if letter == "c" else found.message.tool_calls)


def test_calls_and_results_are_in_the_prompt(path: Path, gpu: Any) -> None:
    async def main() -> Any:
        async with served_here(lambda: Llama(path, device=gpu, **EXACT)) as api:
            call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": '{"city": "Rome"}'}}
            messages: Any = [
                *REQUEST["messages"],
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "noon"},
            ]
            root = str(api.base_url).removesuffix("/v1/")
            return await api.post(f"{root}/apply-template", body={"messages": messages, "tools": TOOLS}, cast_to=object)

    prompt: Any = asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert prompt["prompt"].endswith(
        '<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
        '<|start|>functions.time to=assistant<|channel|>commentary<|message|>"noon"<|end|><|start|>assistant'
    )
