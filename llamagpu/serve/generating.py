"""From a prompt to running generations: tokens are counted, places taken, texts begun."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from llamagpu.errors import LlamaGpuError
from llamagpu.llama import Generation, Grammar, Llama
from llamagpu.serve.engine_thread import Job, Jobs
from llamagpu.serve.errors import ApiError, as_api_error, field_of
from llamagpu.serve.parameters import Parameters
from llamagpu.serve.state import Server

T = TypeVar("T")
MAX_BYTES_PER_TOKEN = 16  # of a prompt: English has 4 to 5, and a longer prompt is not worth encoding
FINISH = {"stop": "stop", "length": "length", "context": "length"}


@asynccontextmanager
async def generating(
    server: Server, prepare: Callable[[Llama], tuple[list[Generation], T]], count: int, quick: bool = False
) -> AsyncIterator[tuple[Jobs, T]]:
    """Run what `prepare` makes, in a thread of its own unless it is `quick`: templates, tokens and grammars take their
    time."""
    llama = server.llama
    with server.engine.admitted(count):
        runs, more = prepare(llama) if quick else await asyncio.to_thread(prepare, llama)
        async with server.engine.running(runs, server.options.timeout_s) as jobs:
            yield jobs, more


def generations(
    llama: Llama,
    ids: list[int],
    parameters: Parameters,
    grammar: Grammar | None = None,
    *,
    grammar_param: str | None = None,  # the field that asks for the grammar
    special: bool = False,
    param: str = "messages",
) -> list[Generation]:
    """A generation for each choice. What `max_tokens` asks for beyond the context is not refused: it ends there."""
    room = room_for(llama) - len(ids)
    if room < 1:
        raise too_long(f"has {len(ids)} tokens", llama, param)
    if not ids:
        raise ApiError(400, "the prompt is empty", param=param)
    max_tokens = -1 if parameters.max_tokens < 0 else min(parameters.max_tokens, room)
    try:
        return [
            llama.generate(
                ids,
                max_tokens=max_tokens,
                sampling=parameters.choice(i),
                stop=parameters.stop,
                grammar=grammar,
                logprobs=parameters.logprobs,
                special=special,
                cache_prompt=parameters.cache_prompt,
            )
            for i in range(parameters.n)
        ]
    except LlamaGpuError as error:
        raise as_api_error(error, field_of(error.cause) or grammar_param) from error


def room_for(llama: Llama) -> int:
    """The most tokens of a prompt and its answer."""
    return min(llama.context, llama.loaded.engine.cache.positions)


def check_length(text: str, llama: Llama, param: str) -> None:
    """Refuse a text that cannot fit, before it is encoded."""
    if len(text) > MAX_BYTES_PER_TOKEN * room_for(llama):
        raise too_long(f"has {len(text):,} characters", llama, param)


def too_long(size: str, llama: Llama, param: str) -> ApiError:
    message = f"the prompt {size}; the context holds {room_for(llama)} tokens, one of them for the answer"
    return ApiError(400, message, param=param, code="context_length_exceeded")


def usage(jobs: Sequence[Job], n: int) -> dict[str, Any]:
    """OpenAI's usage object. `n` neighbouring jobs share a prompt."""
    prompt, completion = sum(job.prompt_tokens for job in jobs[::n]), sum(job.usage.completion_tokens for job in jobs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(job.usage.cached_tokens for job in jobs[::n])},
    }


def timings(job: Job) -> dict[str, Any]:
    """llama.cpp's timings object, for the chat page."""
    times = job.timings
    return {
        "cache_n": times.cached_tokens,
        "prompt_n": times.prompt_tokens - times.cached_tokens,
        "prompt_ms": round(1000 * times.prefill_s, 3),
        "prompt_per_second": round(times.prefill_tps, 3),
        "predicted_n": times.tokens,
        "predicted_ms": round(1000 * times.decode_s, 3),
        "predicted_per_second": round(times.decode_tps, 3),
    }
