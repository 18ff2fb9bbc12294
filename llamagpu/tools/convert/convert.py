"""Convert a checkpoint: choose each tensor's type, write it, and tell what was lost."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import Unsupported, about
from llamagpu.files.gguf_file import BLOCKS
from llamagpu.files.packed_file import FORMAT
from llamagpu.files.safetensors_file import read_header
from llamagpu.tools.convert.fourbit import HALVES, SYMMETRIC
from llamagpu.tools.convert.huggingface import from_folder
from llamagpu.tools.convert.output import NO_PROGRESS, Job, Loss, Progress, write_gguf, write_packed
from llamagpu.tools.convert.source import Source, Tensor, from_gguf, from_llama2c
from llamagpu.tools.hub import fetch_checkpoint
from llamagpu.tools.models import resolve

if TYPE_CHECKING:
    from llamagpu.tools.convert.observe import Quality

TARGETS = {"q4_0": "Q4_0", "q4_1": "Q4_1", "q8_0": "Q8_0", "f16": "F16"}
OUTPUTS = {"q8_0": "Q8_0", "q6_k": "Q6_K", "f16": "F16"}
FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7}  # general.file_type
ENDS = ("output.weight", "token_embd.weight")
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Plan:
    kinds: dict[str, str]  # of every tensor
    packed: bool
    notes: list[str]  # for the user


@dataclass(slots=True)
class Report:
    source: str
    output: str
    bytes_before: int
    bytes_after: int
    seconds: float
    notes: list[str]
    tensors: list[Loss]
    quality: "dict[str, Quality]" = field(default_factory=dict)  # before, after, and of plain rounding

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
    with about(path):
        if path.is_dir():
            return from_folder(path, name or path.resolve().name)
        with path.open("rb") as file:
            legacy = path.suffix == ".bin" and file.read(4) not in (b"GGUF", b"PK\x03\x04")
        return from_llama2c(path) if legacy else from_gguf(path)


def plan(source: Source, to: str | None, keep_output: str = "q8_0", packed: bool = False) -> Plan:
    """`to`: a key of TARGETS; "packed" keeps what is quantised already; None keeps AWQ and GPTQ exactly."""
    notes: list[str] = []
    packed = packed or to == "packed"
    wanted = TARGETS.get(to or "")
    exact: dict[str, str] = {}
    if wanted not in ("Q8_0", "F16"):
        exact = {matrix.name: matrix.exact_kind() for matrix in source.four_bit}
    inexact = [name for name, kind in exact.items() if kind not in (SYMMETRIC, wanted or HALVES)]
    if inexact and not packed and wanted is None:
        packed = True
        notes.append(f"{len(inexact)} matrices have offsets that no GGUF type holds exactly: written as packed")
    elif inexact and not packed:
        how = "rounded to f16" if wanted == HALVES else "left out, the weights rounded anew"
        notes.append(f"the offsets of {len(inexact)} matrices were {how}; --to packed keeps them exactly")
    if not packed and wanted:
        exact = {}
    main, output = wanted or "Q4_0", OUTPUTS[keep_output]
    kinds = {
        name: exact.get(name) or kind_of(tensor, main, output, keep_raw=packed and to in (None, "packed"))
        for name, tensor in source.tensors.items()
    }
    whole = [n for n, t in source.tensors.items() if len(t.shape) > 1 and kinds[n] == "F16" != main and n not in ENDS]
    if whole:
        notes.append(f"{len(whole)} matrices whose rows do not divide into groups of 32 stay f16, {whole[0]} for one")
    wide = [n for n in ENDS if kinds.get(n) == "Q8_0" and source.tensors[n].shape[1] % BLOCKS[output][0]]
    if wide and main not in ("Q8_0", "F16"):
        notes.append(f"{wide[0]} is Q8_0: its rows do not divide into {output}'s groups of {BLOCKS[output][0]}")
    return Plan(kinds, packed, notes)


def kind_of(tensor: Tensor, main: str, output: str, keep_raw: bool) -> str:
    if len(tensor.shape) == 1:
        return "F32"
    raw = tensor.raw.kind if tensor.raw else "F16"
    if keep_raw and raw not in FLOATS:
        return raw
    if tensor.name in ENDS and main not in ("Q8_0", "F16"):
        if raw not in FLOATS:
            return raw  # quantised already: once more would only lose
        main = output
    for kind in (main, "Q8_0"):
        if tensor.shape[1] % BLOCKS[kind][0] == 0:
            return kind
    return "F16"


def original_plan(source: Source) -> Plan:
    """The source as it is, as near as a file that the engine loads can hold it."""
    kinds = {name: "F32" if len(tensor.shape) == 1 else "F16" for name, tensor in source.tensors.items()}
    exact = {matrix.name: matrix.exact_kind() for matrix in source.four_bit if matrix.in_order()}
    return Plan(kinds | exact, packed=bool(exact), notes=[])


def convert(
    source: Source,
    out: Path,
    chosen: Plan,
    *,
    best: bool = False,
    importance: dict[str, NDArray[np.float32]] | None = None,
    threads: int = 0,
    progress: Progress = NO_PROGRESS,
) -> Report:
    matrices = Counter(chosen.kinds[name] for name, tensor in source.tensors.items() if len(tensor.shape) > 1)
    most = max(FILE_TYPES, key=lambda kind: matrices[kind])
    metadata = source.metadata | {"general.file_type": FILE_TYPES[most], "general.quantization_version": 2}
    job = Job(source, chosen.kinds, metadata, best, importance or {}, threads)
    started = time.perf_counter()
    losses = (write_packed if chosen.packed else write_gguf)(job, out, progress)
    seconds = time.perf_counter() - started
    size = out.stat().st_size
    return Report(source.name, str(out), source.nbytes, size, seconds, list(chosen.notes), losses)


SIDES = "original", "plain"


def remove_stale(out: Path) -> None:
    """What a run that was killed may have left beside `out`; its .part is seen to when it is written anew."""
    for name in SIDES:
        for path in out.parent.glob(f".{escape(out.name)}.{name}.*"):
            path.unlink(missing_ok=True)


@contextmanager
def beside(
    out: Path, name: str, source: Source, chosen: Plan, threads: int = 0, progress: Progress = NO_PROGRESS
) -> Iterator[Path]:
    """The source in another form for a while, in a file beside `out`; `name` is one of SIDES."""
    path = out.with_name(f".{out.name}.{name}{'.safetensors' if chosen.packed else '.gguf'}")
    try:
        convert(source, path, chosen, threads=threads, progress=progress)
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def original(source: Source, out: Path, threads: int = 0, progress: Progress = NO_PROGRESS) -> Iterator[Path]:
    """The source as a file that the engine loads: a GGUF is one."""
    if source.gguf:
        yield source.gguf.path
        return
    with beside(out, "original", source, original_plan(source), threads, progress) as path:
        yield path
