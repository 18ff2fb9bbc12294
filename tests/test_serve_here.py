"""Generations that fail in the middle of a stream, and requests beside others that take long."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from gguf_builder import overflowing_llama, tiny_llama
from serving import EXACT, MODEL, TEMPLATE, served_here

from llamagpu import Llama
from llamagpu.errors import DeviceLost

DEADLINE_S = 60.0
BAD = "J"  # the logits after this character are NaN
BAD_ID = 3 + ord(BAD)
SCHEMA = {"const": f"ab{BAD}c"}


def ask(path: Path, gpu: Any, question: Any, steps: int | None = None) -> Any:
    """What a server answers that loses its device after so many steps."""

    def load() -> Llama:
        llama = Llama(path, device=gpu, **EXACT)
        llama.tokenizer.chat_template = TEMPLATE
        step, left = llama.scheduler.step, steps

        def lose() -> None:
            nonlocal left
            if left is not None:
                if not left:
                    raise DeviceLost("the device went away")
                left -= 1
            step()

        llama.scheduler.step = lose  # type: ignore[method-assign]
        return llama

    async def main() -> Any:
        async with served_here(load) as api:
            return await question(api)

    return asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return overflowing_llama(tmp_path_factory.mktemp("failures") / f"{MODEL}.gguf", BAD_ID)


@pytest.mark.parametrize("steps", [None, 3])
def test_responses_that_fail(path: Path, gpu: Any, steps: int | None) -> None:
    """By NaN, and by a device that is lost: the text so far, then response.failed."""

    async def question(api: openai.AsyncOpenAI) -> list[Any]:
        form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
        stream = await api.responses.create(model=MODEL, input="hello", text=form, stream=True)
        return [event async for event in stream]

    events = ask(path, gpu, question, steps)
    *_, text, _, item, last = events
    kinds = [event.type for event in (text, item, last)]
    assert kinds == ["response.output_text.done", "response.output_item.done", "response.failed"]
    assert text.text == f'"ab{BAD}' if steps is None else text.text
    assert (item.item.status, last.response.status) == ("incomplete", "failed")
    assert last.response.error.code == "server_error"
    assert last.response.error.message.startswith("no token can be" if steps is None else "the device went away")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert last.response.output_text == text.text


def test_chats_that_fail(path: Path, gpu: Any) -> None:
    async def question(api: openai.AsyncOpenAI) -> str:
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        messages: Any = [{"role": "user", "content": "hello"}]
        stream = await api.chat.completions.create(model=MODEL, messages=messages, response_format=form, stream=True)
        text = ""
        with pytest.raises(openai.APIError, match="no token can be sampled"):
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        return text

    assert ask(path, gpu, question) == f'"ab{BAD}'


def test_chats_beside_many_embeddings(tmp_path: Path, gpu: Any) -> None:
    """Three requests with the largest number of inputs: a chat has a step after each input, not at the end."""
    happened: list[str] = []

    def noting(what: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            happened.append(what)
            return function(*args, **options)

        return call

    def load() -> Llama:
        llama = Llama(tiny_llama(tmp_path / f"{MODEL}.gguf"), device=gpu)
        llama.tokenizer.chat_template = TEMPLATE
        llama.embed_ids = noting("input", llama.embed_ids)  # type: ignore[method-assign]
        llama.scheduler.step = noting("step", llama.scheduler.step)  # type: ignore[method-assign]
        return llama

    async def main() -> None:
        async with served_here(load) as api:
            embed = api.embeddings.create
            long = [asyncio.create_task(embed(model=MODEL, input=["a cat"] * 1024)) for _ in range(3)]
            while not happened:
                await asyncio.sleep(0.01)
            messages: Any = [{"role": "user", "content": "hello"}]
            no_end: Any = {"2": -100}
            found = await api.chat.completions.create(model=MODEL, messages=messages, max_tokens=16, logit_bias=no_end)
            assert found.usage and found.usage.completion_tokens == 16
            assert not any(task.done() for task in long)
            for task in long:
                task.cancel()
            await asyncio.gather(*long, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    first = happened.index("step")
    last = len(happened) - happened[::-1].index("step")
    assert "input input" not in " ".join(happened[first:last])
