"""The README: its pictures are current, its figures measured, its links lead somewhere, its commands parse."""

import json
import re
import runpy
import shlex
from collections.abc import Iterator
from itertools import dropwhile, groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from conftest import ROOT

from llamagpu.cli import main as cli

README = (ROOT / "README.md").read_text()
PICTURES = ROOT / "scripts/readme"
HEADLINE = json.loads((PICTURES / "headline.json").read_text())
CAST = (PICTURES / "session.cast").read_text()


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(PICTURES / name))


def headings(file: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a Markdown file."""
    found = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


def shell_lines() -> Iterator[str]:
    """The lines of the README's sh blocks, then those of the recorded session."""
    for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", README, re.M | re.S):
        yield from block.replace("\\\n", " ").splitlines()
    for _, _, text in map(json.loads, CAST.splitlines()[1:]):
        yield from re.findall(r"^\$ (.*)", text, re.M)


def calls(line: str) -> Iterator[list[str]]:
    """The arguments of each llamagpu in a shell line."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    for operator, group in groupby(words, re.compile(r"[|&;()<>]+").fullmatch):
        command = [] if operator else list(dropwhile(re.compile(r"\w+=").match, group))
        if command[:1] in (["llamagpu"], ["scripts/run"]):
            yield command[1:]


def without_work(command: Any) -> Any:
    """The command, and its subcommands, with all of their parser and nothing that runs after it."""
    command.callback = None
    for child in getattr(command, "commands", {}).values():
        without_work(child)
    return command


@pytest.mark.parametrize("name, limit", [("headline", 10_000), ("session", 60_000)])
def test_pictures_are_current(name: str, limit: int) -> None:
    drawn = script(f"{name}.py")["render"](HEADLINE if name == "headline" else CAST)
    assert drawn == (PICTURES / f"{name}.svg").read_text(), f"run scripts/readme/{name}.py"
    assert len(drawn.encode()) < limit
    assert {"title", "desc"} <= {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(drawn)}


def test_the_session_ends_with_what_stays_on_the_screen() -> None:
    header = {"width": 6, "idle_time_limit": 1, "title": "test"}
    events = [0, "o", "50 %"], [60, "o", "\r\x1b[Kab<def"], [61, "o", "g\r\n"]
    drawn = script("session.py")["render"]("\n".join(map(json.dumps, (header, *events))))
    assert ElementTree.fromstring(drawn).findtext("{*}desc") == "ab<def\ng"
    replaced = re.search(r'class="(\w+)">50 %<', drawn)
    assert replaced and f".{replaced[1]}{{animation-name:{replaced[1]};visibility:hidden}}" in drawn
    assert "animation: 7s" in drawn  # the wait of 60 s is cut to 1, then 1, then 5 s at the end


@pytest.mark.parametrize("model", HEADLINE["models"])
def test_headline_figures_are_in_models_md(model: str) -> None:
    rows = "\n".join(re.findall(rf"^\| {re.escape(model)} \|.*", (ROOT / "models.md").read_text(), re.M))
    figures = {str(run["tokens_per_second"][model]) for run in HEADLINE["runs"]}
    assert figures <= set(re.findall(r"(?<![\d.])\d+(?![\d.])", rows))


def test_links_and_files_exist() -> None:
    links = re.findall(r"\]\(([^)\s]+)", README) + re.findall(r'(?:src|href|srcset)="([^"\s]+)', README)
    here = [link.partition("#") for link in links if not re.match(r"\w+:", link)]
    named = re.findall(r"(?<![\w/.])(?:scripts|tests|kernels|examples)/[\w/.-]*\w", README)
    missing = [file for file in [*(link[0] for link in here), *named] if not (ROOT / file).exists()]
    assert not missing
    assert not [link for link in here if link[2] and link[2] not in headings(ROOT / (link[0] or "README.md"))]


@pytest.mark.parametrize("call", [call for line in shell_lines() for call in calls(line)], ids=" ".join)
def test_commands_parse(call: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAGPU_DEBUG", "0")  # --debug sets it
    without_work(typer.main.get_command(cli.app)).main(call, standalone_mode=False)
