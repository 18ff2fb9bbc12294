"""The set-up scripts, with stubs of python, pip and apt-get that log how they are called."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

SCRIPTS = [ROOT / "scripts/run", ROOT / "scripts/test", ROOT / ".ci/run"]

# Real for `-c`. `-m venv` and `-m pip install` are logged in $LOG; the latter takes $SLOW seconds.
PYTHON = f"""#!/bin/bash
case "$*" in
    *wgpu*) [ -e "$LOG.adapter" ]; exit ;;
    *"-m venv "*) echo venv >>"$LOG"; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    *"pip install"*) echo "pip ${{@: -1}} user=$PIP_USER" >>"$LOG"; sleep "${{SLOW:-0}}"
        if [ -e "$LOG.broken" ]; then cat "$LOG.broken"; exit 1; fi
        printf '#!/bin/sh\\nprintf "<%%s>" "$@"\\n[ ! -e /dev/fd/9 ] || echo leaked\\nexit 5\\n' \\
            >"$(dirname "$0")/llamagpu"
        chmod +x "$(dirname "$0")/llamagpu" ;;
    *"-m pip --version"*) exit 0 ;;
    *"-m ruff check"*) echo lint; exit "${{LINT:-0}}" ;;
    *"-m ruff format --check"*) echo format ;;
    *"-m mypy"*) echo types ;;
    *"-m pytest"*) shift 2; echo "tests $*"; exit "${{TESTS:-0}}" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def heed_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job ignores it, and so do its children


class Checkout:
    def __init__(self, base: Path) -> None:
        self.root, self.bin, self.log = base / "a check out", base / "bin", base / "log"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        shutil.copytree(ROOT / ".ci", self.root / ".ci")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.venv = self.root / ".venv"
        for name in ("python3", "python", *(f"python3.{minor}" for minor in range(11, 15))):
            executable(self.bin / name, PYTHON)
        executable(self.bin / "apt-get", '#!/bin/sh\necho "apt-get $*" >>"$LOG"; touch "$LOG.apt"\n')
        executable(self.bin / "id", "#!/bin/sh\necho 0\n")
        self.adapter = base / "log.adapter"
        self.adapter.touch()
        self.broken = base / "log.broken"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "LLAMAGPU_"))}
        self.env |= {"PATH": f"{self.bin}:{os.environ['PATH']}", "LOG": str(self.log), "HOME": str(base)}
        self.env |= {"HOSTNAME": "here"}

    def start(self, *args: str, script: str = "scripts/run", **env: str) -> subprocess.Popen:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [str(self.root / script), *args]
        return subprocess.Popen(
            command, cwd="/", env=self.env | env, text=True, start_new_session=True, preexec_fn=heed_ctrl_c, **streams
        )

    def run(self, *args: str, **kwargs: str) -> tuple[int, str, str]:
        process = self.start(*args, **kwargs)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def calls(self) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / "scripts/setup.sh"], ids=lambda p: p.name)
def test_syntax(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert (script in SCRIPTS) == os.access(script, os.X_OK)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-S", "warning", "-s", "bash", script], check=True)


def test_first_run_sets_up_and_the_second_is_silent(checkout):
    code, out, err = checkout.run("generate", "-p", "Once upon  a time", "*", "")
    assert (code, out) == (5, "<generate><-p><Once upon  a time><*><>")
    assert err.count("\n") == 1 and "installing packages (half a minute or so) ... done" in err
    assert checkout.calls() == ["venv", "pip . user=0"]

    before = os.times()
    assert checkout.run("x") == (5, "<x>", "")
    used = os.times().children_user + os.times().children_system - before.children_user - before.children_system
    assert used < 0.5, used  # 0.02 measured: nothing is imported, nothing installed
    assert checkout.calls() == []
    executable(checkout.venv / "bin/llamagpu", '#!/bin/sh\necho "$LLAMAGPU_PROGRAM"\n')
    assert checkout.run("x")[1] == f"{checkout.root}/scripts/run\n"  # the name for messages


def test_started_through_a_link(checkout, tmp_path):
    (tmp_path / "link").symlink_to(checkout.root / "scripts/run")
    run = subprocess.run([tmp_path / "link", "x"], env=checkout.env, capture_output=True, text=True)
    assert run.stdout == "<x>" and checkout.venv.is_dir()


def test_changed_declarations_install_again(checkout):
    checkout.run()
    checkout.calls()
    with (checkout.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert checkout.run("x")[:2] == (5, "<x>")
    assert checkout.calls() == ["pip . user=0"]


def test_lost_interpreter_is_replaced(checkout):
    checkout.run()
    checkout.calls()
    (checkout.venv / "bin/python").unlink()
    assert checkout.run("x")[:2] == (5, "<x>")
    assert checkout.calls() == ["venv", "pip . user=0"]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_killed_half_way_heals(checkout, sent, again):
    if again:  # an environment that is complete, but out of date
        checkout.run()
        (checkout.root / "pyproject.toml").write_text("[project]\n")
        checkout.calls()
    process = checkout.start(SLOW="30")
    while not (checkout.log.exists() and "pip" in checkout.log.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, sent)
    assert process.wait(10) != 0
    checkout.calls()
    (checkout.venv / "lib").mkdir(exist_ok=True)
    (checkout.venv / "lib/half").touch()
    assert checkout.run("x")[:2] == (5, "<x>")
    assert checkout.calls() == ["venv", "pip . user=0"]
    assert not (checkout.venv / "lib/half").exists()


def test_three_runs_at_once_install_once(checkout):
    """All wait for a lock that the test holds. Then one installs, and the others find it done."""
    checkout.venv.mkdir(parents=True)
    with (checkout.venv / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runs = [checkout.start(str(i)) for i in range(3)]
        for run in runs:
            assert "waiting for another run" in run.stderr.readline()
        assert checkout.calls() == []
    results = [run.communicate(timeout=60) for run in runs]
    assert [out for out, _ in results] == ["<0>", "<1>", "<2>"]
    assert sum("setting up" in err for _, err in results) == 1
    assert checkout.calls() == ["venv", "pip . user=0"]


def test_failed_install(checkout):
    checkout.broken.write_text("ERROR: No matching distribution found\n")
    code, out, err = checkout.run("x")
    assert (code, out) == (1, "")
    assert "ERROR: No matching distribution found. Check `pip config list`" in err and "install.log" in err
    assert err.count("\n") == 2  # what it does, then what went wrong
    checkout.broken.unlink()
    assert checkout.run("x")[:2] == (5, "<x>")


def test_own_environment_is_kept(checkout):
    """A .venv that the user made gets the package and keeps its files."""
    executable(checkout.venv / "bin/python", PYTHON)
    executable(checkout.venv / "bin/mine", "")
    assert checkout.run("x")[:2] == (5, "<x>")
    assert checkout.calls() == ["pip . user=0"]
    assert (checkout.venv / "bin/mine").exists()


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("exit 127", "Python 3.11 or newer is needed, and there is none"),
        ('case "$2" in *print*) echo 3.9 ;; *) exit 1 ;; esac', "3.11 or newer is needed, python3 is 3.9"),
        ('case "$2" in *print*) echo 3.12 ;; *ensurepip*) exit 1 ;; esac', "apt-get install python3.12-venv"),
    ],
    ids=["none", "old", "no-venv"],
)
def test_no_usable_python(checkout, answers, expected):
    for python in checkout.bin.glob("python*"):
        executable(python, f"#!/bin/bash\n{answers}\n")
    code, out, err = checkout.run("x")
    assert (code, out) == (1, "") and expected in err
    assert not checkout.venv.exists()


def test_newer_python_beside_an_old_one(checkout):
    executable(checkout.bin / "python3", '#!/bin/bash\ncase "$2" in *print*) echo 3.9 ;; *) exit 1 ;; esac\n')
    assert checkout.run("x")[:2] == (5, "<x>")


def test_adapter_missing_then_mesa(checkout):
    checkout.adapter.unlink()
    executable(checkout.bin / "apt-get", '#!/bin/sh\necho "apt-get $*" >>"$LOG"; touch "$LOG.adapter"\n')
    code, out, err = checkout.run("x")
    assert (code, out) == (5, "<x>") and "Mesa's software Vulkan driver ... done" in err
    update, install = checkout.calls()[2:]
    assert update.endswith(" update") and install.endswith("libvulkan1 mesa-vulkan-drivers")
    assert checkout.run("x") == (5, "<x>", "")


def test_adapter_missing_and_no_rights(checkout):
    checkout.adapter.unlink()
    executable(checkout.bin / "id", "#!/bin/sh\necho 1000\n")
    executable(checkout.bin / "sudo", "#!/bin/sh\nexit 1\n")
    code, out, err = checkout.run("x")
    assert (code, out) == (5, "<x>")  # some commands need no adapter
    assert "    sudo apt-get install mesa-vulkan-drivers" in err and "installing Mesa" not in err
    assert not [line for line in checkout.calls() if line.startswith("apt-get")]
    assert checkout.run("x") == (5, "<x>", "")  # the message is not repeated


def test_mesa_cannot_be_installed(checkout):
    checkout.adapter.unlink()
    executable(checkout.bin / "apt-get", '#!/bin/sh\necho tried >>"$LOG"; echo "E: no such package"; exit 100\n')
    assert "failed" in (err := checkout.run("x")[2]) and "E: no such package" in err
    assert checkout.calls()[2:] == ["tried", "tried"]
    assert checkout.run("x") == (5, "<x>", "") and checkout.calls() == []


@pytest.mark.parametrize(
    "said, told",
    [
        ("OSError: [Errno 28] No space left on device", "no space left on the disk. Free some"),
        ("WARNING: NewConnectionError(...)\nERROR: No matching distribution", "does not answer. Check the network"),
        ("", "see the log. Check"),
    ],
)
def test_why_the_install_failed(checkout, said, told):
    checkout.broken.write_text(said)
    assert told in checkout.run("x")[2]


def test_checkout_that_cannot_be_written(checkout, tmp_path):
    """Root may write anywhere, so for root a plain file is in the way of the environment."""
    if os.geteuid():
        checkout.root.chmod(0o555)
    else:
        checkout.venv.touch()
    for setting, folder in (("XDG_CACHE_HOME", "c/llamagpu"), ("LLAMAGPU_CACHE", "d")):
        cache = {setting: str(tmp_path / folder.split("/")[0])}
        assert checkout.run("x", **cache)[:2] == (5, "<x>")
        assert checkout.run("x", **cache) == (5, "<x>", "")
        assert len(list((tmp_path / folder).glob("venv-*/.ready-run"))) == 1
    checkout.root.chmod(0o755)


@pytest.mark.parametrize(("lint", "tests", "worst"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 5, 5), (2, 1, 2)])
def test_all_checks_run_and_the_worst_code_counts(checkout, lint, tests, worst):
    code, out, err = checkout.run("-k", "a b", script=".ci/run", LINT=str(lint), TESTS=str(tests))
    assert code == worst
    assert [line.split()[0] for line in out.splitlines()] == ["lint", "format", "types", "tests"]
    assert out.endswith("-k a b\n") and "done" in err
    assert checkout.calls() == ["venv", "pip .[test,dev] user=0"]
    assert checkout.run("x") == (5, "<x>", "")  # an environment for tests is also one for runs
    out, err = checkout.run(script="scripts/test")[1:]
    assert re.search(r"^start-up: llamagpu --help \d+\.\d+ s$", out, re.M) and err == ""
    assert checkout.calls() == []


def test_portability_names_its_jobs(checkout):
    code, out, err = checkout.run("--portability", "metal", script="scripts/test")
    assert (code, out) == (2, "")
    assert err.endswith("no job is called 'metal': choose tint, swiftshader, dawn, opengl\n")


@pytest.mark.slow
def test_real_set_up(tmp_path):
    """`--help` in a copy of this checkout, with an environment from the package index."""
    root = tmp_path / "a copy"
    ignored = shutil.ignore_patterns(".git", ".venv", "*_cache", "__pycache__", ".hypothesis")
    shutil.copytree(ROOT, root, ignore=ignored)
    for first in (True, False):
        help_ = [root / "scripts/run", "--help"]
        run = subprocess.run(help_, cwd="/", capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, run.stderr
        assert "generate" in run.stdout
        assert ("setting up" in run.stderr) == first
