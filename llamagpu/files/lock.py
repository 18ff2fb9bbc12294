"""Locks an open file against other processes."""

import os
import sys
from typing import IO

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

BEYOND = 0x7FFFFFFF  # Windows locks bytes against reading, too: one that the file does not have


def try_lock(file: IO[bytes]) -> bool:
    """Lock a file until it is closed, or the process ends. False if another process has it."""
    try:
        if sys.platform == "win32":
            os.lseek(file.fileno(), BEYOND, os.SEEK_SET)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        return True
    return True
