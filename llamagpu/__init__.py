"""llamagpu: Llama-family models from a plain GGUF file on any WebGPU adapter.

import llamagpu
with llamagpu.load("smollm2") as llama:
    for token in llama.generate("Once upon a time", max_tokens=64):
        print(token.text, end="")
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from llamagpu.engine.sampler import Sampling
    from llamagpu.llama import Generation, Llama, Token, load

__all__ = ["Generation", "Llama", "Sampling", "Token", "load"]


def __getattr__(name: str) -> Any:  # wgpu and numpy are imported when they are first needed
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llamagpu import llama

    return getattr(llama, name)
