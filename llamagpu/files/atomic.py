"""Writes files under a temporary name and renames them: a file is complete, or it does not exist."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from llamagpu.errors import LlamaGpuError


class Superseded(LlamaGpuError):
    """Another run writes the same file, and began later."""


def temporary_name(path: Path, purpose: str) -> Path:
    """A hidden name beside `path`."""
    return path.with_name(f".{path.name.lstrip('.')}.{purpose}")


@contextmanager
def atomic_write(path: Path, size: int = 0) -> Iterator[BinaryIO]:
    """Open a file that gets its name when the block ends without an error, and is deleted otherwise.

    `size` is its expected size: a disk without that space is refused before anything is written. A symbolic link stays,
    and the file that it names is replaced.
    """
    target, written = Path(os.path.realpath(path)), None
    temporary = temporary_name(target, "part")
    try:
        if (
            os.path.lexists(target) and not target.is_file()
        ):  # a folder, a device such as /dev/null, or a circle of links
            raise OSError(errno.EINVAL, "not a regular file")
        if shutil.disk_usage(target.parent).free < size:
            raise OSError(errno.ENOSPC, "no space left")
        temporary.unlink(missing_ok=True)  # left by a run that was killed
        with temporary.open("xb") as file:
            written = os.fstat(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not _same_file(temporary, written):
            raise Superseded(f"another run is writing {path} too", "Wait for it, or name another file.")
        temporary.replace(target)
        written = None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            cause = f"no space left in {target.parent}: {path.name} takes {size / 1e6:,.0f} MB"
            raise LlamaGpuError(cause, "Free some space, or write to another disk.") from error
        raise LlamaGpuError(f"cannot write {path}: {error.strerror or error}", "Name another file.") from error
    finally:
        if written and _same_file(temporary, written):
            temporary.unlink()


def _same_file(path: Path, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), file)
    except OSError:
        return False
