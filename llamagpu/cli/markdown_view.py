"""Shows Markdown at a terminal while it is generated: words wrap, markup becomes bold, italic or coloured text.

The output is a plain stream: no line is drawn twice. A narrow or resized terminal and scrolling do no harm.
"""

import re
from collections.abc import Callable

from prompt_toolkit.utils import get_cwidth

from llamagpu.markdown import table

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # the model must not control the terminal
SGR = re.compile(r"\x1b\[[\d;]*m")
BLOCK = re.compile(r"(\s*)(?:(#{1,6})|([-*+])|(\d{1,9}[.)])|(>))[ \t]+(?=\S)")
BEGUN = re.compile(r"\s*(?:#{1,6}|[-*+>]|\d{1,9}[.)]?)[ \t]*$")  # what BLOCK may still match
RULE = re.compile(r"\s*([-*_])\1{2,}\s*$")
FENCE = re.compile(r"\s*(```+|~~~+)[^`]*$")
DELIMITER = re.compile(r"\s*:?-+:?\s*")  # a cell of the line below a table's header
MARKUP = re.compile(r"\\[!-/:-@\[-`{-~]|\*{1,3}|_{1,3}|`+|[^\\*_`]+|\\")
BOLD, DIM, ITALIC, CODE = "1", "2", "3", "36"
STYLES = {"#": BOLD, "**": BOLD, "__": BOLD, "*": ITALIC, "_": ITALIC, "***": "1;3", "___": "1;3"}


def paint(style: str, text: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if style and text else text


class WordWrap:
    """Writes words with blanks between them. A word that does not fit goes to the next line."""

    def __init__(self, write: Callable[[str], None], width: Callable[[], int]) -> None:
        self.write, self.width = write, width
        self.begin()

    def begin(self, prefix: str = "", hang: str = "") -> None:
        """A new line that begins with `prefix`; the lines it wraps to begin with `hang`, which is as wide."""
        self.column = self.indent = get_cwidth(SGR.sub("", prefix))
        self.gap, self.hang = "", hang
        if self.indent > self.width() // 2:
            self.indent, self.hang = 0, ""
        self.write(prefix)

    def blanks(self, text: str) -> None:
        self.gap += text.replace("\t", "    ")

    def word(self, parts: list[tuple[str, str]]) -> None:
        """A word as parts (style, text)."""
        size = sum(get_cwidth(text) for _, text in parts)
        if self.column + len(self.gap) + size <= self.width() or self.column <= self.indent:
            self.write(self.gap)
            self.column += len(self.gap)
        else:
            self._wrap()
        self.gap = ""
        for style, text in parts:
            fits = self.column + get_cwidth(text) <= self.width()
            for piece in [text] if fits else text:  # a word longer than a line breaks anywhere
                if self.column + get_cwidth(piece) > self.width():
                    self._wrap()
                self.write(paint(style, piece))
                self.column += get_cwidth(piece)

    def _wrap(self) -> None:
        self.write("\n" + self.hang)
        self.column = self.indent


class MarkdownView:
    """`feed` the pieces of the text, then `close`. Without `styled` the markup is kept, and only words wrap."""

    def __init__(self, write: Callable[[str], None], width: Callable[[], int], styled: bool = True) -> None:
        self.write, self.width, self.styled = write, width, styled
        self.wrap = WordWrap(write, width)
        self.pending = ""  # text that is not shown yet
        self.started = False  # anything was shown
        self.in_line = False
        self.open: list[str] = []  # markup of this line that is not closed
        self.before = " "  # the last character of this line
        self.fence = ""  # of the open code block
        self.rows: list[str] = []  # of the open table

    def feed(self, text: str) -> None:
        self.pending += CONTROL.sub("", text)
        if not self.started:
            self.pending = self.pending.lstrip()
        while self.pending and self._step(last=False):
            self.started = True

    def close(self) -> None:
        """Show the rest and end the line."""
        while self.pending and self._step(last=True):
            pass
        self._end_table()
        if self.in_line:
            self.write("\n")

    def _step(self, last: bool) -> bool:
        """Show the next line, word or blanks of the pending text; False if they are not complete."""
        if not self.in_line:
            return self._start_line(last)
        found = re.match(r"[ \t]*\n?", self.pending)
        blanks = found[0] if found else ""
        if blanks.endswith("\n"):
            self.write("\n")
            self.in_line = False
        elif blanks:
            self.wrap.blanks(blanks)
            self.before = " "
        else:
            word = self._word(last)
            if word:
                self.wrap.word(self._styled(word) if self.styled else [("", word)])
            self.pending = self.pending[len(word) :]
            return bool(word)
        self.pending = self.pending[len(blanks) :]
        return True

    def _word(self, last: bool) -> str:
        """The next word if it is complete. A wide (CJK) character ends a word, and so does the width of the line."""
        for i, char in enumerate(self.pending):
            if char.isspace():
                return self.pending[:i]
            if i + 1 >= self.width() or get_cwidth(char) > 1:
                return self.pending[: i + 1]
        return self.pending if last else ""

    def _start_line(self, last: bool) -> bool:
        """Show a line of code or of a table when it is complete; begin a line of text when its kind is known."""
        line, newline, _ = self.pending.partition("\n")
        text = line.lstrip()
        if not newline and not last:
            if self.fence or text.startswith(("```", "~~~", "|")) or RULE.match(line) or BEGUN.match(line):
                return False
            if not re.match(r"\S+\s+\S", text) and len(text) < self.width():
                return False
        if text.startswith("|") and not self.fence:
            self.rows.append(line)
        else:
            self._end_table()
            if not (self._code(line) or self._rule(line)):
                self._begin_text(line)
                return True
        self.pending = self.pending[len(line) + len(newline) :]
        return True

    def _code(self, line: str) -> bool:
        """Show a line of a code block as it is, without the fences."""
        found = FENCE.match(line)
        if not self.fence and not found:
            return False
        if found and (not self.fence or (line.strip().startswith(self.fence) and found[1] == line.strip())):
            self.fence = "" if self.fence else found[1]
            self.write("" if self.styled else line + "\n")
        else:
            self.write((paint(CODE, line) if self.styled else line) + "\n")
        return True

    def _rule(self, line: str) -> bool:
        if not self.styled or not RULE.match(line):
            return False
        self.write(paint(DIM, "─" * min(40, self.width())) + "\n")
        return True

    def _begin_text(self, line: str) -> None:
        """Show what the line begins with: blanks, a bullet, a number or a bar. A heading is bold."""
        self.in_line, self.open, self.before = True, [], " "
        block = BLOCK.match(line) if self.styled else None
        if block is None:
            indent = line[: len(line) - len(line.lstrip())]
            self.pending = self.pending[len(indent) :]
            indent = indent.expandtabs(4)
            self.wrap.begin(indent, indent)
            return
        self.pending = self.pending[block.end() :]
        indent, heading, bullet, number, quote = block.groups("")
        if heading:
            self.open = ["#"]
            self.wrap.begin()
        elif quote:
            self.wrap.begin(indent + paint(DIM, "│ "), indent + paint(DIM, "│ "))
        else:
            mark = f"{indent.expandtabs(4)}{'•' if bullet else number} "
            self.wrap.begin(mark, " " * len(mark))

    def _end_table(self) -> None:
        """Show the table with aligned columns."""
        rows, self.rows = self.rows, []
        cells = [row.strip().strip("|").split("|") for row in rows]
        if len(rows) < 2 or not all(DELIMITER.fullmatch(cell) for cell in cells[1]):
            self.write("".join(row + "\n" for row in rows))
            return
        columns = max(len(row) for row in cells)
        marks = r"\*\*|`" if self.styled else "(?!)"
        head, _, *body = [
            [re.sub(marks, "", cell).strip() for cell in row] + [""] * (columns - len(row)) for row in cells
        ]
        self.write(table(head, body, columns))

    def _styled(self, word: str) -> list[tuple[str, str]]:
        """The parts of a word with their styles. Opens and closes markup."""
        parts: list[tuple[str, str]] = []
        for found in MARKUP.finditer(word):
            mark, after = found[0], word[found.end() : found.end() + 1]
            in_code = any(m[0] == "`" for m in self.open)
            if mark[0] == "`" or (mark[0] in "*_" and not in_code):
                can_open = after and (mark[0] == "`" or not self.before.isalnum())
                can_close = mark[0] == "`" or (self.before != " " and not (mark[0] == "_" and after.isalnum()))
                if mark in self.open and can_close:
                    self.open.remove(mark)
                    continue
                if mark not in self.open and can_open and not in_code:
                    self.open.append(mark)
                    continue
            text = mark[1] if mark[0] == "\\" and len(mark) == 2 and not in_code else mark
            style = ";".join(STYLES.get(m, CODE) for m in self.open)
            before = parts.pop()[1] if parts and parts[-1][0] == style else ""
            parts.append((style, before + text))
            self.before = text[-1]
        return parts
