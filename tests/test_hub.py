"""Fetching models: wheels with pip from a local folder or server, GGUF files from a local hub."""

import hashlib
import http.server
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import ROOT

from llamagpu.cli.models import size
from llamagpu.engine.sampler import Sampling
from llamagpu.errors import LlamaGpuError, Unsupported
from llamagpu.files.architectures import ARCHITECTURES
from llamagpu.hub import registry
from llamagpu.hub.catalogue import CATALOGUE, Entry, WheelModel, find, names, search, suggest, suggested_sampling
from llamagpu.hub.huggingface import HubSpec, parse_spec, select_files

GGUF = b"GGUF" + os.urandom(3 << 20)
FLIPPED = GGUF[:-1] + bytes([GGUF[-1] ^ 1])
TINY = WheelModel(
    package="fake-tiny",
    version="1.0",
    wheel_bytes=len(GGUF) // 2,  # compressed
    file="tiny.gguf",
    file_bytes=len(GGUF),
    sha256=hashlib.sha256(GGUF).hexdigest(),
)
WHEEL = "fake_tiny-1.0-py3-none-any.whl"


def tiny_entry(model: WheelModel = TINY) -> Entry:
    return Entry("tiny", "a test", "u/tiny", "Q4_0", model.file_bytes, "MIT", 64, "llama", {}, wheel=model)


def make_wheel(folder: Path, content: bytes = GGUF, file: str = "fake_tiny/tiny.gguf") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        info = "fake_tiny-1.0.dist-info"
        wheel.writestr(file, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-tiny\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder / WHEEL


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder of wheels that is pip's only source, empty caches, and the model `tiny` in the catalogue."""
    wheels = tmp_path / "wheels"
    make_wheel(wheels)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("LLAMAGPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setitem(CATALOGUE, "tiny", tiny_entry())
    return wheels


def cached() -> list[str]:
    return sorted(p.name for p in registry.models_dir().iterdir() if not p.name.endswith(".lock"))


PULL = """
import json, sys
from llamagpu.errors import LlamaGpuError
from llamagpu.hub import registry
from llamagpu.hub.catalogue import CATALOGUE, Entry, WheelModel
model = WheelModel(**json.loads(sys.argv[1]))
CATALOGUE["tiny"] = Entry("tiny", "a test", "u/tiny", "Q4_0", model.file_bytes, "MIT", 64, "llama", {}, wheel=model)
try:
    print(registry.resolve("tiny"))
except LlamaGpuError as error:
    print("failed:", error.cause, "|", error.remedy)
"""


def start_pull(model: WheelModel = TINY, **kwargs) -> subprocess.Popen:
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": env, "text": True} | kwargs
    return subprocess.Popen([sys.executable, "-c", PULL, json.dumps(asdict(model))], **kwargs)


def failure(spec: str = "tiny", **kwargs) -> tuple[str, str]:
    with pytest.raises(LlamaGpuError) as caught:
        registry.resolve(spec, progress=False, **kwargs)
    cause, remedy = caught.value.cause, caught.value.remedy
    assert cause and "\n" not in cause and "\n" not in remedy
    assert remedy
    return cause, remedy


# --- files and names ---------------------------------------------------------------------------------------


def test_file_specs(tmp_path, monkeypatch):
    file = tmp_path / "a b.gguf"
    file.write_bytes(b"x")
    assert registry.resolve(str(file)) == file
    monkeypatch.setenv("HOME", str(tmp_path))
    assert registry.resolve("~/a b.gguf") == file
    assert "is a folder" in failure(str(tmp_path))[0]
    assert failure("smolm2") == ("no model or file is called smolm2", "did you mean smollm2?")
    assert "cannot read" in failure("x" * 5000)[0]
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.gguf")
        assert "is a pipe" in failure(str(tmp_path / "pipe.gguf"))[0]
        assert "is a device" in failure(os.devnull)[0]


def test_import_is_light():
    """The module imports no large package: `-m FILE` does not need them."""
    code = "import sys, llamagpu.hub.registry; print(*sys.modules)"
    out = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert "llamagpu.hub.huggingface" in out.split()
    assert not {"huggingface_hub", "rich", "numpy", "wgpu", "filelock", "platformdirs"} & set(out.split())


def test_default_model():
    """The registry's entry of the default model matches the real wheel. The file stays in the user's cache."""
    try:
        file = registry.pull(registry.DEFAULT)
    except LlamaGpuError as error:
        if "does not answer" in error.cause:
            pytest.skip(error.cause)
        raise
    assert file.stat().st_size == 98_362_432
    assert registry.path("smollm2") == file


# --- the catalogue -----------------------------------------------------------------------------------------


def test_catalogue():
    from gguf import MODEL_ARCH_NAMES

    assert len(names()) == sum(1 + len(e.aliases) for e in CATALOGUE.values()), "a name is given twice"
    for entry in CATALOGUE.values():
        assert parse_spec(entry.hub_spec) == HubSpec(entry.repo, quant=entry.quant)
        assert entry.architecture in MODEL_ARCH_NAMES.values()
        assert entry.runs == (entry.architecture in ARCHITECTURES)
        assert entry.file_bytes > 50e6 and entry.context >= 2048 and entry.licence and entry.title
        Sampling(**entry.sampling)
        assert not entry.sampling or "temperature" in entry.sampling
    smollm2 = CATALOGUE[registry.DEFAULT]
    assert [e.name for e in CATALOGUE.values() if e.status == "tried"] == [smollm2.name]
    assert smollm2.runs and smollm2.wheel and smollm2.wheel.file_bytes == smollm2.file_bytes


def test_models_md_lists_the_catalogue():
    rows = [line.split(" | ") for line in (ROOT / "models.md").read_text().splitlines() if line.startswith("| `")]
    rows = {row[0].strip("| `").removesuffix("` (default)"): row for row in rows if len(row) == 7}
    assert list(rows) == list(CATALOGUE)
    for entry in CATALOGUE.values():
        _, title, file, source, *rest = rows[entry.name]
        assert title == entry.title and file == f"{entry.quant}, {size(entry.file_bytes)}"
        assert (entry.wheel.package if entry.wheel else entry.repo) in source
        assert rest == [entry.licence, str(entry.context), f"{entry.status} |"]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("qwen2.5-1.5b", ("qwen2.5-1.5b", "Q4_K_M")),
        ("qwen2.5-1.5b:q8_0", ("qwen2.5-1.5b", "q8_0")),
        ("smollm2-135m:q4_1", ("smollm2", "Q4_1")),
        ("qwen2.5-1.5b:", None),
        ("qwen2.5", None),
        ("hf:u/r", None),
        ("./smollm2", None),
    ],
)
def test_find(spec, expected):
    found = find(spec)
    assert (found and (found[0].name, found[1])) == expected


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("llama3.2:1b", "did you mean llama-3.2-1b?"),
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "did you mean llama-3.2-1b?"),
        ("ministral", "did you mean ministral-3-3b or ministral-3-8b?"),
        ("Qwen/Qwen3-8B-GGUF", "did you mean hf:Qwen/Qwen3-8B-GGUF?"),
        ("u/r:q8_0", "did you mean hf:u/r:q8_0?"),
        ("u/r/m.gguf", "did you mean hf:u/r/m.gguf?"),
        ("here/r", "give a GGUF file, a name (see `llamagpu models`) or hf:user/repo[:QUANT]"),
        ("there/m.gguf", "give a GGUF file, a name (see `llamagpu models`) or hf:user/repo[:QUANT]"),
        ("./u/r", "give a GGUF file, a name (see `llamagpu models`) or hf:user/repo[:QUANT]"),
        ("ab", "give a GGUF file, a name (see `llamagpu models`) or hf:user/repo[:QUANT]"),
    ],
)
def test_did_you_mean(spec, remedy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    cause = "no such file:" if "/" in spec or spec.endswith(".gguf") else "no model or file is called"
    assert failure(spec) == (f"{cause} {spec}", remedy)


def test_search_and_suggest():
    assert [e.name for e in search("INSTRUCT llama 1b")] == ["llama-3.2-1b"]
    assert "gpt-oss-20b" in [e.name for e in search("")] and search("gpt gemma") == []
    assert suggest("smollm3-3") == ["smollm3"] and suggest("zzz") == []


def test_suggested_sampling():
    assert suggested_sampling("qwen2.5-7b:q8_0") == CATALOGUE["qwen2.5-7b"].sampling != {}
    assert suggested_sampling("mistral-7b") is None  # its maker publishes none
    assert suggested_sampling("m.gguf") is suggested_sampling("hf:u/r:Q8_0") is None


def test_architecture_that_does_not_run(monkeypatch):
    """The message comes before anything is fetched."""
    monkeypatch.setitem(CATALOGUE, "new", replace(tiny_entry(), name="new", architecture="mamba"))
    monkeypatch.setattr(registry, "_download", None)
    monkeypatch.setattr(registry, "fetch_from_hub", None)
    for call in (registry.pull, registry.resolve):
        with pytest.raises(Unsupported, match="new has the architecture mamba, which llamagpu does not run yet") as e:
            call("new")
        assert e.value.exit_code == 4 and CATALOGUE[re.match(r"try (.+?); ", e.value.remedy)[1]].runs


# --- wheels ------------------------------------------------------------------------------------------------


def test_pull_list_path_remove(wheels, capfd):
    def listed():
        return {m.entry.name: m.path for m in registry.list_models()}["tiny"]

    assert listed() is None
    with pytest.raises(LlamaGpuError, match="not been fetched"):
        registry.path("tiny")
    file = registry.resolve("tiny")
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and "fetching tiny (3 MB, once)" in err
    assert file.read_bytes() == GGUF
    assert cached() == ["tiny.gguf"]
    assert listed() == registry.path("tiny") == file
    (wheels / WHEEL).unlink()
    assert registry.resolve("tiny", offline=True) == registry.pull("tiny") == file
    assert capfd.readouterr() == ("", "")
    assert registry.remove("tiny") == file
    assert listed() is None and not file.exists()
    with pytest.raises(LlamaGpuError, match="not in the cache"):
        registry.remove("tiny")
    with pytest.raises(LlamaGpuError, match="no model is called nix"):
        registry.remove("nix")


def test_present_model_needs_no_writing(wheels):
    """A cache that an administrator filled may be read-only."""
    registry.models_dir().mkdir(parents=True)
    (registry.models_dir() / "tiny.gguf").write_bytes(GGUF)
    assert registry.resolve("tiny").read_bytes() == GGUF
    assert os.listdir(registry.models_dir()) == ["tiny.gguf"]


def test_damaged_file_is_fetched_again(wheels):
    file = registry.resolve("tiny", progress=False)
    file.write_bytes(GGUF[:-1])  # cut short: every run checks the size
    assert registry.resolve("tiny", progress=False).read_bytes() == GGUF
    file.write_bytes(FLIPPED)  # `models pull` checks the checksum
    assert registry.pull("tiny", progress=False).read_bytes() == GGUF


@pytest.mark.parametrize(
    ("content", "file", "expected"),
    [
        (FLIPPED, "fake_tiny/tiny.gguf", "checksum is wrong"),
        (GGUF[:-1], "fake_tiny/tiny.gguf", "checksum is wrong"),
        (GGUF + bytes(20 << 20), "fake_tiny/tiny.gguf", "checksum is wrong"),
        (GGUF, "fake_tiny/other.gguf", "holds no tiny.gguf"),
    ],
    ids=["flipped", "short", "long", "absent"],
)
def test_wrong_wheel(wheels, content, file, expected):
    make_wheel(wheels, content, file)
    assert expected in failure()[0]
    assert cached() == []


def test_damaged_wheel(wheels):
    wheel = wheels / WHEEL
    data = bytearray(wheel.read_bytes())
    data[1000:2000] = bytes(1000)  # inside the GGUF: the archive's own CRC catches it
    wheel.write_bytes(data)
    assert "is damaged" in failure()[0]
    wheel.write_bytes(data[:50_000])
    assert "fake-tiny" in failure()[0]
    assert cached() == []


def test_no_pip(wheels, monkeypatch):
    monkeypatch.setitem(sys.modules, "pip", None)
    cause, remedy = failure()
    assert "pip" in cause and "ensurepip" in remedy


def test_modules_in_the_current_folder_do_no_harm(wheels, tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("raise SystemExit('not the real pip')")
    monkeypatch.chdir(tmp_path)
    assert registry.resolve("tiny", progress=False).read_bytes() == GGUF


def test_no_such_wheel(wheels):
    (wheels / WHEEL).unlink()
    assert "no wheel of fake-tiny 1.0" in failure()[0]


def test_a_source_archive_is_not_built(wheels):
    (wheels / WHEEL).rename(wheels / "fake_tiny-1.0.zip")
    assert "no wheel of fake-tiny 1.0" in failure()[0]


def test_no_network(wheels, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    cause, remedy = failure()
    assert "does not answer" in cause and "network" in remedy
    assert cached() == []


def test_offline(wheels):
    cause, remedy = failure(offline=True)
    assert "has not been fetched" in cause and "models pull tiny" in remedy
    assert not registry.models_dir().exists()


def test_no_space(wheels, monkeypatch):
    monkeypatch.setitem(CATALOGUE, "tiny", tiny_entry(replace(TINY, file_bytes=1 << 60)))
    cause, remedy = failure()
    assert "MB free and fetching needs 1,152,9" in cause and "LLAMAGPU_CACHE" in remedy


def test_no_space_for_the_file(wheels, monkeypatch):
    """The disk fills up between the check and the extraction."""
    monkeypatch.setattr(registry, "_need_space", lambda *_: None)
    monkeypatch.setitem(CATALOGUE, "tiny", tiny_entry(replace(TINY, file_bytes=1 << 60)))
    cause, remedy = failure()
    assert "no space left in" in cause and "LLAMAGPU_CACHE" in remedy
    assert cached() == []


@pytest.mark.parametrize("where", ["a file/cache", "/sys/llamagpu"])
def test_cache_cannot_be_written(wheels, tmp_path, monkeypatch, where):
    (tmp_path / "a file").write_text("x")
    if where.startswith("/sys") and not Path("/sys").is_dir():
        pytest.skip("no /sys here")
    monkeypatch.setenv("LLAMAGPU_CACHE", str(tmp_path / where))
    cause, remedy = failure()
    assert "cannot write to" in cause and "LLAMAGPU_CACHE" in remedy
    assert registry.fetched(CATALOGUE["tiny"]) is None


def test_two_runs_at_once(wheels):
    """Both wait for a lock that the test holds. Then one fetches, and the other finds the file."""
    from filelock import FileLock

    registry.models_dir().mkdir(parents=True)
    with FileLock(registry.models_dir() / ".tiny.lock"):
        runs = [start_pull(), start_pull()]
        for run in runs:
            assert "waiting for another run" in run.stderr.readline()
        assert cached() == []
    results = [run.communicate(timeout=60) for run in runs]
    assert [out.strip() for out, _ in results] == [str(registry.models_dir() / "tiny.gguf")] * 2
    assert sum("fetching tiny" in err for _, err in results) == 1
    assert cached() == ["tiny.gguf"]


def serve(handler) -> http.server.ThreadingHTTPServer:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class Index(http.server.BaseHTTPRequestHandler):
    """A package index that sends its wheel slowly. With `stall` set it stops half-way."""

    def do_GET(self):
        is_wheel = self.path.endswith(".whl")
        body = self.server.wheel if is_wheel else f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream" if is_wheel else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not is_wheel:
            self.wfile.write(body)
            return
        step = len(body) // 8 + 1
        for i in range(8):
            if i == 4 and self.server.stall:
                self.server.half_sent.set()
                return self.server.done.wait(60)
            self.wfile.write(body[i * step : (i + 1) * step])
            time.sleep(0.1)

    def log_message(self, *args):
        pass


@pytest.fixture
def index(wheels, monkeypatch):
    server = serve(Index)
    server.wheel, server.stall = (wheels / WHEEL).read_bytes(), False
    server.half_sent, server.done = threading.Event(), threading.Event()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/simple")
    yield server
    server.done.set()
    server.shutdown()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_stopped_half_way(index, sent):
    index.stall = True
    run = start_pull(start_new_session=True)
    assert index.half_sent.wait(60)
    os.killpg(run.pid, sent)
    run.communicate(timeout=30)
    # A killed run leaves its scratch folder; the next run removes it.
    assert [name[:10] for name in cached()] == ([".tiny.tmp-"] if sent == signal.SIGKILL else [])
    index.stall = False
    assert registry.resolve("tiny", progress=False).read_bytes() == GGUF
    assert cached() == ["tiny.gguf"]


def test_bar_on_a_terminal(index):
    ours, theirs = pty.openpty()
    run = start_pull(stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            block = os.read(ours, 4096)
        except OSError:  # Linux: the other side has closed it
            break
        if not block:
            break
        seen += block
    os.close(ours)
    assert run.communicate()[0].strip() == str(registry.models_dir() / "tiny.gguf")
    assert b"fetching tiny" in seen and b"3.1/3.1 MB" in seen and b"B/s" in seen
    assert re.search(rb"[12]\.\d/3\.1 MB", seen), "the bar has to move"


# --- the hub -----------------------------------------------------------------------------------------------

REPO = ["README.md", "m-Q8_0.gguf", "m-BF16.gguf", "m-F16.gguf", "m-Q4_0.gguf", "m-Q4_K_M.gguf"]
REPO += ["mmproj-F16.gguf"]
SPLIT = ["UD-Q4_K_XL/m-00001-of-00002.gguf", "UD-Q4_K_XL/m-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("hf:u/r", HubSpec("u/r")),
        ("hf:u-1/r.x_2:Q4_K_M", HubSpec("u-1/r.x_2", quant="Q4_K_M")),
        ("hf:u/r/sub dir/m.gguf", HubSpec("u/r", file="sub dir/m.gguf")),
    ],
)
def test_hub_spec(spec, expected):
    assert parse_spec(spec) == expected


@pytest.mark.parametrize("rest", ["", "u", "u/", "u/r:", "u/r/m.bin", "u/r/m.gguf:Q4_0", "/u/r", "u/r?x"])
def test_bad_hub_spec(rest):
    spec = "hf:" + rest
    assert "hf:user/repo[:QUANT]" in failure(spec)[0]


@pytest.mark.parametrize(
    ("spec", "names", "expected"),
    [
        (HubSpec("u/r"), REPO, ["m-Q4_K_M.gguf"]),
        (HubSpec("u/r"), REPO[:5], ["m-Q4_0.gguf"]),
        (HubSpec("u/r"), REPO[:4], ["m-BF16.gguf"]),
        (HubSpec("u/r", quant="q8_0"), REPO, ["m-Q8_0.gguf"]),
        (HubSpec("u/r", quant="f16"), REPO, ["m-F16.gguf"]),
        (HubSpec("u/r", quant="16"), REPO, ["m-BF16.gguf"]),
        (HubSpec("u/r", quant="Q4_K"), REPO, ["m-Q4_K_M.gguf"]),
        (HubSpec("u/r", file="mmproj-F16.gguf"), REPO, ["mmproj-F16.gguf"]),
        (HubSpec("u/r", quant="Q4_K_XL"), REPO + SPLIT, SPLIT),
        (HubSpec("u/r", quant="UD-Q4_K_XL"), REPO + SPLIT, SPLIT),
        (HubSpec("u/r", file=SPLIT[1]), REPO + SPLIT, SPLIT),
    ],
)
def test_select_files(spec, names, expected):
    assert select_files(spec, names) == select_files(spec, names[::-1]) == expected


@pytest.mark.parametrize(
    ("spec", "names", "expected"),
    [
        (HubSpec("u/r"), ["README.md", "mmproj-F16.gguf"], "holds no .gguf"),
        (HubSpec("u/r", quant="Q2_K"), REPO, "has no Q2_K file"),
        (HubSpec("u/r", file="x.gguf"), REPO, "holds no x.gguf"),
        (HubSpec("u/r"), SPLIT[1:], "1 of the model's 2 files are missing"),
    ],
)
def test_select_files_fails(spec, names, expected):
    with pytest.raises(LlamaGpuError, match=expected) as caught:
        select_files(spec, names)
    if names is REPO:
        assert "m-Q4_0.gguf" in caught.value.remedy and "README" not in caught.value.remedy


class Hub(http.server.BaseHTTPRequestHandler):
    """The routes of the hub that fetching a file needs."""

    commit = "0123456789abcdef0123456789abcdef01234567"
    broken = False

    def do_GET(self):
        path = self.path.split("?")[0]
        self.server.seen.append((self.command, path, self.headers.get("Authorization")))
        if self.server.broken:
            return self.answer(503, b"")
        if "/tree/" in path:
            repo = path.removeprefix("/api/models/").split("/tree/")[0]
            files = [{"type": "file", "path": f, "size": 9, "oid": "0" * 40} for f in self.server.repos[repo]]
            return self.answer(200, json.dumps(files).encode(), {"Content-Type": "application/json"})
        if path.startswith("/api/models/"):
            repo = path.removeprefix("/api/models/").removesuffix("/revision/main")
            if repo not in self.server.repos:
                return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            files = [{"rfilename": name} for name in self.server.repos[repo]]
            body = {"id": repo, "sha": self.commit, "siblings": files, "tags": [], "private": False}
            return self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        owner, name, _, _, file = path[1:].split("/", 4) if "/resolve/" in path else ("", "", "", "", "")
        if f"{owner}/{name}" == "u/gated":
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        if file not in self.server.repos.get(f"{owner}/{name}", []):
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        body = file.encode() * 1000
        etag = hashlib.sha256(body).hexdigest()
        return self.answer(200, body, {"ETag": f'"{etag}"', "X-Repo-Commit": self.commit})

    do_HEAD = do_GET  # noqa: N815

    def answer(self, status, body, headers=None):
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    server = serve(Hub)
    server.seen, server.broken = [], False
    server.repos = {"u/r": REPO + SPLIT, "u/none": ["README.md"], "u/gated": ["m-Q4_0.gguf"]}
    server.home = tmp_path / "hf"
    yield server
    server.shutdown()


RESOLVE = """
import json, sys
from llamagpu.errors import LlamaGpuError
from llamagpu.hub import registry
answers = []
for spec in sys.argv[1:]:
    try:
        answers.append({"path": str(registry.resolve(spec))})
    except LlamaGpuError as error:
        answers.append({"cause": error.cause, "remedy": error.remedy})
print(json.dumps(answers))
"""


def hub_env(hub) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    return clean | {"HF_ENDPOINT": endpoint, "HF_HOME": str(hub.home)}


def resolve_specs(hub, *specs: str, **env: str) -> tuple[list[dict], str]:
    """Resolves the specs in a process of its own: one answer for each, and stderr."""
    command = [sys.executable, "-c", RESOLVE, *specs]
    run = subprocess.run(command, env=hub_env(hub) | env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout), run.stderr


def test_hub_fetches_once_and_then_works_without_it(hub):
    specs = ["hf:u/r", "hf:u/r:q8_0", "hf:u/r/m-F16.gguf", "hf:u/r:UD-Q4_K_XL"]
    answers, err = resolve_specs(hub, *specs, HF_TOKEN="hf_secret")
    paths = [Path(a["path"]) for a in answers]
    names = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-F16.gguf", "m-00001-of-00002.gguf"]
    assert [p.name for p in paths] == names
    assert [p.read_bytes()[: len(p.name)].decode() for p in paths[:3]] == names[:3]
    assert (paths[3].parent / "m-00002-of-00002.gguf").is_file()
    assert all(hub.home in p.parents for p in paths)
    assert [line for line in err.splitlines() if line.startswith("fetching")] == [
        f"fetching hf:u/r/{name}" for name in [*names[:3], *SPLIT]
    ]
    assert {token for _, path, token in hub.seen if "/u/r" in path} == {"Bearer hf_secret"}

    hub.seen.clear()
    again, err = resolve_specs(hub, *specs)
    assert again == answers and err == ""
    assert not [path for command, path, _ in hub.seen if command == "GET" and "/resolve/" in path]

    hub.seen.clear()
    assert resolve_specs(hub, *specs, HF_HUB_OFFLINE="1") == (answers, "")
    assert hub.seen == []
    assert resolve_specs(hub, *specs, HF_ENDPOINT="http://127.0.0.1:9") == (answers, "")
    hub.broken = True
    assert resolve_specs(hub, *specs) == (answers, "")


def test_partial_snapshot_works_offline(hub):
    """snapshot_download keeps a list of the repository's files; those that were not fetched do not matter."""
    hub.repos["u/r"] = ["config.json", *REPO]
    code = "import huggingface_hub; huggingface_hub.snapshot_download('u/r', allow_patterns=['*.json', '*Q4_0.gguf'])"
    subprocess.run([sys.executable, "-c", code], env=hub_env(hub), check=True, capture_output=True)
    (found,), _ = resolve_specs(hub, "hf:u/r", HF_HUB_OFFLINE="1")
    assert Path(found["path"]).name == "m-Q4_0.gguf"


def test_hub_errors(hub):
    answers, err = resolve_specs(hub, "hf:u/missing", "hf:u/none", "hf:u/gated", "hf:u/r:Q2_K", "hf:u/r/x.gguf")
    assert [a["cause"] for a in answers] == [
        "there is no hf:u/missing, or it is private",
        "hf:u/none holds no .gguf file",
        "hf:u/gated is gated",
        "hf:u/r has no Q2_K file",
        "hf:u/r holds no x.gguf",
    ]
    assert "HF_TOKEN" in answers[0]["remedy"] and "HF_TOKEN" in answers[2]["remedy"]
    assert "m-Q4_0.gguf" in answers[3]["remedy"]
    assert err == "fetching hf:u/gated/m-Q4_0.gguf\n"


def test_hub_without_network(hub):
    (answer,), err = resolve_specs(hub, "hf:u/r", HF_ENDPOINT="http://127.0.0.1:9")
    assert answer["cause"].startswith("cannot fetch hf:u/r: ") and "network" in answer["remedy"]
    (offline,), _ = resolve_specs(hub, "hf:u/r", HF_HUB_OFFLINE="1")
    assert offline["cause"] == "hf:u/r has not been fetched yet"
    assert err == ""
    hub.broken = True
    (broken,), _ = resolve_specs(hub, "hf:u/r")
    assert broken["cause"] == "the hub answered 503 for hf:u/r"
    assert not any("\n" in text for a in (answer, offline, broken) for text in a.values())


def test_hub_cache_cannot_be_written(hub, tmp_path):
    (tmp_path / "a file").write_text("x")
    (answer,), _ = resolve_specs(hub, "hf:u/r", HF_HOME=str(tmp_path / "a file/hf"))
    assert "cannot write to" in answer["cause"] and "HF_HOME" in answer["remedy"]


STEPS = """
import json, sys
from llamagpu.errors import LlamaGpuError
from llamagpu.hub import registry
from llamagpu.hub.catalogue import CATALOGUE, Entry
CATALOGUE["tiny"] = Entry("tiny", "a test", "u/r", "Q4_K_M", 9000, "MIT", 64, "llama", {})
answers = []
for step in sys.argv[1:]:
    name, spec = step.split(" ")
    try:
        answers.append(str(registry.fetched(CATALOGUE[spec]) if name == "fetched" else getattr(registry, name)(spec)))
    except LlamaGpuError as error:
        answers.append(error.cause)
print(json.dumps(answers))
"""


def run_steps(hub, *steps: str) -> list[str]:
    """Calls functions of the registry, in a process of its own; the name `tiny` means u/r on the local hub."""
    run = subprocess.run([sys.executable, "-c", STEPS, *steps], env=hub_env(hub), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_name_on_the_hub(hub):
    assert run_steps(hub, "fetched tiny", "path tiny", "remove tiny:q8_0", "remove hf:u/r") == [
        "None",
        "tiny has not been fetched yet",
        "tiny:q8_0 is not in the cache",
        "hf:u/r is not in the cache",
    ]
    assert hub.seen == []

    specs = ["tiny", "tiny:q8_0", "tiny:UD-Q4_K_XL"]
    paths = run_steps(hub, *(f"pull {spec}" for spec in specs))
    assert [Path(p).name for p in paths] == ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-00001-of-00002.gguf"]

    hub.seen.clear()
    found, *same, several = run_steps(hub, "fetched tiny", *(f"path {spec}" for spec in specs), "remove hf:u/r")
    assert found == paths[0] and same == paths
    assert "the cache has several files of hf:u/r: " in several and "m-Q8_0.gguf" in several

    blobs = hub.home / "hub/models--u--r/blobs"
    assert len(list(blobs.iterdir())) == 4
    assert run_steps(hub, "remove tiny:UD-Q4_K_XL", "remove tiny", "fetched tiny") == [paths[2], paths[0], paths[1]]
    assert len(list(blobs.iterdir())) == 1 and Path(paths[1]).is_file()
    assert run_steps(hub, "remove hf:u/r", "remove hf:u/r", "fetched tiny")[1:] == [
        "hf:u/r is not in the cache",
        "None",
    ]
    assert not list(blobs.iterdir()) and hub.seen == []
