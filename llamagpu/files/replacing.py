"""Files that are there whole or not at all."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from llamagpu.errors import LlamaGpuError


class Overtaken(LlamaGpuError):
    """Another run writes the same file, and began later."""


@contextmanager
def replacing(path: Path, size: int) -> Iterator[BinaryIO]:
    """A file that gets its name when all is well, and vanishes otherwise; `size` is about what it takes."""
    part, own = path.with_name(f".{path.name.lstrip('.')}.part"), None
    try:
        if path.exists() and not path.is_file():  # a folder, or a device such as /dev/null
            raise OSError(errno.EINVAL, "not a regular file")
        if shutil.disk_usage(path.parent).free < size:
            raise OSError(errno.ENOSPC, "no space left")
        part.unlink(missing_ok=True)  # of a run that was killed
        with part.open("xb") as file:
            own = os.fstat(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not _is(part, own):
            raise Overtaken(f"another run is writing {path} too", "Wait for it, or name another file.")
        part.replace(path)
        own = None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            cause = f"no space left in {path.parent.resolve()}: {path.name} takes {size / 1e6:,.0f} MB"
            raise LlamaGpuError(cause, "Free some space, or write to another disk.") from error
        raise LlamaGpuError(f"cannot write {path}: {error.strerror or error}", "Name another file.") from error
    finally:
        if own and _is(part, own):
            part.unlink()


def _is(path: Path, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), file)
    except OSError:
        return False
