"""A progress bar for bytes on stderr: description, bar, bytes, speed and time left. Only a terminal shows it."""

import os
import sys
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ByteProgress:
    """The first update shows the bar; close() restores the cursor, which Rich hides. An update after that shows a
    new bar. `transient` removes the finished bar from the terminal."""

    def __init__(self, total: int, shown: bool = True, transient: bool = True) -> None:
        self.total, self.transient = total, transient
        self.shown = shown and sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.bar: Progress | None = None
        self.task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, description: str, completed: int) -> None:
        if not self.shown:
            return
        if self.bar is None or self.task is None:
            self.bar = self._new_bar()
            self.task = self.bar.add_task("", total=self.total)
            self.bar.start()
        self.bar.update(self.task, description=description, completed=completed)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        self.bar = None

    def _new_bar(self) -> "Progress":
        from rich import progress  # here: Rich takes 0.05 s to import
        from rich.console import Console

        return progress.Progress(
            progress.TextColumn("{task.description:<26}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=self.transient,
        )
