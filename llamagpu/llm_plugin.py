"""Plugin for the command `llm`: models of the catalogue as llamagpu/NAME, any other as -m llamagpu -o model FILE."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import llm
from llm.models import EmbeddingModel
from pydantic import Field

from llamagpu import Grammar, Llama, load
from llamagpu.arguments import MAX_PENALTY
from llamagpu.errors import LlamaGpuError
from llamagpu.hub.catalogue import CATALOGUE, DEFAULT

PREFIX = "llamagpu"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed")


@cache
def opened(model: str) -> Llama:
    """One of each model in a process: `llm chat` asks it again and again."""
    return load(model)


class LlamaGpuModel(llm.Model):
    can_stream = True
    supports_schema = True

    class Options(llm.Options):
        model: str | None = Field(default=None, description="A GGUF file, a name or hf:user/repo[:QUANT]")
        max_tokens: int | None = Field(default=None, ge=1, description="Most new tokens")
        temperature: float | None = Field(default=None, ge=0, description="0: the likeliest token")
        top_k: int | None = Field(default=None, ge=0, description="Keep the k likeliest tokens; 0: all")
        top_p: float | None = Field(default=None, ge=0, le=1, description="Keep the likeliest that reach this share")
        min_p: float | None = Field(default=None, ge=0, le=1, description="Drop tokens below this share of the first")
        repeat_penalty: float | None = Field(
            default=None, ge=1 / MAX_PENALTY, le=MAX_PENALTY, description="Penalty on recent tokens; 1: none"
        )
        seed: int | None = Field(default=None, ge=0, description="Seed of sampling")

    def __init__(self, model_id: str, model: str) -> None:
        self.model_id, self.model = model_id, model

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: llm.Conversation | None
    ) -> Iterator[str]:
        options: Any = prompt.options
        schema: Any = prompt.schema
        with shown_errors():
            llama = opened(options.model or self.model)
            given = {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
            run = llama.generate(
                prompt_ids(llama, messages_of(prompt)),
                max_tokens=-1 if options.max_tokens is None else options.max_tokens,
                sampling=replace(llama.sampling, **given),
                grammar=Grammar.json_schema(schema) if schema else None,
            )
            try:
                if stream:
                    yield from (token.text for token in run)
                else:
                    yield run.result().text
            finally:
                run.close()
        response.set_usage(input=run.usage.prompt_tokens, output=run.usage.completion_tokens)


class LlamaGpuEmbedding(EmbeddingModel):
    def __init__(self, model_id: str, model: str) -> None:
        self.model_id, self.model = model_id, model

    def embed_batch(self, items: Iterable[str | bytes], *, key: str | None = None) -> Iterator[list[float]]:
        with shown_errors():
            for item in items:
                yield opened(self.model).embed(str(item)).tolist()


@contextmanager
def shown_errors() -> Iterator[None]:
    """Errors as `llm` shows them: one line, without a traceback."""
    try:
        yield
    except LlamaGpuError as error:
        raise llm.ModelError(f"{error.cause}; {error.remedy}" if error.remedy else error.cause) from error


def messages_of(prompt: llm.Prompt) -> list[dict[str, str]]:
    """The whole conversation, of which `llm` keeps the log."""
    return [
        {"role": message.role, "content": "".join(getattr(part, "text", "") for part in message.parts)}
        for message in prompt.messages
    ]


def prompt_ids(llama: Llama, messages: list[dict[str, str]]) -> list[int]:
    """With the chat template; a base model continues the text."""
    if llama.tokenizer.chat_template is not None:
        return llama.encode_chat(messages)
    return llama.encode("\n\n".join(message["content"] for message in messages))


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    register(LlamaGpuModel(PREFIX, DEFAULT))
    for entry in CATALOGUE.values():
        if entry.runs:
            register(LlamaGpuModel(f"{PREFIX}/{entry.name}", entry.name))


@llm.hookimpl
def register_embedding_models(register: Callable[..., None]) -> None:
    for entry in CATALOGUE.values():
        if entry.runs:
            register(LlamaGpuEmbedding(f"{PREFIX}/{entry.name}", entry.name))
