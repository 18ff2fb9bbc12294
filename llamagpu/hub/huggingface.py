"""Fetches GGUF files and checkpoints from Hugging Face into the cache that all its tools share."""

import errno
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llamagpu.errors import LlamaGpuError

PREFERRED = ("Q4_K_M", "Q4_0")  # without a QUANT the first of these that the repository has
SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # image projectors, importance matrices: also .gguf

CHECKPOINT = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
DUPLICATES = ["consolidated*", "*/*"]  # second copies of the weights


@dataclass(frozen=True, slots=True)
class HubSpec:
    repo: str
    file: str = ""  # hf:user/repo/file.gguf
    quant: str = ""  # hf:user/repo:QUANT


def parse_spec(spec: str) -> HubSpec:
    match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:/([^:]+\.gguf)|:([\w.-]+))?", spec)
    if not match:
        raise LlamaGpuError(
            f"{spec} is not of the form hf:user/repo[:QUANT]",
            "for example hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M, or hf:user/repo/file.gguf",
        )
    return HubSpec(match[1], match[2] or "", match[3] or "")


def select_files(spec: HubSpec, names: list[str]) -> list[str]:
    """The files of a repository to fetch: one, or every file of a split model in order."""
    models = sorted(name for name in names if name.lower().endswith(".gguf") and not NO_MODEL.search(name))
    has = "it has: " + ", ".join(models[:12]) + (f" and {len(models) - 12} more" if len(models) > 12 else "")
    if not models:
        raise LlamaGpuError(f"hf:{spec.repo} holds no .gguf file", "choose a repository with GGUF files")
    if spec.file:
        if spec.file not in names:
            raise LlamaGpuError(f"hf:{spec.repo} holds no {spec.file}", has)
        return _all_splits(spec.file, names)
    for quant in (spec.quant,) if spec.quant else PREFERRED:
        if matches := _with_quant(models, quant):
            return _all_splits(matches[0], names)
    if spec.quant:
        raise LlamaGpuError(f"hf:{spec.repo} has no {spec.quant} file", has)
    return _all_splits(models[0], names)


def _with_quant(models: list[str], quant: str) -> list[str]:
    """The names with `quant` as a whole word, else anywhere: F16 must not match BF16 if there is an F16."""
    word = re.compile(rf"(?<![a-z0-9_]){re.escape(quant)}(?![a-z0-9_])", re.IGNORECASE)
    return [n for n in models if word.search(n)] or [n for n in models if quant.lower() in n.lower()]


def _all_splits(name: str, names: list[str]) -> list[str]:
    split = SPLIT.search(name)
    if not split:
        return [name]
    files = [f"{name[: split.start()]}-{i:05}-of-{split[1]}.gguf" for i in range(1, int(split[1]) + 1)]
    missing = sorted(set(files) - set(names))
    if missing:
        cause = f"{len(missing)} of the model's {len(files)} files are missing, {missing[0]} for one"
        raise LlamaGpuError(cause, "choose another quantisation, or fetch the rest with a network")
    return files


def fetch_from_hub(spec: str, progress: bool, offline: bool) -> Path:
    """The model's file, or the first of a split model. HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE apply."""
    wanted = parse_spec(spec)
    from huggingface_hub import constants  # here: the library takes 0.4 s to import

    _quieten(progress)
    try:
        if offline or constants.HF_HUB_OFFLINE:
            return _cached(wanted)
        return _online(wanted, progress)
    except LlamaGpuError:
        raise
    except Exception as error:  # of the library, its Rust downloader or its HTTP library, which has changed twice
        raise _explain(wanted.repo, error) from error


def _quieten(progress: bool) -> None:
    from huggingface_hub.utils.logging import get_logger
    from huggingface_hub.utils.tqdm import disable_progress_bars

    get_logger("huggingface_hub").setLevel("ERROR")  # its retry notices would hide our message
    if not progress:
        disable_progress_bars()


def fetch_checkpoint(spec: str, progress: bool, offline: bool) -> Path:
    """The folder with a repository's safetensors, config and tokenizer.

    If the spec names a GGUF file, or the repository has no safetensors, its GGUF file.
    """
    wanted = parse_spec(spec)
    if wanted.file or wanted.quant:
        return fetch_from_hub(spec, progress, offline)
    from huggingface_hub import snapshot_download

    _quieten(progress)
    try:
        folder = snapshot_download(
            wanted.repo, allow_patterns=CHECKPOINT, ignore_patterns=DUPLICATES, local_files_only=offline
        )
    except Exception as error:
        raise _explain(wanted.repo, error) from error
    found = any(Path(folder).glob("*.safetensors"))
    return Path(folder) if found else fetch_from_hub(spec, progress, offline)


def _online(wanted: HubSpec, progress: bool) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    try:
        names = [file.rfilename for file in HfApi().model_info(wanted.repo).siblings or []]
    except Exception as error:
        if _is_no_answer(error):
            with suppress(LlamaGpuError):
                return _cached(wanted)  # a cached model needs no network
        raise
    files = []
    for name in select_files(wanted, names):
        if progress and not sys.stderr.isatty() and not try_to_load_from_cache(wanted.repo, name):
            print(f"fetching hf:{wanted.repo}/{name}", file=sys.stderr)  # on a terminal the library shows a bar
        files.append(Path(hf_hub_download(wanted.repo, name)))
    return files[0]


def _cached(wanted: HubSpec) -> Path:
    snapshot, names = _snapshot(wanted.repo)
    if not names:
        raise LlamaGpuError(
            f"hf:{wanted.repo} has not been fetched yet",
            "fetch it once with a network, or use a GGUF file by its path",
        )
    return snapshot / select_files(wanted, names)[0]


def _snapshot(repo: str) -> tuple[Path, list[str]]:
    """The folder of a repository in the cache and the GGUF files in it."""
    from huggingface_hub import constants

    if not Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}").is_dir():
        return Path(), []  # `llamagpu models` asks for many: the next imports take 0.4 s
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:  # no pattern: a snapshot with some of the repository's files is enough
        folder = Path(snapshot_download(repo, local_files_only=True, allow_patterns=[]))
    except LocalEntryNotFoundError:
        return Path(), []
    return folder, [file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf") if file.is_file()]


def cached_files(spec: str) -> list[Path]:
    """The files of a model in the cache, all of them if it is split; none if one of them is missing."""
    wanted = parse_spec(spec)
    _quieten(progress=False)
    folder, names = _snapshot(wanted.repo)
    try:
        return [folder / name for name in select_files(wanted, names)]
    except LlamaGpuError:
        return []


def remove_from_cache(spec: str, shown_as: str) -> Path:
    """Delete the files that `spec` means and return the first. Other files of the repository stay."""
    wanted, files = parse_spec(spec), cached_files(spec)
    if not files:
        raise LlamaGpuError(f"{shown_as} is not in the cache", "nothing to remove")
    _, names = _snapshot(wanted.repo)
    if not (wanted.file or wanted.quant) and len(names) > len(files):
        raise LlamaGpuError(f"the cache has several files of {spec}: {', '.join(names)}", f"name one with {spec}:QUANT")
    for file in files:
        blob = file.resolve()
        try:
            file.unlink()
            snapshots = next(folder for folder in file.parents if folder.name == "snapshots")
            if not any(other.resolve() == blob for other in snapshots.rglob(file.name)):  # of other revisions
                blob.unlink(missing_ok=True)
        except OSError as error:
            raise LlamaGpuError(f"cannot remove {file}: {error.strerror}", "check its permissions") from error
    return files[0]


def _is_no_answer(error: Exception) -> bool:
    """Whether the hub did not answer, or gave an answer (429, 5xx) that says nothing about the repository."""
    from huggingface_hub.errors import HfHubHTTPError

    return not isinstance(error, HfHubHTTPError) or error.response.status_code in (429, *range(500, 600))


def _explain(repo: str, error: Exception) -> LlamaGpuError:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        cause = f"the disk filled up while hf:{repo} was being fetched"
        remedy = "free some space, or set HF_HOME to a folder on another disk"
    elif isinstance(error, OSError) and error.filename:
        cause, remedy = f"cannot write to {error.filename}: {error.strerror}", "set HF_HOME to another folder"
    elif isinstance(error, GatedRepoError):
        cause = f"hf:{repo} is gated"
        remedy = "accept its terms on its web page, then set HF_TOKEN or run `hf auth login`"
    elif isinstance(error, RepositoryNotFoundError):
        cause = f"there is no hf:{repo}, or it is private"
        remedy = "check the spelling; a private repository needs HF_TOKEN or `hf auth login`"
    elif isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        cause = f"the hub answered {status} for hf:{repo}"
        remedy = "check HF_TOKEN" if status in (401, 403) else "try again later"
    else:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        cause = f"cannot fetch hf:{repo}: {reason}"
        remedy = "check the network and HF_ENDPOINT, or use a GGUF file by its path"
    return LlamaGpuError(cause, remedy)
