"""For Ray: `Predictor` is the class that `ray.data.Dataset.map_batches` makes an actor of, with an engine each.

ray.data.read_parquet("prompts").map_batches(
    llamagpu.ray.Predictor, fn_constructor_kwargs={"model": "smollm2"}, concurrency=4, num_gpus=1
).write_parquet("answers")
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import BadArgument, DeviceLost, LlamaGpuError, WrongState
from llamagpu.gpu.caps import NVIDIA, Library
from llamagpu.gpu.choice import list_adapters
from llamagpu.llama import Generation, Grammar, Llama, Sampling, load

Column = NDArray[Any]
MAX_QUEUED = 512  # prompts in the scheduler's queue at once
ENGINE_ERRORS = (DeviceLost, WrongState)  # no row's fault: Ray starts the actor again


class Predictor:
    """Answers the prompts of a batch together. A row gets the same answer whatever rows come with it.

    `column` holds prompts: a text, or a list of messages. A text is a user's message where the model has a chat
    template, unless `raw`. The answer goes to `output`; `output`_tokens and `output`_finish_reason come with it. A
    prompt that cannot be answered gets an empty answer, finish reason "error" and the reason in `output`_error.
    Without `device` the adapter is that of the GPU that Ray gave the actor.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        column: str = "prompt",
        output: str = "answer",
        system: str | None = None,
        raw: bool = False,
        max_tokens: int = 256,
        sampling: Sampling | Mapping[str, Any] | None = None,
        stop: str | list[str] = (),  # type: ignore[assignment]
        schema: Mapping[str, Any] | None = None,
        parallel: int = 16,
        **load_options: Any,
    ) -> None:
        if "device" not in load_options:
            load_options["device"] = actor_device()
        self.llama: Llama = load(model, parallel=parallel, **load_options)
        self.column, self.output, self.system, self.raw = column, output, system, raw
        given = sampling if isinstance(sampling, Sampling | None) else Sampling(**sampling)
        self.how: dict[str, Any] = {"max_tokens": max_tokens, "sampling": given, "stop": stop}
        self.how["grammar"] = Grammar.json_schema(schema) if schema is not None else None

    def __call__(self, batch: dict[str, Column]) -> dict[str, Column]:
        if self.column not in batch:
            raise BadArgument(
                f"the batch has no column {self.column!r}", f"it has {', '.join(batch)}: name one of them"
            )
        prompts = list(batch[self.column])
        rows: list[tuple[str, int, str, str]] = []
        for i in range(0, len(prompts), MAX_QUEUED):
            runs = [self._begin(prompt) for prompt in prompts[i : i + MAX_QUEUED]]
            rows += [self._answer(run) for run in runs]
        names = (self.output, f"{self.output}_tokens", f"{self.output}_finish_reason", f"{self.output}_error")
        types = (object, np.int64, object, object)
        columns = {
            name: np.array([row[i] for row in rows], kind)
            for i, (name, kind) in enumerate(zip(names, types, strict=True))
        }
        return {**batch, **columns}

    def _begin(self, prompt: Any) -> Generation | LlamaGpuError:
        try:
            run = self.llama.generate(self._encode(prompt), **self.how)
            run.begin()
            return run
        except ENGINE_ERRORS:
            raise
        except LlamaGpuError as error:
            return error

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str) and (self.raw or self.llama.tokenizer.chat_template is None):
            return self.llama.encode(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        first = [{"role": "system", "content": self.system}] if self.system else []
        return self.llama.encode_chat([*first, *messages])

    def _answer(self, run: Generation | LlamaGpuError) -> tuple[str, int, str, str]:
        try:
            if isinstance(run, LlamaGpuError):
                raise run
            found = run.result()
        except ENGINE_ERRORS:
            raise
        except LlamaGpuError as error:
            return "", 0, "error", f"{error.cause}; {error.remedy}" if error.remedy else error.cause
        return found.text, found.usage.completion_tokens, found.finish_reason, ""


def actor_device() -> str | None:
    """The adapter of the GPU that Ray gave this actor: WebGPU knows nothing of CUDA_VISIBLE_DEVICES."""
    try:
        import ray
    except ImportError:
        return None
    given = ray.get_runtime_context().get_accelerator_ids().get("GPU") if ray.is_initialized() else None
    return adapter_of(given[0], [adapter.info for adapter in list_adapters(Library.WGPU)]) if given else None


def adapter_of(gpu: str, adapters: Sequence[Mapping[str, Any]]) -> str | None:
    """The number of the adapter that is Ray's GPU of this number. None without any GPU: Ray was told of some.

    Ray counts the GPUs of one vendor, NVIDIA's if there are any, and drivers list theirs in the same order, that of the
    PCI bus. WebGPU does not tell the bus, so that this cannot be checked; `device` decides where it is not so.
    """
    gpus = [i for i, info in enumerate(adapters) if info["adapter_type"] != "CPU"]
    gpus = [i for i in gpus if adapters[i]["vendor_id"] == NVIDIA] or gpus
    gpus = [i for i in gpus if adapters[i]["backend_type"] == adapters[gpus[0]]["backend_type"]]
    if not gpus:
        return None
    if not gpu.isdecimal() or int(gpu) >= len(gpus):
        cause = f"Ray gave this actor the GPU {gpu}, and WebGPU has {len(gpus)} of them, counted from 0"
        raise BadArgument(cause, "name the adapter with device=, by its number in `llamagpu devices` or its name")
    return str(gpus[int(gpu)])
