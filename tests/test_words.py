"""The project uses the field's words: none of its retired ones comes back."""

import re
from collections.abc import Iterator
from pathlib import Path

from conftest import ROOT

# Pattern of a retired word -> what to write instead. Lower-case patterns match in any case.
RETIRED = {
    r"LLAMAGPU_JOIN": "LLAMAGPU_FUSED",
    r"LLAMAGPU_TRUSTED": "LLAMAGPU_UNCHECKED",
    r"LLAMAGPU_FLOOR": "LLAMAGPU_MINIMUM_LIMITS",
    r"joinedlayers|joined layers|layers (joined|apart)": "FusedDecode, fused or unfused layers",
    r"crews?|find_crew": "grid size, probe",
    r"meetings?|relay(s|ed)?": "grid barrier, barrier litmus test",
    r"given_up|patience": "timed_out, spin_limit",
    r"shelf|shelves": "slab",
    r"handed_on|with_gaps": "inter-stage buffer, cache-line padding",
    r"made inside": "prologue",
    r"COLLECTING": "workgroup epilogue",
    r"int8 records?|quads|strands?": "int8 block, interleaved by 4, subgroups per head",
    r"even_out": "smoothing",
    r"go_on|hand_in|pace": "decode loop, submit, tokens_per_submit",
    r"overtaken|loss_named": "Superseded, map_device_lost",
    r"fourbit|observe|watching|converse": "awq_gptq, calibrate, TracingGpu, repl",
    r"oracles?": "reference",
}
FILES = ("README.md", "CONTRIBUTING.md", "models.md", "pyproject.toml")
FOLDERS = ("llamagpu", "kernels", "scripts", "tests")


def sources() -> Iterator[Path]:
    yield from (ROOT / name for name in FILES)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".wgsl", ".md", ".sh", "") and path.is_file() and path != Path(__file__):
                yield path


def retired_words(text: str) -> Iterator[str]:
    for pattern, instead in RETIRED.items():
        flags = re.IGNORECASE if pattern.islower() else re.NOFLAG
        for found in re.finditer(rf"(?<![^\W_])({pattern})(?![^\W_])", text, flags):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{line}: {found[0]!r} is retired, use: {instead}"


def test_no_retired_words() -> None:
    found = [f"{path.relative_to(ROOT)}:{word}" for path in sources() for word in retired_words(path.read_text())]
    assert not found, "\n".join(found)


def test_retired_words_are_found() -> None:
    assert list(retired_words("a\nthe Oracle,\n")) == ["2: 'Oracle' is retired, use: reference"]
    assert list(retired_words("LLAMAGPU_JOIN=0, collecting workspace_space")) == [
        "1: 'LLAMAGPU_JOIN' is retired, use: LLAMAGPU_FUSED"
    ]
