"""The command line as a user meets it: what comes out where, exit codes, Ctrl-C, pipes, terminals."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from conftest import ROOT, shared_data
from gguf_builder import tiny_llama, tiny_parts, write_gguf

from llamagpu import cli
from llamagpu.engine import selfcheck
from llamagpu.files.gguf_file import GgufFile
from llamagpu.files.tokenizer import Tokenizer
from llamagpu.gpu.device import Gpu

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"
RANDOM = ["--ignore-eos", "--seed", "7"]  # random weights would end their text anywhere


class Result(NamedTuple):
    code: int
    out: bytes
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", context=4096)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("model") / "chat.gguf"
    return tiny_llama(file, context=512, metadata={"tokenizer.chat_template": TEMPLATE})


@pytest.fixture
def run(gpu, monkeypatch, capfdbinary):
    """llamagpu ARGS in this process, with the tests' open device."""
    opened = Gpu.open
    monkeypatch.setattr(Gpu, "open", lambda wanted=None: opened(wanted) if wanted else gpu)
    monkeypatch.setattr(gpu, "close", lambda: None)
    monkeypatch.delenv("LLAMAGPU_DEBUG", raising=False)

    def call(*args: object, stdin: bytes = b"", **env: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["llamagpu", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfdbinary.readouterr()
        for name in env:
            monkeypatch.delenv(name)
        assert "Traceback" not in err.decode() or os.environ.get("LLAMAGPU_DEBUG")
        return Result(ended.value.code, out, err.decode())

    return call


def start(*args: object, **options) -> subprocess.Popen:
    """llamagpu ARGS in a process of its own, which Ctrl-C reaches."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(
        [sys.executable, "-m", "llamagpu", *map(str, args)],
        env=env,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **streams,
    )


def finish(process: subprocess.Popen) -> Result:
    out, err = process.communicate(timeout=60)
    return Result(process.returncode, out, err.decode())


# Help and usage


def test_bare_command_shows_help(run):
    for args in ([], ["--help"], ["-h"]):
        result = run(*args)
        assert result.code == 0 and not result.err
        for command in (b"generate", b"chat", b"tokenize", b"perplexity", b"devices", b"models"):
            assert b"\n  " + command in result.out


def test_every_command_has_help(run):
    for command in ("generate", "chat", "tokenize", "perplexity", "devices", "models"):
        result = run(command, "--help")
        assert result.code == 0 and result.out.startswith(b"Usage: ")


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['llamagpu', 'generate', '--help']\n"
        "from llamagpu.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = set(run.stderr.split())
    assert "typer" in loaded
    assert not loaded & {"numpy", "wgpu", "jinja2", "rich", "huggingface_hub", "gguf", "platformdirs"}


def test_version(run):
    assert run("--version") == (0, b"llamagpu 0.1.0\n", "")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["generate", "--nope"], "--nope"),
        (["nope"], "nope"),
        (["generate", "-p", "x", "--temp", "-1"], "--temp"),
        (["generate", "-p", "x", "-n", "-2"], "--predict"),
        (["generate", "-p", "x", "-n", "many"], "--predict"),
        (["generate", "-p", "x", "--precision", "low"], "--precision"),
        (["generate", "-p", "x", "-ctk", "q8_0"], "--cache-type"),
        (["models", "pull"], "NAME"),
        (["perplexity", "-c", "7", "-f", "x"], "--ctx-size"),
    ],
)
def test_usage_errors(run, args, said):
    result = run(*args)
    assert result.code == 2 and not result.out
    assert result.err.startswith("Usage: ") and said.lower() in result.err.lower()


def test_usage_errors_of_our_own(run, model, chat_model):
    for args, said in (
        (["generate", "-m", model, "-p", "x", "-f", "y"], "both -p and -f"),
        (["generate", "-m", model], "there is no text"),
        (["tokenize", "-m", model], "there is no text"),
        (["generate", "-m", model, "-p", "x", "--system", "y"], "this model has none"),
        (["generate", "-m", chat_model, "-p", "x", "--system", "y", "--raw"], "--raw leaves that out"),
        (["chat", "-m", model], "no chat template"),
        (["tokenize", "-m", model, "--decode", "-p", "[1, x]"], "JSON list of ids"),
        (["tokenize", "-m", model, "--decode", "-p", '{"1": 2}'], "JSON list of ids"),
        (["tokenize", "-m", model, "--decode", "-p", "[true]"], "JSON list of ids"),
    ):
        result = run(*args)
        assert result.code == 2 and not result.out and said in result.err
        assert f"error: {said}" in result.err or said in result.err.splitlines()[-2]  # a cause, then a remedy


# The text that goes in


TEXTS = [b"a b", b" a  b \n\n", b"\n", b"\xff\xfe a\r\nb\x00\xc3", "caf\u00e9 \U0001f600".encode()]


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_prompts_byte_for_byte(run, model, tmp_path, text):
    file = tmp_path / "prompt.txt"
    file.write_bytes(text)
    want = Tokenizer.from_gguf(GgufFile(model).metadata).encode(text.decode("utf-8", "surrogateescape"))
    ways = [(["-f", file], b""), (["-f", "-"], text), (["-p", "-"], text), ([], text)]
    if b"\0" not in text:
        ways.append((["-p", os.fsdecode(text)], b"not this"))
    for args, stdin in ways:
        result = run("generate", "-m", model, "-n", 0, "--json", *args, stdin=stdin)
        assert result.code == 0 and result.json["prompt_ids"] == want
        result = run("tokenize", "-m", model, *args, stdin=stdin)
        assert result == (0, json.dumps(want).encode() + b"\n", "")


def test_empty_prompt_is_just_bos(run, model):
    for args in (["-p", ""], ["-p", "-"], ["-f", os.devnull]):
        assert run("generate", "-m", model, "-n", 0, "--json", *args).json["prompt_ids"] == [1]


def test_chat_template(run, chat_model):
    encode = Tokenizer.from_gguf(GgufFile(chat_model).metadata).encode

    def ids(*args):
        return run("generate", "-m", chat_model, "-p", "hi", "-n", 0, "--json", *args).json["prompt_ids"]

    assert ids() == encode("[user]hi[a]")
    assert ids("--system", "be kind") == encode("[system]be kind[user]hi[a]")
    assert ids("--raw") == ids("-no-cnv") == encode("hi")


def test_template_with_invalid_utf8(run, chat_model):
    result = run("generate", "-m", chat_model, "-n", 0, "--json", stdin=b"\xff")
    assert 258 in result.json["prompt_ids"]  # the token <0xFF>


# The text that comes out


def test_stdout_is_the_text_and_one_newline(run, model):
    args = ["generate", "-m", model, "-p", "a b", "-n", 30, *RANDOM]
    result, found = run(*args), run(*args, "--json")
    assert result.code == found.code == 0
    assert result.out == found.json["text"].encode() + b"\n" and len(result.out) > 10
    assert run(*args, "-q") == (0, result.out, "")


def test_json(run, model):
    result = run("generate", "-m", model, "-p", "a b", "-n", 12, "--json", *RANDOM)
    assert result.out.count(b"\n") == 1 and result.out.endswith(b"\n")
    found = result.json
    assert list(found) == ["prompt_ids", "ids", "text", "finish_reason", "timings"]
    assert len(found["ids"]) == 12 and found["finish_reason"] == "length"
    t = found["timings"]
    assert t["prompt_tokens"] == len(found["prompt_ids"]) and t["tokens"] == 12
    assert all(t[name] > 0 for name in ("load_s", "first_token_s", "prefill_tps", "decode_tps"))


def test_one_line_of_summary(run, gpu, model):
    lines = run("generate", "-m", model, "-p", "a b", "-n", 5, *RANDOM).err.splitlines()
    if gpu.software:
        assert "software adapter" in lines.pop(0)
    assert len(lines) == 1
    for part in ("load ", "prompt 5 tokens, ", "first token ", "| 5 tokens, ", "tok/s"):
        assert part in lines[0]


@pytest.mark.parametrize("tokens, parts", [(0, 2), (1, 3), (2, 4)])
def test_summary_says_nothing_of_speeds_that_nobody_measured(run, model, tokens, parts):
    line = run("generate", "-m", model, "-p", "a b", "-n", tokens, *RANDOM).err.splitlines()[-1]
    assert line.count("|") == parts - 1 and " 0.0 tok/s" not in line


def test_software_adapter_is_named_once(run, gpu, model):
    for command in (["generate", "-p", "a", "-n", 1], ["generate", "-p", "a", "-n", 1, "--json"]):
        result = run(*command, "-m", model)
        assert result.err.count("is a software adapter") == gpu.software


@pytest.mark.parametrize("cache", ["f16", "f32"])
def test_a_cache_that_is_slow_on_a_software_adapter_is_named(run, gpu, model, cache):
    result = run("generate", "-p", "a", "-n", 1, "-m", model, "-ctk", cache, *RANDOM)
    assert ("several times as slow" in result.err) == (gpu.software and cache == "f16")


def test_verbose(run, model):
    result = run("generate", "-m", model, "-p", "a b", "-n", 5, "-v", *RANDOM)
    said = result.err
    stages = ("weights  ", "KV cache (1024)", "scratch", "total", "header ", "seed 7", "load ")
    places = [said.index(stage) for stage in stages]
    assert places == sorted(places)  # the plan comes before the work
    assert "device " in said and "kernels " in said and "precision " in said and "layers apart" in said


def test_seeds(run, model):
    def text(*args):
        return run("generate", "-m", model, "-p", "a b", "-n", 30, "--ignore-eos", "--temp", 1.5, *args).out

    assert text("--seed", 3) == text("-s", 3) != text("-s", 4)
    assert text() != text()
    assert text("--temp", 0) == text("--temp", 0)


def test_stop(run, model):
    args = ["generate", "-m", model, "-p", "a b", "-n", 30, *RANDOM]
    whole = run(*args).out.decode()
    for stop in (whole[4:7], whole[10:12]):
        for flag in ("--stop", "-r", "--reverse-prompt"):
            result = run(*args, flag, "never said", flag, stop)
            assert result.out.decode() == whole[: whole.index(stop)] + "\n"
    assert run(*args, "--stop", whole[4:7], "--json").json["finish_reason"] == "stop"


def test_nothing_to_write(run, model):
    result = run("generate", "-m", model, "-p", "a b", "-n", 0)
    assert result.code == 0 and result.out == b"\n" and "| prompt 5 tokens, " in result.err


def test_context_end(run, model):
    result = run("generate", "-m", model, "-p", "a b", "-c", 32, *RANDOM)
    assert result.code == 0 and result.err.endswith("| the context of 32 is full\n")
    found = run("generate", "-m", model, "-p", "a b", "-c", 32, "--json", *RANDOM).json
    assert found["finish_reason"] == "context" and len(found["prompt_ids"] + found["ids"]) == 33


def test_names_of_llama_cpp_and_mlx(run, model):
    args = ["generate", "--model", model, "--prompt", "a b", "--json", *RANDOM]
    found = [run(*args, name, 7).json["ids"] for name in ("-n", "--predict", "--n-predict", "--max-tokens")]
    assert len(found[0]) == 7 and all(ids == found[0] for ids in found)
    more = ["--ctx-size", 64, "-ub", 2, "-ctk", "f32", "-ctv", "f32", "--precision", "high"]
    assert len(run(*args, "-n", 7, *more).json["ids"]) == 7


def test_environment_twins(run, model):
    args = ["generate", "-p", "a b", "--json"]
    env = {"LLAMAGPU_MODEL": str(model), "LLAMAGPU_PREDICT": "9", "LLAMAGPU_IGNORE_EOS": "1"}
    drawn = run(*args, LLAMAGPU_TEMP="2.5", LLAMAGPU_SEED="5", LLAMAGPU_TOP_K="0", **env).json["ids"]
    assert len(drawn) == 9
    assert drawn == run(*args, "--temp", 2.5, "-s", 5, "--top-k", 0, **env).json["ids"]
    assert len(run(*args, "-n", 4, **env).json["ids"]) == 4  # the command line wins
    quiet = run("generate", "-p", "a b", LLAMAGPU_QUIET="1", **env)
    assert quiet.out and not quiet.err
    bad = run("generate", "-p", "a b", LLAMAGPU_TEMP="warm", **env)
    assert bad.code == 2 and "--temp" in bad.err


# Errors and their codes


def test_files_that_cannot_be_run(run, model, tmp_path):
    keys, tensors = tiny_parts(layers=1)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:5000])
    other = write_gguf(tmp_path / "other.gguf", keys | {"general.architecture": "mamba"}, tensors)
    kinds = dict(tensors) | {"blk.0.ffn_up.weight": ("IQ2_XXS", (128, 256), bytes(66 * 128))}
    kind = write_gguf(tmp_path / "kind.gguf", keys | {"llama.embedding_length": 64}, kinds)
    text = tmp_path / "text.gguf"
    text.write_text("hello")
    for file, code, said in (
        (tmp_path / "none.gguf", 1, "no such file"),
        (tmp_path, 1, "is a folder"),
        (text, 1, "not GGUF"),
        (cut, 1, str(cut)),
        (other, 4, f"{other}: architecture 'mamba' is not supported"),
        (kind, 1, "shape"),
    ):
        for command in ("generate", "perplexity", "tokenize", "devices"):
            if command == "tokenize" and file in (other, kind):
                continue  # needs neither
            args = {"devices": ["--kernels"], "perplexity": ["-f", text]}.get(command, ["-p", "x"])
            result = run(command, "-m", file, *args)
            assert (result.code, result.out) == (code, b"") and said in result.err
            cause, remedy = result.err.splitlines()
            assert cause.startswith("error: ") and remedy.startswith("       ")


def test_unsupported_tensor_type(run, tmp_path):
    keys, tensors = tiny_parts(layers=1, dim=256, ffn=256)
    tensors["blk.0.ffn_up.weight"] = ("IQ2_XXS", (256, 256), bytes(66 * 256))
    result = run("generate", "-m", write_gguf(tmp_path / "m.gguf", keys, tensors), "-p", "x")
    assert result.code == 4 and "'blk.0.ffn_up.weight' is IQ2_XXS" in result.err and "Q4_K" in result.err


def test_prompt_file_that_is_not_there(run, model, tmp_path):
    result = run("generate", "-m", model, "-f", tmp_path / "none.txt")
    assert result.code == 1 and "none.txt: No such file" in result.err


def test_no_adapter(model):
    nowhere = {"VK_ICD_FILENAMES": "/nonexistent", "VK_DRIVER_FILES": "/nonexistent"}
    for command in (["generate", "-m", model, "-p", "x"], ["devices"], ["bench", "--synthetic", "tiny"]):
        result = finish(start(*command, env=nowhere))
        assert result.code == 3 and not result.out
        assert "no WebGPU adapter" in result.err and "mesa-vulkan-drivers" in result.err
        assert "finds no driver" in result.err or sys.platform != "linux"


def test_device_by_name(run, gpu, model):
    name = gpu.info["device"]
    args = ["generate", "-m", model, "-p", "a", "-n", 1, "-q"]
    for wanted in ("0", name, name[:5].upper()):
        assert run(*args, "--device", wanted).code == 0
    for wanted in ("99", "no such card"):
        result = run(*args, "--device", wanted)
        assert result.code == 3 and repr(wanted) in result.err and name in result.err
        assert run("generate", "-m", model, "-p", "a", LLAMAGPU_DEVICE=wanted).code == 3


def test_what_does_not_fit(run, model):
    args = ["generate", "-m", model, "-p", "a b"]
    assert run(*args, "-n", 5000).code == 5
    assert run(*args, "-c", 5000).code == 5
    assert run(*args, "-c", 10, "-n", 7).code == 5
    result = run(*args, "-c", 4096, "-n", 1, "-v", LLAMAGPU_MAX_MEMORY="2")
    assert result.code == 5 and "the model needs" in result.err
    assert "total" in result.err.split("error:")[0]  # the plan is shown first
    fits = result.err.split("use -c ")[1].split()[0]
    assert run(*args, "-c", fits, "-n", 1, LLAMAGPU_MAX_MEMORY="2").code == 0


def test_wrong_numbers(run, model, tmp_path, monkeypatch):
    keys, tensors = tiny_parts()
    tensors["output_norm.weight"] = ("F32", (64,), np.full(64, 3e38, "<f4").tobytes())
    file = write_gguf(tmp_path / "m.gguf", keys, tensors)
    result = run("generate", "-m", file, "-p", "a b")
    assert result.code == 7 and "not a number" in result.err
    text = tmp_path / "text.txt"
    text.write_text("a b " * 20)
    assert run("perplexity", "-m", file, "-f", text, "-c", 8).code == 7
    monkeypatch.setattr(selfcheck, "_errors", {})
    monkeypatch.setattr(selfcheck, "int8_error", lambda gpu: 0.5)
    result = run("generate", "-m", model, "-p", "a b", "--precision", "fast")
    assert result.code == 7 and "--precision high" in result.err


def test_lost_device(model):
    """The device goes while it works; both ways of choosing tokens find out."""
    for temperature in ("0", "0.8"):
        args = ["generate", "-m", str(model), "-p", "a b", "--temp", temperature, "-n", "60", "--ignore-eos"]
        code = (
            "import sys\n"
            "from llamagpu import cli\n"
            "from llamagpu.gpu.recorder import Recorder\n"
            "def last(self, *work, submit=Recorder.submit, count=[], **more):\n"
            "    count.append(work)\n"
            "    if len(count) == 6: self.gpu.device.destroy()\n"
            "    return submit(self, *work, **more)\n"
            "Recorder.submit = last\n"
            f"sys.argv = ['llamagpu', *{args}]\n"
            "cli.main()"
        )
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 6, result.stderr
        assert "error: " in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("place", ["before", "after", "environment"])
def test_debug_shows_the_traceback(run, place, tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMAGPU_DEBUG", "1" if place == "environment" else "")
    args = ["generate", "-m", tmp_path / "none", "-p", "x"]
    args = {"before": ["--debug", *args], "after": [*args, "--debug"]}.get(place, args)
    result = run(*args)
    assert result.code == 1 and "Traceback" in result.err and "error: no such file" in result.err
    monkeypatch.setenv("LLAMAGPU_DEBUG", "0")
    assert "Traceback" not in run("generate", "-m", tmp_path / "none", "-p", "x").err


def test_a_bug_is_called_one(run, model, monkeypatch):
    monkeypatch.setattr(cli, "read_text", lambda *_: 1 / 0)
    result = run("generate", "-m", model, "-p", "x")
    assert result.code == 1 and not result.out
    cause, remedy = result.err.splitlines()
    assert cause == "error: ZeroDivisionError: division by zero"
    assert remedy.strip() == "this is a bug; --debug shows where"


# Ctrl-C, pipes, terminals


def wait_for(stream, text: bytes, seconds: float = 60) -> bytes:
    got, end = b"", time.monotonic() + seconds
    while text not in got:
        assert time.monotonic() < end, got
        piece = os.read(stream.fileno(), 4096)
        assert piece, got
        got += piece
    return got


LONG = ["-n", 4000, "--ignore-eos", "--top-k", 1, "--temp", 1]  # drawn: each is shown as soon as it is there


@pytest.mark.parametrize("how", ["text", "json"])
def test_interrupted_generation(model, how):
    process = start("generate", "-m", model, "-p", "a b", "-v", *LONG, *["--json"] * (how == "json"))
    if how == "text":
        assert os.read(process.stdout.fileno(), 1)
    else:
        wait_for(process.stderr, b"seed ")
        time.sleep(1)
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.code == 130 and "Traceback" not in result.err
    if how == "json":
        found = json.loads(result.out)
        assert found["finish_reason"] == "interrupted" and len(found["ids"]) < 4000
    else:
        assert result.out.endswith(b"\n") and result.err.splitlines()[-1].endswith("| interrupted")


def test_interrupted_while_it_reads_the_prompt(model, tmp_path):
    prompt = tmp_path / "long.txt"
    prompt.write_text("a b " * 900)
    process = start("generate", "-m", model, "-f", prompt, "-n", 100, "-ub", 1, "-v")
    wait_for(process.stderr, b"seed ")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.code == 130 and result.out == b"\n"
    assert "| prompt 3602 tokens | interrupted" in result.err


def test_interrupted_while_it_loads(tmp_path):
    file = tiny_llama(tmp_path / "m.gguf", layers=300)  # many tensors
    process = start("generate", "-m", file, "-p", "x", "-n", 1, "-v")
    wait_for(process.stderr, b"total")
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert (result.code, result.out) == (130, b"") and result.err.endswith("interrupted\n")
    assert "Traceback" not in result.err


def test_the_second_interrupt_ends_it_at_once(model, tmp_path):
    prompt = tmp_path / "long.txt"
    prompt.write_text("a b " * 1000)
    # one long step: 0.4 s on two idle cores, after which the first Ctrl-C would end it with a line and a summary
    process = start("generate", "-m", model, "-f", prompt, "-n", 1, "-ub", 4096, "-v")
    wait_for(process.stderr, b"seed ")
    while process.poll() is None:  # again and again: two that come before the first is taken are one
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    result = finish(process)
    assert (result.code, result.out) == (130, b"") and "interrupted" not in result.err


def test_nobody_reads(model):
    process = start("generate", "-m", model, "-p", "a b", *LONG)
    os.read(process.stdout.fileno(), 5)
    process.stdout.close()
    assert process.wait(60) == 141
    said = process.stderr.read().decode()
    assert "error" not in said and "Traceback" not in said and "Exception" not in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk(model):
    with open("/dev/full", "wb") as full:
        result = finish(start("generate", "-m", model, "-p", "a b", "-n", 5, stdout=full))
    assert result.code == 1 and "cannot write to stdout: No space left" in result.err


def test_closed_stdout_and_stdin(model):
    for closed in ("<&-", ">&-"):
        line = f'exec "$0" -m llamagpu generate -m "$1" -p "a b" -n 2 -q {closed}'
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        code = subprocess.run(["bash", "-c", line, sys.executable, model], env=env, capture_output=True)
        assert code.returncode == (0 if closed == "<&-" else 141), code.stderr


def terminal(*args: object, typed: tuple[bytes, ...] = (), streams: str = "stderr", **env: str) -> Result:
    """Runs with a terminal; each line of `typed` waits for a prompt. err is all that the terminal showed."""
    control, tty = pty.openpty()
    process = start(*args, env=env, **{name: tty for name in streams.split()})
    os.close(tty)
    shown, lines = b"", list(typed)
    try:
        while piece := os.read(control, 4096):
            shown += piece
            if lines and shown.endswith(b"> "):
                os.write(control, lines.pop(0))
    except OSError:  # how Linux says that the other side has closed it
        pass
    out = b"" if process.stdout is None else process.stdout.read()
    os.close(control)
    return Result(process.wait(60), out, shown.decode())


def test_progress_on_a_terminal_only(model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a b " * 5000)  # long enough for the bar, which waits half a second
    args = ["perplexity", "-m", model, "-f", text, "-c", "64"]
    result = terminal(*args)
    assert result.code == 0 and "\r\x1b[Kchunks " in result.err and result.err.endswith("\x1b[K")
    assert result.out.startswith(b"PPL = ") and b"\r" not in result.out
    assert "chunks" not in terminal(*args, TERM="dumb").err


def test_bench_shows_that_it_works(model):
    args = ["bench", "-m", model, "-p", 4, "-n", 0, "-r", 2]
    result = terminal(*args)
    assert result.code == 0 and f"{model}: preparing" in result.err and f"{model}: run 2" in result.err
    assert b"pp4" in result.out and b"\r" not in result.out
    assert "run" not in terminal(*args, "-q").err


def test_no_colours(model):
    for env in ({}, {"NO_COLOR": "1"}):
        result = terminal("generate", "-m", model, "-p", "a", "-n", "3", **env)
        assert result.code == 0 and "\x1b[3" not in result.err and "\x1b[1" not in result.err


def test_no_prompt_on_a_terminal(model):
    result = terminal("generate", "-m", model, streams="stdin stderr")
    assert result.code == 2 and "there is no text" in result.err


# The other commands


def test_chat_keeps_what_was_said(run, chat_model, monkeypatch):
    seen = []
    from llamagpu.engine.generate import Llama

    plain = Llama.encode_chat

    def encode_chat(self, messages):
        seen.append([(m["role"], m["content"]) for m in messages])
        return plain(self, messages)

    monkeypatch.setattr(Llama, "encode_chat", encode_chat)
    result = run(
        *("chat", "-m", chat_model, "-n", 8, "--system", "be kind", "-v", "-s", 1, "--temp", 0),
        stdin=b"hello\n\nand you?\n/clear\nagain\n/exit\nnot this\n",
    )
    assert result.code == 0
    assert [turn[-1] for turn in seen] == [("user", "hello"), ("user", "and you?"), ("user", "again")]
    assert [len(turn) for turn in seen] == [2, 4, 2]
    assert all(turn[0] == ("system", "be kind") for turn in seen)
    answer = seen[1][2][1]
    assert seen[1][2][0] == "assistant" and result.out.decode().startswith(answer + "\n")
    assert result.err.count(" | first token ") == 3
    first = len(run("tokenize", "-m", chat_model, "-p", "[system]be kind[user]hello[a]").json)
    assert int(re.search(r" \((\d+) from the cache\)", result.err)[1]) >= first - 1  # the second turn's


def test_chat_that_grows_too_long(run, chat_model):
    lines = b"word " * 150 + b"\n" + b"more " * 150 + b"\nshort\n"
    result = run("chat", "-m", chat_model, "-n", 4, "-q", stdin=lines)
    assert result.code == 0 and result.err.count("error: ") == 2 and "/clear" in result.err
    assert result.out.count(b"\n") >= 1  # the last one was answered


def test_chat_on_a_terminal(chat_model):
    args = ["chat", "-m", chat_model, "-n", 4, "-q"]
    for ends in (b"\x04", b"/exit\n"):
        result = terminal(*args, typed=(b"hello\n", ends), streams="stdin stdout stderr")
        assert result.code == 0 and result.err.count("> ") == 2


def test_chat_goes_on_after_an_interrupt(tmp_path):
    file = tiny_llama(tmp_path / "chat.gguf", context=4096, metadata={"tokenizer.chat_template": TEMPLATE})
    process = start("chat", "-m", file, "-q", "-n", 4000, "--top-k", 1, "--temp", 1, stdin=subprocess.PIPE)
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    process.stdin.write(b"/exit\n")
    process.stdin.close()
    process.stdin = None
    result = finish(process)
    assert result.code == 0 and len(result.out) < 3000  # the whole answer has 6587 bytes and takes 6 s


def test_tokenize(run, model):
    ids = run("tokenize", "-m", model, "-p", "a <s> b").json
    assert ids[0] == 1 and ids.count(1) == 2
    assert run("tokenize", "-m", model, "-p", "a <s> b", "--no-bos").json == ids[1:]
    assert run("tokenize", "-m", model, "-p", "a <s> b", "--no-special").json.count(1) == 1
    text = b"a \xff\xfeb\n\n \xe2"
    ids = run("tokenize", "-m", model, "--no-bos", stdin=text).out
    assert run("tokenize", "-m", model, "--decode", stdin=ids) == (0, text, "")
    assert run("tokenize", "-m", model, "--decode", "-p", "[1, 5000]").code == 1


def test_tokenize_needs_no_weights(run):
    path = shared_data("vocab/ggml-vocab-llama-bpe.gguf")
    assert run("tokenize", "-m", path, "-p", "Hello world").json == [128000, 9906, 1917]


def test_perplexity(run, model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox, " * 12)
    shown = run("perplexity", "-m", model, "-f", text, "-c", 16)
    found = run("perplexity", "-m", model, "-c", 16, "--json", stdin=text.read_bytes()).json
    assert list(found) == ["perplexity", "error", "tokens", "chunks", "ctx_size"]
    want = "PPL = {perplexity:.4f} +/- {error:.4f} ({tokens} tokens in {chunks} chunks of 16)\n"
    assert shown.code == 0 and shown.out.decode() == want.format(**found)
    assert "chunks" not in shown.err  # no terminal, no progress
    short = run("perplexity", "-m", model, "-c", 4096, "-f", text)
    assert short.code == 1 and "at least two chunks of 4096" in short.err


def test_devices(run, gpu):
    found = run("devices", "--json").json
    chosen = [d for d in found if d["chosen"]]
    assert len(chosen) == 1 and chosen[0]["name"] == gpu.info["device"] and chosen[0]["why"]
    assert chosen[0]["limits"]["max-storage-buffer-binding-size"] >= 128 << 20
    shown = run("devices")
    assert shown.code == 0 and not shown.err and shown.out.decode().count("<- used: ") == 1
    assert run("devices", "--device", "0", "--json").json[0]["why"] == "--device 0"
    assert run("devices", "--device", "no such card").code == 3


def test_kernels(run, model):
    rows = run("devices", "--kernels", "-m", model, "--json").json
    assert {r["m"] for r in rows} == {1, 4, 512} and {r["op"] for r in rows} >= {"embed", "linear", "attend"}
    shapes = {r["shape"].split()[0] for r in rows if r["op"] == "linear"}
    assert shapes == {"attn_qkv", "attn_output", "ffn_gate_up", "ffn_down", "output"}
    shown = run("devices", "--kernels", "-m", model).out.decode()
    assert len(shown.splitlines()) == len(rows) and " attn_qkv 128x64 " in shown


def test_models(run, tmp_path):
    env = {"LLAMAGPU_CACHE": str(tmp_path)}
    listed = run("models", **env)
    assert listed.code == 0 and listed.out.startswith(b"smollm2 ") and b" -  " in listed.out
    for args in (["path", "smollm2"], ["rm", "smollm2"], ["rm", "other"]):
        result = run("models", *args, **env)
        assert result.code == 1 and not result.out and "error: " in result.err
    result = run("generate", "-p", "x", "--offline", **env)
    assert result.code == 1 and "has not been fetched" in result.err
