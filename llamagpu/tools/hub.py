"""GGUF files from a Hugging Face repository, into the cache that all its tools share."""

import errno
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llamagpu.errors import LlamaGpuError

PREFERRED = ("Q4_K_M", "Q4_0")  # when the spec names no quantisation: the first of these that is there
SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # image projectors, importance matrices: also .gguf

CHECKPOINT = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
DUPLICATES = ["consolidated*", "*/*"]  # the same weights in another form


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


def choose(spec: HubSpec, names: list[str]) -> list[str]:
    """Of all files in a repository those to fetch: one, or every part of a split model in order."""
    models = sorted(name for name in names if name.lower().endswith(".gguf") and not NO_MODEL.search(name))
    has = "it has: " + ", ".join(models[:12]) + (f" and {len(models) - 12} more" if len(models) > 12 else "")
    if not models:
        raise LlamaGpuError(f"hf:{spec.repo} holds no .gguf file", "choose a repository with GGUF files")
    if spec.file:
        if spec.file not in names:
            raise LlamaGpuError(f"hf:{spec.repo} holds no {spec.file}", has)
        return _all_parts(spec.file, names)
    for quant in (spec.quant,) if spec.quant else PREFERRED:
        if matches := _with_quant(models, quant):
            return _all_parts(matches[0], names)
    if spec.quant:
        raise LlamaGpuError(f"hf:{spec.repo} has no {spec.quant} file", has)
    return _all_parts(models[0], names)


def _with_quant(models: list[str], quant: str) -> list[str]:
    """Names that hold `quant` as a whole word, else anywhere: F16 must not mean BF16 when there is an F16."""
    word = re.compile(rf"(?<![a-z0-9_]){re.escape(quant)}(?![a-z0-9_])", re.IGNORECASE)
    return [n for n in models if word.search(n)] or [n for n in models if quant.lower() in n.lower()]


def _all_parts(name: str, names: list[str]) -> list[str]:
    split = SPLIT.search(name)
    if not split:
        return [name]
    parts = [f"{name[: split.start()]}-{i:05}-of-{split[1]}.gguf" for i in range(1, int(split[1]) + 1)]
    missing = sorted(set(parts) - set(names))
    if missing:
        cause = f"{len(missing)} of the model's {len(parts)} parts are missing, {missing[0]} for one"
        raise LlamaGpuError(cause, "choose another quantisation, or fetch the rest with a network")
    return parts


def fetch_from_hub(spec: str, progress: bool, offline: bool) -> Path:
    """The model's file, or its first part. HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE count."""
    wanted = parse_spec(spec)
    from huggingface_hub import constants  # here: the library takes 0.4 s to import

    _hush(progress)
    try:
        if offline or constants.HF_HUB_OFFLINE:
            return _cached(wanted)
        return _online(wanted, progress)
    except LlamaGpuError:
        raise
    except Exception as error:  # its own, its Rust downloader's, and its HTTP package's, which changed twice
        raise _explain(wanted.repo, error) from error


def _hush(progress: bool) -> None:
    from huggingface_hub.utils.logging import get_logger
    from huggingface_hub.utils.tqdm import disable_progress_bars

    get_logger("huggingface_hub").setLevel("ERROR")  # its retry notices would bury our one line
    if not progress:
        disable_progress_bars()


def fetch_checkpoint(spec: str, progress: bool, offline: bool) -> Path:
    """The folder of a repository's safetensors, config and tokenizer; its GGUF file where the spec names one, or
    there is nothing else."""
    wanted = parse_spec(spec)
    if wanted.file or wanted.quant:
        return fetch_from_hub(spec, progress, offline)
    from huggingface_hub import snapshot_download

    _hush(progress)
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
                return _cached(wanted)  # a model that is here already needs no network
        raise
    files = []
    for part in choose(wanted, names):
        if progress and not sys.stderr.isatty() and not try_to_load_from_cache(wanted.repo, part):
            print(f"fetching hf:{wanted.repo}/{part}", file=sys.stderr)  # on a terminal the library has a bar
        files.append(Path(hf_hub_download(wanted.repo, part)))
    return files[0]


def _cached(wanted: HubSpec) -> Path:
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE) / f"models--{wanted.repo.replace('/', '--')}"
    try:
        snapshot = root / "snapshots" / (root / "refs" / "main").read_text().strip()
    except OSError:
        snapshot = root / "never fetched"
    names = [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*.gguf") if file.is_file()]
    if not names:
        raise LlamaGpuError(
            f"hf:{wanted.repo} has not been fetched yet",
            "fetch it once with a network, or give a GGUF file with -m FILE",
        )
    return snapshot / choose(wanted, names)[0]


def _is_no_answer(error: Exception) -> bool:
    """Nobody answered, or what was answered (429, 5xx) says nothing about the repository."""
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
        remedy = "check the network and HF_ENDPOINT, or give a GGUF file with -m FILE"
    return LlamaGpuError(cause, remedy)
