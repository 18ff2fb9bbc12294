"""Runs a command in this process, on the device of the tests."""

import json
import sys
from typing import Any, NamedTuple

import pytest

from llamagpu.cli import main as cli
from llamagpu.gpu.device import Gpu


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Runner:
    """measure("bench", ...) runs `llamagpu bench ...`."""

    def __init__(self, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capfd = monkeypatch, capfd
        monkeypatch.setattr(Gpu, "open", lambda wanted=None, sequences=1: gpu)
        monkeypatch.setattr(gpu, "close", lambda: None)

    def __call__(self, *args: object) -> Result:
        self.monkeypatch.setattr(sys, "argv", ["llamagpu", *map(str, args)])
        self.capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = self.capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Result(ended.value.code, out, err)


@pytest.fixture
def measure(
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Runner:
    monkeypatch.setenv("LLAMAGPU_CACHE", str(tmp_path_factory.mktemp("cache")))
    return Runner(gpu, monkeypatch, capfd)
