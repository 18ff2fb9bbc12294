"""What the tests of the measuring commands share: llamagpu ARGS in this process, with the tests' open device."""

import json
import sys
from typing import Any, NamedTuple

import pytest

from llamagpu import cli
from llamagpu.gpu.device import Gpu


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Runner:
    def __init__(self, gpu: Any, monkeypatch: Any, capfd: Any) -> None:
        self.monkeypatch, self.capfd = monkeypatch, capfd
        monkeypatch.setattr(Gpu, "open", lambda wanted=None: gpu)
        monkeypatch.setattr(gpu, "close", lambda: None)

    def __call__(self, *args: object) -> Result:
        self.monkeypatch.setattr(sys, "argv", ["llamagpu", *map(str, args)])
        self.capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = self.capfd.readouterr()
        return Result(ended.value.code, out, err)


@pytest.fixture
def measure(gpu, monkeypatch, capfd, tmp_path) -> Runner:
    monkeypatch.setenv("LLAMAGPU_CACHE", str(tmp_path / "cache"))
    return Runner(gpu, monkeypatch, capfd)
