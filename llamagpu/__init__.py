"""llamagpu: Llama-family models from a plain GGUF file on any WebGPU adapter.

import llamagpu
with llamagpu.load("smollm2") as llama:
    answer = llama.chat([{"role": "user", "content": "Why is the sky blue?"}], max_tokens=64)
    print(answer.text)
"""

from typing import TYPE_CHECKING, Any

from llamagpu import errors

__version__ = "0.2.0"

if TYPE_CHECKING:
    from llamagpu.engine.grammar import Grammar
    from llamagpu.engine.sampler import Sampling
    from llamagpu.llama import Completion, Generation, Llama, Logprob, Timings, Token, Usage, load

__all__ = [
    "Completion",
    "Generation",
    "Grammar",
    "Llama",
    "Logprob",
    "Sampling",
    "Timings",
    "Token",
    "Usage",
    "errors",
    "load",
]


def __getattr__(name: str) -> Any:  # wgpu and numpy are imported when they are first needed
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llamagpu import llama

    return getattr(llama, name)


def __dir__() -> list[str]:  # completion in a shell or notebook
    return sorted({*globals(), *__all__})
