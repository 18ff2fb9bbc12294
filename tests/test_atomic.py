"""Files that are complete or not there, also behind symbolic links."""

import os
from pathlib import Path

import pytest

from llamagpu.errors import LlamaGpuError
from llamagpu.files.atomic import atomic_write

pytestmark = pytest.mark.skipif(os.name == "nt", reason="symbolic links need a privilege")


def write(path: Path, text: bytes) -> None:
    with atomic_write(path) as file:
        file.write(text)


@pytest.mark.parametrize("relative", [True, False])
def test_a_link_is_written_through(tmp_path: Path, relative: bool) -> None:
    target, link = tmp_path / "disk" / "model.gguf", tmp_path / "link.gguf"
    target.parent.mkdir()
    link.symlink_to("disk/model.gguf" if relative else target)
    for text in (b"first", b"second"):  # the first one makes the file that the link names
        write(link, text)
        assert link.is_symlink() and target.read_bytes() == text and not target.is_symlink()
    with pytest.raises(ZeroDivisionError), atomic_write(link) as file:
        file.write(b"third")
        raise ZeroDivisionError
    assert target.read_bytes() == b"second"
    assert {path.name for path in tmp_path.rglob("*")} == {"disk", "link.gguf", "model.gguf"}


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "null").symlink_to(os.devnull)
    (tmp_path / "gone").symlink_to("no folder/file")
    for name in ("loop", "null", "gone"):
        with pytest.raises(LlamaGpuError, match=f"cannot write .*{name}"):
            write(tmp_path / name, b"")
        assert (tmp_path / name).is_symlink()
