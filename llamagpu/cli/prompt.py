"""Chat at a terminal: a line editor with history, answers as Markdown, keys that wait while an answer is shown."""

import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")  # do not ask the terminal for its cursor: some never answer

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, NestedCompleter, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle

from llamagpu.cli.markdown_view import MarkdownView
from llamagpu.cli.repl import COMMANDS, SETTINGS, Answering
from llamagpu.cli.terminal import Interrupted, log, write

try:
    import termios
except ImportError:  # Windows, where keys are shown when they are read
    termios = None  # type: ignore[assignment]


class Terminal:
    """Use in a `with` block: there Ctrl-C is a key at the prompt, and stops an answer; it never ends the process."""

    interactive = True

    def __init__(self) -> None:
        self.dumb = os.environ.get("TERM") == "dumb"
        self.pressed = threading.Event()
        paths: dict[str, Completer] = {name: PathCompleter(expanduser=True) for name in ("/save", "/load")}
        words = {name: None for name in COMMANDS} | paths | {"/set": {name: None for name in SETTINGS}}
        self.session: PromptSession[str] = PromptSession(
            "> ",
            history=history(),
            key_bindings=key_bindings(),
            completer=CommandCompleter.from_nested_dict(words),
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_suspend=True,
            prompt_continuation="  ",
        )

    def __enter__(self) -> Self:
        self.before = signal.signal(signal.SIGINT, lambda *_: self.pressed.set())
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def read(self, default: str = "") -> str | None:
        """The next message, without blanks at its end. Ctrl-C clears the line; with a default it returns nothing."""
        while True:
            try:
                return self.session.prompt(default=default).rstrip()
            except EOFError:
                return "" if default else None
            except KeyboardInterrupt:
                if default:
                    return ""
                if not self.session.default_buffer.text:
                    log("Ctrl-D or /exit ends")

    @contextmanager
    def answering(self) -> Iterator[Answering]:
        self.pressed.clear()
        view = MarkdownView(write, self.width, styled=not self.dumb and not os.environ.get("NO_COLOR"))

        def check() -> None:
            if self.pressed.is_set():
                raise Interrupted("interrupted")

        with keys_wait(paste=not self.dumb):
            try:
                yield check, view.feed
            finally:
                view.close()

    def width(self) -> int:
        return max(1, shutil.get_terminal_size().columns - 1)  # the last column would begin a new line on some


class CommandCompleter(NestedCompleter):
    """Completes /commands and what follows them."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor.lstrip()
        if " " in text:
            yield from super().get_completions(document, complete_event)
        elif text.startswith("/"):  # for NestedCompleter the / is not part of a word
            yield from (Completion(name, -len(text)) for name in self.options if name.startswith(text.lower()))


def key_bindings() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class MessageHistory(FileHistory):
    def store_string(self, string: str) -> None:
        with suppress(OSError, UnicodeError):  # a full disk must not end the conversation
            super().store_string(string)


def history() -> History:
    """The messages of all sessions, in a file that only the user reads; in memory where it cannot be opened."""
    import platformdirs

    path = Path(platformdirs.user_state_dir("llamagpu", False)) / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return MessageHistory(path)


@contextmanager
def keys_wait(paste: bool) -> Iterator[None]:
    """Keys typed in this block are not shown: the next prompt gets them. Ctrl-C still sends its signal.

    With `paste` the terminal marks pasted text, as it does at the prompt: it stays one message.
    """
    if termios is None:
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    quiet = termios.tcgetattr(fd)
    quiet[0] &= ~termios.ICRNL  # Enter as the prompt expects it
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(fd, termios.TCSADRAIN, quiet)
    write("\x1b[?2004h" if paste else "")
    try:
        yield
    finally:
        write("\x1b[?2004l" if paste else "")
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
