"""Reads a Hugging Face folder: config.json as GGUF metadata, the tensors by GGUF name, the tokenizer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gguf import Keys

from llamagpu.convert.hf_config import find_architecture, metadata_key, read_metadata
from llamagpu.convert.hf_tensors import name_tensors
from llamagpu.convert.source import Source
from llamagpu.convert.vocab import read_json, vocabulary
from llamagpu.errors import BadFile, Unsupported
from llamagpu.files.gguf_file import REMEDY_REFETCH, shown
from llamagpu.files.safetensors_file import Stored, read_header


def from_folder(folder: Path, name: str = "") -> Source:
    config = read_json(folder / "config.json")
    if not config:
        raise BadFile(f"{folder} has no config.json", "give a Hugging Face model folder, or a .gguf file")
    with malformed_json("config.json"):
        record, config = find_architecture(config)
        metadata = read_metadata(config, record, name or folder.name)
    if dense := sorted(path.name for path in folder.glob("*_Dense") if path.is_dir()):
        cause = f"embeddings that pass another matrix ({dense[0]}) are not supported"
        raise Unsupported(cause, "Use a model without one.")
    with malformed_json("the index of the shards"):
        arrays = find_arrays(folder)
    with malformed_json("config.json"):
        tensors = name_tensors(arrays, config, record, metadata)
    if (table := tensors.get("token_embd.weight")) and len(table.shape) == 2:
        metadata[metadata_key(Keys.LLM.VOCAB_SIZE, record)] = table.shape[0]
        with malformed_json("one of the tokenizer's files"):
            metadata |= vocabulary(folder, table.shape[0], config)
    return Source(name or folder.name, metadata, tensors, sorted({array.path for array in arrays.values()}))


@contextmanager
def malformed_json(what: str) -> Iterator[None]:
    """Raise BadFile for the errors that values of a wrong type in a JSON file cause."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise BadFile(f"{what} is not as it should be: {error}", REMEDY_REFETCH) from error


def find_arrays(folder: Path) -> dict[str, Stored]:
    """Every array of the checkpoint. Where there are several sets of files, the index names the right one."""
    index = read_json(folder / "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict):
        names = sorted({str(name) for name in index.values()})
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not names:
        raise BadFile(f"{folder} has no .safetensors file", "PyTorch .bin weights must be saved as safetensors first.")
    missing = [name for name in names if Path(name).name != name or not os.path.isfile(folder / name)]
    if missing:
        cause = f"{folder}: {len(missing)} of {len(names)} shards missing: {shown(missing[0])}"
        raise BadFile(cause, "Fetch the rest.")
    found: dict[str, Stored] = {}
    for name in names:
        found |= read_header(folder / name)[0]
    if absent := sorted(set(index or ()) - found.keys()):
        raise BadFile(f"{folder}: the index names {shown(absent[0])}, which no shard has", REMEDY_REFETCH)
    return found
