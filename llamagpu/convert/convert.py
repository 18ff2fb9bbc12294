"""Converts a checkpoint: opens it, plans the type of each tensor, writes the file, and reports the error."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGML_QUANT_VERSION, Keys, LlamaFileType
from numpy.typing import NDArray

from llamagpu.convert.awq_gptq import F16_OFFSETS, SYMMETRIC
from llamagpu.convert.huggingface import from_folder
from llamagpu.convert.output import NO_PROGRESS, Job, Loss, Progress, write_gguf, write_packed
from llamagpu.convert.source import Source, Tensor, from_gguf, from_llama2c
from llamagpu.errors import Unsupported, error_context
from llamagpu.files.atomic import temporary_name
from llamagpu.files.config import is_vector
from llamagpu.files.gguf_file import BLOCKS
from llamagpu.files.packed_file import FORMAT
from llamagpu.files.repack import FLOATS
from llamagpu.files.safetensors_file import read_header
from llamagpu.hub.huggingface import fetch_checkpoint
from llamagpu.hub.registry import resolve

if TYPE_CHECKING:
    from llamagpu.convert.calibrate import Quality

TARGETS = {"q4_0": "Q4_0", "q4_1": "Q4_1", "q8_0": "Q8_0", "f16": "F16", "bf16": "BF16"}
OUTPUTS = {"q8_0": "Q8_0", "q6_k": "Q6_K", "f16": "F16"}
FILE_TYPES = {
    "MXFP4": LlamaFileType.MOSTLY_MXFP4_MOE,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
}
FOUR_BITS = ("Q4_0", "Q4_1")
MANY_BITS = ("Q8_0", "F16", "BF16")  # good enough for the output matrix too
ROUTER = ".ffn_gate_inp.weight"  # of experts: small, and a wrong choice costs more than a rounded weight
OUTPUT_TENSORS = ("output.weight", "token_embd.weight")  # --keep-output is for these


@dataclass(frozen=True, slots=True)
class Plan:
    ggml_types: dict[str, str]  # of every tensor
    packed: bool
    notes: list[str]  # for the user
    warnings: list[str] = field(default_factory=list)  # for the user, before the work begins


@dataclass(slots=True)
class Report:
    source: str
    output: str
    bytes_before: int
    bytes_after: int
    seconds: float
    notes: list[str]
    tensors: list[Loss]
    quality: "dict[str, Quality]" = field(default_factory=dict)  # keys: before, after; plain, if best is measured too

    @property
    def weights(self) -> int:
        return sum(loss.weights for loss in self.tensors)

    @property
    def bits(self) -> float:
        return 8 * self.bytes_after / self.weights

    @property
    def nmse(self) -> float:
        changed = [loss for loss in self.tensors if loss.norm]
        return sum(loss.error for loss in changed) / sum(loss.norm for loss in changed) if changed else 0.0


def open_source(spec: str, progress: bool = True, offline: bool = False) -> Source:
    """A folder, a file, a name from `llamagpu models`, or hf:user/repo."""
    path, name = Path(spec).expanduser(), ""
    if spec.startswith("hf:"):
        path, name = fetch_checkpoint(spec, progress, offline), spec.split("/")[1].split(":")[0]
    elif path.suffix == ".safetensors" and path.is_file():
        if read_header(path)[1].get("format") == FORMAT:
            raise Unsupported(f"{path} is packed already", "Convert what it was made from.")
        path = path.parent  # config.json and the tokenizer are there
    elif not path.is_dir():
        path = resolve(spec, progress=progress, offline=offline)
    with error_context(path):
        if path.is_dir():
            return from_folder(path, name or path.resolve().name)
        with path.open("rb") as file:
            llama2c = path.suffix == ".bin" and file.read(4) not in (b"GGUF", b"PK\x03\x04")
        return from_llama2c(path) if llama2c else from_gguf(path)


def plan(source: Source, to: str | None, keep_output: str = "q8_0", packed: bool = False) -> Plan:
    """Plan the type of each tensor.

    `to` is a key of TARGETS, "packed" (quantised tensors keep their types) or None (Q4_0; AWQ and GPTQ stay exact).
    """
    notes: list[str] = []
    packed = packed or to == "packed"
    wanted = TARGETS.get(to or "")
    exact: dict[str, str] = {}
    if wanted not in MANY_BITS:
        exact = {matrix.name: matrix.exact_type() for matrix in source.quantised}
    inexact = [name for name, ggml_type in exact.items() if ggml_type not in (SYMMETRIC, wanted or F16_OFFSETS)]
    if inexact and not packed and wanted is None:
        packed = True
        notes.append(f"{len(inexact)} matrices have offsets that no GGUF type holds exactly: written as packed")
    elif inexact and not packed:
        how = "rounded to f16" if wanted == F16_OFFSETS else "left out, the weights rounded anew"
        notes.append(f"the offsets of {len(inexact)} matrices were {how}; --to packed keeps them exactly")
    if not packed and wanted:
        exact = {}
    main, output = wanted or "Q4_0", OUTPUTS[keep_output]
    types = {
        name: exact.get(name) or tensor_type(tensor, main, output, keep_raw=packed and to in (None, "packed"))
        for name, tensor in source.tensors.items()
    }
    f16 = [
        name
        for name, tensor in source.tensors.items()
        if len(tensor.shape) > 1 and types[name] == "F16" != main and name not in OUTPUT_TENSORS
    ]
    if f16:
        notes.append(f"{len(f16)} matrices whose rows do not divide into groups of 32 stay f16, {f16[0]} for one")
    group = BLOCKS[output][0]
    wide = [n for n in OUTPUT_TENSORS if types.get(n) == "Q8_0" and source.tensors[n].shape[1] % group]
    if wide and main not in MANY_BITS:
        notes.append(f"{wide[0]} is Q8_0: its rows do not divide into {output}'s groups of {group}")
    return Plan(types, packed, notes, requantised(source, types))


def requantised(source: Source, types: dict[str, str]) -> list[str]:
    """A warning if weights of few bits are rounded again: Q4_1 to Q4_0 adds 22 % to the perplexity of SmolLM2."""
    raw = {name: tensor.ggml_type for name, tensor in source.tensors.items()}
    again = [name for name, old in raw.items() if types[name] != old and few_bits(old) and types[name] in FOUR_BITS]
    if not again:
        return []
    old, new = raw[again[0]], types[again[0]]
    lost = f"{len(again)} matrices are {old} already: rounding them again to {new} loses quality"
    return [f"{lost}; convert the original instead, or use --to packed, which keeps them"]


def few_bits(ggml_type: str) -> bool:
    weights, size = BLOCKS[ggml_type]
    return 8 * size / weights < 8  # Q8_0 has 8.5, and is close enough to the original


def tensor_type(tensor: Tensor, main: str, output: str, keep_raw: bool) -> str:
    """The new type of a tensor: weights become `main`, the output matrix and the embeddings `output`."""
    if is_vector(tensor.name, tensor.shape) or tensor.name.endswith((ROUTER, ".bias")):
        return "F32"
    raw = tensor.ggml_type
    if raw == "MXFP4" or (keep_raw and raw not in FLOATS):  # no other type of as few bits holds MXFP4
        return raw
    if tensor.name in OUTPUT_TENSORS and main not in MANY_BITS:
        if raw not in FLOATS:
            return raw  # quantised already: quantising it again would only add error
        main = output
    for ggml_type in (main, "Q8_0"):
        if tensor.shape[-1] % BLOCKS[ggml_type][0] == 0:
            return ggml_type
    return "F16"


def original_plan(source: Source) -> Plan:
    """The plan with the smallest error among the files that the engine loads."""
    tensors = source.tensors.items()
    types = {name: tensor_type(tensor, tensor.ggml_type, tensor.ggml_type, keep_raw=False) for name, tensor in tensors}
    exact = {matrix.name: matrix.exact_type() for matrix in source.quantised if matrix.contiguous_groups()}
    return Plan(types | exact, packed=bool(exact), notes=[])


def convert(
    source: Source,
    out: Path,
    plan: Plan,
    *,
    best: bool = False,
    importance: dict[str, NDArray[np.float32]] | None = None,
    threads: int = 0,
    progress: Progress = NO_PROGRESS,
) -> Report:
    counts = Counter(plan.ggml_types[name] for name, tensor in source.tensors.items() if len(tensor.shape) > 1)
    most = max(FILE_TYPES, key=lambda ggml_type: counts[ggml_type])
    version = {Keys.General.QUANTIZATION_VERSION: GGML_QUANT_VERSION}
    metadata = source.metadata | {Keys.General.FILE_TYPE: int(FILE_TYPES[most])} | version
    job = Job(source, plan.ggml_types, metadata, best, importance or {}, threads)
    started = time.perf_counter()
    losses = (write_packed if plan.packed else write_gguf)(job, out, progress)
    seconds = time.perf_counter() - started
    size = out.stat().st_size
    return Report(source.name, str(out), source.file_bytes, size, seconds, plan.warnings + plan.notes, losses)


# Models that exist only while the command runs

ORIGINAL, PLAIN = "original", "plain"  # the source as it is; the result with plain rounding


def remove_stale(out: Path) -> None:
    """Delete the temporary models of a run that was killed. `atomic_write` deletes the stale .part of `out` itself."""
    for purpose in (ORIGINAL, PLAIN):
        pattern = temporary_name(Path(escape(out.name)), f"{purpose}.*")
        for path in out.parent.glob(pattern.name):
            path.unlink(missing_ok=True)


@contextmanager
def temporary_model(
    out: Path, purpose: str, source: Source, plan: Plan, threads: int = 0, progress: Progress = NO_PROGRESS
) -> Iterator[Path]:
    """Convert the source into a file beside `out`, and delete it when the block ends."""
    path = temporary_name(out, f"{purpose}{'.safetensors' if plan.packed else '.gguf'}")
    try:
        convert(source, path, plan, threads=threads, progress=progress)
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def original_model(source: Source, out: Path, threads: int = 0, progress: Progress = NO_PROGRESS) -> Iterator[Path]:
    """The source as a file that the engine loads. A GGUF source is such a file already."""
    if source.gguf:
        yield source.gguf.path
        return
    with temporary_model(out, ORIGINAL, source, original_plan(source), threads, progress) as path:
        yield path
