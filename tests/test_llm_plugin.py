"""The plugin for the command `llm`, with a tiny model and a log of its own."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_builder import tiny_llama
from llm.cli import cli

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
TIMEOUT_S = 180
Run = Callable[..., str]


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command `llm`; returns what it prints."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "user"))

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        cli.main(list(arguments), standalone_mode=False)
        return capsys.readouterr().out

    return run


def test_the_command_lists_our_models(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llm", "models", "list"]
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "llamagpu/smollm2" in found.stdout, found.stderr


def test_prompts_schemas_and_conversations(gpu: Any, llm: Run, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "tiny.gguf", context=512, metadata={"tokenizer.chat_template": TEMPLATE})
    options = ["-m", "llamagpu", "-o", "model", str(model), "-o", "seed", "1"]
    llm("hello", "-s", "Be brief.", *options, "-o", "max_tokens", "5")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    text = llm("hello", *options, "--schema", json.dumps({**schema, "additionalProperties": False}))
    assert json.loads(text)["a"] in (True, False)
    llm("again", "-c", *options[2:], "-o", "max_tokens", "3", "--no-stream")
    logged = json.loads(llm("logs", "--json", "-n", "3"))
    usage = [(entry["input_tokens"], entry["output_tokens"]) for entry in logged]
    assert usage[0][1] == 5 and usage[2][1] == 3 and usage[2][0] > usage[1][0]  # the conversation was in the prompt


def test_embeddings_and_errors(gpu: Any, llm: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamagpu import llm_plugin

    model = tiny_llama(tmp_path / "tiny.gguf", context=512)
    monkeypatch.setattr(llm_plugin, "opened", lambda name: llm_plugin.load(model))
    row = json.loads(llm("embed", "-m", "llamagpu/smollm2", "-c", "a cat", "-f", "json"))
    assert len(row) == 64 and abs(sum(x * x for x in row) - 1) < 1e-4
    monkeypatch.undo()
    with pytest.raises(Exception, match="no such file"):
        llm("hello", "-m", "llamagpu", "-o", "model", str(tmp_path / "no.gguf"), "--no-log")
