#!/usr/bin/env python3
r"""Runs command lines in a pseudo-terminal and writes what they print to session.cast (asciicast v2).

`llamagpu` in them runs this checkout. The README's session was recorded with:

scripts/readme/record.py \
    "llamagpu with its default model (SmolLM2-135M) on two CPU cores, no GPU; waits are shortened" \
    'llamagpu generate -p "Explain what a GPU is in one sentence." -n 64 --temp 0' \
    'echo "What is water made of? Answer in one sentence." | llamagpu generate --temp 0 -q'
"""

import fcntl
import json
import os
import pty
import struct
import sys
import termios
import time
from codecs import getincrementaldecoder
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
COLUMNS, ROWS = 97, 24  # this width breaks the fewest words of the recorded answers
IDLE_LIMIT = 1.0  # seconds: players shorten longer waits


def run(line: str, started: float, events: list[tuple[float, str, str]]) -> None:
    """Run one command line and append its output with the seconds since `started`."""
    process, terminal = pty.fork()
    if process == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", ROWS, COLUMNS, 0, 0))
        os.chdir(FOLDER.parent.parent)
        os.environ |= {"TERM": "xterm-256color", "PYTHON": sys.executable}
        os.execlp("bash", "bash", "-c", f'llamagpu() {{ "$PYTHON" -m llamagpu "$@"; }}; {line}')
    decoder = getincrementaldecoder("utf-8")()
    try:
        while data := os.read(terminal, 65536):
            events.append((round(time.monotonic() - started, 3), "o", decoder.decode(data)))
    except OSError:  # Linux reports the end of a terminal as EIO
        pass
    os.close(terminal)
    if os.waitpid(process, 0)[1]:
        sys.exit(f"failed: {line}")


def main(title: str, *lines: str) -> None:
    started, events = time.monotonic(), []
    for line in lines:
        events.append((round(time.monotonic() - started, 3), "o", f"$ {line}\r\n"))
        run(line, started, events)
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "timestamp": int(time.time()), "title": title}
    header |= {"idle_time_limit": IDLE_LIMIT, "env": {"TERM": "xterm-256color"}}
    entries = [json.dumps(entry, ensure_ascii=False) for entry in (header, *events)]
    (FOLDER / "session.cast").write_text("\n".join(entries) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
