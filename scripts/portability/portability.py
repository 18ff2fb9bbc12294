"""Runs the kernels on other implementations: `scripts/test --portability [swiftshader|dawn|opengl|tint ...]`.

SwiftShader, by wgpu and by Dawn, and OpenGL run the kernel tests and the tiny models. Tint, which compiles WGSL in
browsers, compiles every composed kernel. What they need is fetched once, into the virtual environment.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
FETCHED = Path(sys.prefix) / "portability"
SWIFTSHADER = FETCHED / "usr/lib/chromium/vk_swiftshader_icd.json"
WEBGPU = "webgpu@0.6.2"  # Dawn for Node
TESTS = ("test_kernels*.py", "test_model.py", "test_texture_model.py")
Row = tuple[str, str, str]  # job, what it ran on, outcome


class NotHereError(Exception):
    """What a job needs cannot be had on this machine."""


def fetch(command: list[str], folder: Path) -> None:
    if not shutil.which(command[0]):
        raise NotHereError(f"there is no {command[0]}")
    folder.mkdir(parents=True, exist_ok=True)
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if run.returncode:
        raise NotHereError((run.stderr.strip() or "no reason was given").splitlines()[-1])


def fetch_swiftshader() -> None:
    """Unpack it from Debian's package of Chromium; nothing is installed."""
    if SWIFTSHADER.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        fetch(["apt-get", "-qq", "download", "chromium-common"], Path(folder))
        (package,) = Path(folder).glob("*.deb")
        unpacked = Path(folder) / "unpacked"
        fetch(["dpkg-deb", "--extract", str(package), str(unpacked)], Path(folder))
        target = SWIFTSHADER.parent
        target.mkdir(parents=True, exist_ok=True)
        for name in ("libvk_swiftshader.so", SWIFTSHADER.name):  # last the file that says that it is here
            shutil.copy(unpacked / "usr/lib/chromium" / name, target)


def fetch_dawn() -> None:
    if not (FETCHED / "node_modules/webgpu").exists():
        fetch(["npm", "install", "--no-save", "--ignore-scripts", "--prefix", str(FETCHED), WEBGPU], FETCHED)


def swiftshader() -> Row:
    fetch_swiftshader()
    driver = str(SWIFTSHADER)
    return run_tests("swiftshader", {"VK_DRIVER_FILES": driver, "VK_ICD_FILENAMES": driver})  # of new and old loaders


def dawn() -> Row:
    """The same kernels by the other implementation of WebGPU, and the tests of its binding."""
    fetch_swiftshader()
    fetch_dawn()
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    library = FETCHED / f"node_modules/webgpu/dist/{sys.platform}-{machine}/dawn.node"
    if not library.is_file():
        raise NotHereError(f"{WEBGPU} has no library for {sys.platform} on {machine}")
    driver = str(SWIFTSHADER)
    env = {"VK_DRIVER_FILES": driver, "VK_ICD_FILENAMES": driver}
    return run_tests(
        "dawn", env | {"LLAMAGPU_DAWN": str(library), "LLAMAGPU_BACKEND": "dawn"}, ("test_dawn.py", *TESTS)
    )


def opengl() -> Row:
    return run_tests("opengl", {"LLAMAGPU_OPENGL": "1"})


def run_tests(job: str, environment: dict[str, str], patterns: Sequence[str] = TESTS) -> Row:
    env = os.environ | environment
    adapter = chosen_adapter(env)
    report = FETCHED / f"{job}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    files = [str(path) for pattern in patterns for path in sorted((ROOT / "tests").glob(pattern))]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]
    subprocess.run([*command, f"--junit-xml={report}", *files], cwd=ROOT, env=env)
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, "pytest writes a suite"
    tests, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return job, adapter, f"{tests - failed - skipped} passed, {failed} failed, {skipped} skipped"


def chosen_adapter(env: dict[str, str]) -> str:
    """The adapter that runs, and what does not run on it."""
    command = [sys.executable, "-m", "llamagpu", "devices", "--json"]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if run.returncode:
        raise NotHereError(run.stderr.strip().splitlines()[0])
    (device,) = (device for device in json.loads(run.stdout) if device["chosen"])
    return "; ".join(filter(None, (f"{device['name']} ({device['backend']})", device["missing"])))


def tint() -> Row:
    fetch_dawn()
    if not shutil.which("node"):
        raise NotHereError("there is no node")
    sys.path.insert(0, str(ROOT / "tests"))
    import composed
    from gguf_builder import tiny_llama
    from test_model import MODELS

    sources = FETCHED / "wgsl"
    shutil.rmtree(sources, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        files = [tiny_llama(Path(folder) / f"{name}.gguf", **model) for name, model in MODELS.items()]
        count = composed.write_sources(sources, composed.ADAPTERS, (*composed.SYNTHETIC, *files))
    refused = composed.tint(sources)
    for path, messages in refused.items():
        print(path, *messages, sep="\n    ")
    wrong = [path for path in refused if not Path(path).name.startswith(composed.NOT_WGSL)]
    known = f", {len(refused) - len(wrong)} known not to" * (len(refused) > len(wrong))
    capabilities = f"{WEBGPU}, {len(composed.ADAPTERS)} sets of capabilities"
    return "tint", capabilities, f"{count - len(refused)} kernels compiled, {len(wrong)} failed{known}"


JOBS: dict[str, Callable[[], Row]] = {"tint": tint, "swiftshader": swiftshader, "dawn": dawn, "opengl": opengl}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in JOBS]
    if unknown:
        print(f"no job is called {unknown[0]!r}: choose {', '.join(JOBS)}", file=sys.stderr)
        return 2
    rows = [("job", "on", "outcome", "minutes")]
    for name in names or JOBS:
        started = time.monotonic()
        try:
            row = JOBS[name]()
        except NotHereError as reason:
            row = (name, "-", f"did not run: {reason}")
        rows.append((*row, f"{(time.monotonic() - started) / 60:.1f}"))
    print()
    for cells in rows:
        print("  ".join(cell.ljust(max(len(row[i]) for row in rows)) for i, cell in enumerate(cells)).rstrip())
    return int(any(" failed" in row[2] and ", 0 failed" not in row[2] for row in rows[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
