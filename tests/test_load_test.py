"""The load test itself: a server with a synthetic model, clients that leave, and the share of `bench --parallel`."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT
from gguf_builder import tiny_llama


def load_test(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "scripts/load_test.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return str(tiny_llama(tmp_path_factory.mktemp("tokens") / "tiny.gguf"))


def test_clients_that_leave(tokens):
    size = ("--clients", "8", "--requests", "24", "--longest", "8", "--parallel", "4", "--checked", "0")  # random texts
    result = load_test("-m", tokens, "--synthetic", "tiny", *size)
    assert result.returncode == 0, result.stderr
    finished, gone = (int(number) for number in re.findall(r"(\d+) finished, (\d+) gone", result.stdout)[0])
    assert finished + gone == 24 and gone
    assert "nothing is held" in result.stdout


def test_the_share_of_bench_parallel(tokens):
    size = ("--clients", "2", "--requests", "2", "--warmup", "2", "--parallel", "2", "--checked", "0")
    result = load_test("-m", tokens, "--synthetic", "tiny", "--compare", *size, "--", "--backend", "wgpu")
    assert result.returncode == 0, result.stderr
    assert re.search(r"64 new tokens: [\d.]+ tok/s in all, \d+ % of bench --parallel 2: [\d.]+ tok/s", result.stdout)


@pytest.mark.parametrize("shapes, problem", [("huge", "no synthetic model is called 'huge'"), ("tiny", "tokens")])
def test_shapes_that_cannot_be(tmp_path, shapes, problem):
    path = tiny_llama(tmp_path / "many.gguf", vocab=600)
    result = load_test("-m", str(path), "--synthetic", shapes)
    assert result.returncode == 1 and problem in result.stderr and "Traceback" not in result.stderr
