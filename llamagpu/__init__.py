"""llamagpu: Llama-family models from a plain GGUF file on any WebGPU adapter.

    import llamagpu
    with llamagpu.load("smollm2") as llama:
        for token in llama.generate("Once upon a time", max_tokens=64):
            print(token.text, end="")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamagpu.engine.generate import Generation, Llama, Token
    from llamagpu.engine.sampler import Sampling

    __version__: str

__all__ = ["Generation", "Llama", "Sampling", "Token", "load"]


def load(model: str, **options: Any) -> "Llama":
    """A model by file, by name (`smollm2`) or as `hf:user/repo[:QUANT]`; options as for `Llama`."""
    from llamagpu.engine.generate import Llama
    from llamagpu.tools.models import resolve

    return Llama(resolve(model), **options)


def __getattr__(name: str) -> Any:  # wgpu and numpy are imported when they are first needed
    if name in ("Generation", "Llama", "Token"):
        from llamagpu.engine import generate

        return getattr(generate, name)
    if name == "Sampling":
        from llamagpu.engine.sampler import Sampling

        return Sampling
    if name == "__version__":
        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def version() -> str:
    from importlib import metadata  # here: it takes 50 ms

    try:
        return metadata.version("llamagpu")
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        return "0.1.0"
