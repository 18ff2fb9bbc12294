"""`llamagpu batch`: every line gets its answer, whatever ends the process in between."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gguf_builder import tiny_llama
from serving import EXACT, EXACT_ARGUMENTS, START_S, TEMPLATE

from llamagpu import Llama
from llamagpu.batch import Progress, Shard, appending, finished, lines, run_batch
from llamagpu.cli.batch import read_shard, summary
from llamagpu.cli.terminal import Usage
from llamagpu.errors import BadFile, DeviceLost
from llamagpu.serve.options import ServeOptions

OPTIONS = ServeOptions(model="tiny")


def request(number: int, **body: Any) -> dict[str, Any]:
    fields = {"messages": [{"role": "user", "content": f"hello {number}"}], "temperature": 1, "seed": number}
    body = {"model": "tiny", **fields, "max_tokens": 4 + number % 7, **body}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("batch")
    tiny_llama(found / "tiny.gguf", context=512)
    (found / "template.jinja").write_text(TEMPLATE)
    return found


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def answers(path: Path) -> dict[str, Any]:
    """The answers' texts or errors by id, or by number of the line."""
    found = {}
    for line in map(json.loads, path.read_text().splitlines()):
        response = line["response"]
        body = response["body"] if response else line["error"]
        text = body["choices"][0]["message"]["content"] if "choices" in body else body
        name = line["custom_id"] or line["line"]
        assert name not in found
        found[name] = text
    return found


def run(folder: Path, gpu: Any, source: Path, target: Path, shard: Shard | None = None) -> Progress:
    def load() -> Llama:
        llama = Llama(folder / "tiny.gguf", device=gpu, kv_sequences=4, **EXACT)
        llama.tokenizer.chat_template = TEMPLATE
        return llama

    return run_batch(load, OPTIONS, source, target, shard or Shard())


def test_every_line_gets_its_answer(folder: Path, gpu: Any, tmp_path: Path) -> None:
    embedding = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a cat"}}
    completion = {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "a", "max_tokens": 3},
    }
    lines = [request(1), "", embedding, completion, "{", request(2), request(1), {**request(3), "url": "/v1/no"}]
    lines += [request(4, temperature=-1), request(5, stream=True), request(6, model="other"), '{"custom_id": 5}']
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    progress = run(folder, gpu, source, target)
    found = [json.loads(line) for line in target.read_text().splitlines()]
    status = {line["custom_id"] or line["line"]: (line["response"] or {}).get("status_code") for line in found}
    assert status == {
        **{"r1": 200, "e": 200, "c": 200, 5: None, "r2": 200, 7: None},
        **{"r3": 404, "r4": 400, "r5": 400, "r6": 404, 12: None},
    }
    assert (progress.total, progress.done, progress.failed, progress.skipped) == (11, 11, 7, 0)
    assert "11/11 requests, 7 failed" in summary(progress)
    again = run(folder, gpu, source, target)
    assert (again.done, again.skipped) == (0, 11) and len(target.read_text().splitlines()) == 11


def test_killed_and_started_again(folder: Path, gpu: Any, tmp_path: Path) -> None:
    """SIGKILL in the middle of the work, and of a line: the rest is done, nothing twice, and all texts are the same."""
    source = write_lines(tmp_path / "in.jsonl", [request(i) for i in range(24)])
    target, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    arguments = ["-m", folder / "tiny.gguf", "--chat-template-file", folder / "template.jinja", "-np", "4"]
    command = [sys.executable, "-m", "llamagpu", "batch", "-i", source, "-o", target, *arguments, *EXACT_ARGUMENTS]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + START_S
    while process.poll() is None and not (target.exists() and target.read_bytes().count(b"\n") >= 2):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = target.read_bytes().count(b"\n")
    with target.open("ab") as file:
        file.write(b'{"id": "half a li')
    progress = run(folder, gpu, source, target)
    assert before >= 2 and (progress.skipped, progress.done, progress.failed) == (before, 24 - before, 0)
    run(folder, gpu, source, whole)
    assert answers(target) == answers(whole) and len(answers(whole)) == 24


def test_two_runs_on_one_output(folder: Path, tmp_path: Path) -> None:
    """The second is refused at once, and the first's line that is being written stays."""
    source, target = write_lines(tmp_path / "in.jsonl", [request(1)]), tmp_path / "out.jsonl"
    link = tmp_path / "link.jsonl"
    link.symlink_to(target)
    with appending(target) as file:
        file.write(b'{"id": "half a li')
        file.flush()
        command = [sys.executable, "-m", "llamagpu", "batch", "-i", source, "-o", link, "-m", folder / "tiny.gguf"]
        found = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert found.returncode == 1 and f"another run is writing {link}" in found.stderr
        assert "Traceback" not in found.stderr and target.read_bytes() == b'{"id": "half a li'
    with appending(target):
        assert finished(target) == (set(), set()) and target.read_bytes() == b""


def test_an_id_twice_after_the_first_was_answered(folder: Path, gpu: Any, tmp_path: Path) -> None:
    """The second line gets its error in the next run, too."""
    source, target = write_lines(tmp_path / "in.jsonl", [request(1), request(1)]), tmp_path / "out.jsonl"
    run(folder, gpu, write_lines(tmp_path / "first.jsonl", [request(1)]), target)
    progress = run(folder, gpu, source, target)
    assert (progress.skipped, progress.done, progress.failed) == (1, 1, 1)
    assert "is there twice" in json.loads(target.read_text().splitlines()[1])["error"]["message"]
    assert run(folder, gpu, source, target).skipped == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_refused(folder: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(BadFile, match="no regular file"):
        list(lines(pipe, Shard()))


def test_no_success_is_an_error(folder: Path, tmp_path: Path) -> None:
    source, target = write_lines(tmp_path / "in.jsonl", [request(1, model="other")]), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "llamagpu", "batch", "-i", source, "-o", target, "-m", folder / "tiny.gguf"]
    found = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert found.returncode == 1 and "none of 1 requests succeeded" in found.stderr
    assert answers(target)


def test_more_generations_than_a_queue_holds(folder: Path, gpu: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("llamagpu.engine.scheduler.MAX_WAITING", 2)
    source, target = write_lines(tmp_path / "in.jsonl", [request(i, n=6) for i in range(4)]), tmp_path / "out.jsonl"
    assert run(folder, gpu, source, target).failed == 0


EMBEDDING = {"custom_id": "e", "url": "/v1/embeddings", "body": {"input": "a cat"}}


@pytest.mark.parametrize("line, function", [(request(1), "scheduler.step"), (EMBEDDING, "embed_ids")])
def test_a_lost_device_ends_it(folder: Path, tmp_path: Path, gpu: Any, line: Any, function: str) -> None:
    """What is not done is not in the output, and the error is the device's, with its exit code."""

    def lose(*_: Any, **__: Any) -> None:
        raise DeviceLost("the device was lost")

    def load() -> Llama:
        llama = Llama(folder / "tiny.gguf", device=gpu)
        llama.tokenizer.chat_template = TEMPLATE
        where, _, name = function.rpartition(".")
        setattr(llama.scheduler if where else llama, name, lose)
        return llama

    source, target = write_lines(tmp_path / "in.jsonl", [line]), tmp_path / "out.jsonl"
    with pytest.raises(DeviceLost):
        run_batch(load, OPTIONS, source, target)
    assert target.read_text() == ""


def test_shards(folder: Path, gpu: Any, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [request(i) for i in range(5)])
    parts = []
    for i in range(2):
        run(folder, gpu, source, tmp_path / f"{i}.jsonl", Shard(i, 2))
        parts.append(set(answers(tmp_path / f"{i}.jsonl")))
    assert parts == [{"r0", "r2", "r4"}, {"r1", "r3"}]
    assert read_shard("2/4") == (2, 4)
    for wrong in ("0/4", "5/4", "1", "a/b", "1/0"):
        with pytest.raises(Usage):
            read_shard(wrong)


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("my notes\nmore\n")
    with pytest.raises(BadFile, match="no output of a batch"):
        finished(other)
    assert other.read_text() == "my notes\nmore\n"
