#!/usr/bin/env python3
"""Turns session.cast into session.svg, which plays the recording in a loop. Without animation it shows the end."""

import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
FRAME = 0.1  # seconds: what is printed within a frame appears at once
HOLD = 5.0  # seconds that the end stays
CHARACTER, LINE, MARGIN, BAR = 7.9, 18, 16, 34  # px; BAR: height of the title bar
PIECE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|.", re.DOTALL)  # an escape sequence or a character
STYLE = """
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
text { fill: #d1d7e0; white-space: pre }
tspan { animation: %gs step-end infinite }
.title { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #9198a1 }
.command { fill: #7ee787 }
@media (prefers-reduced-motion: reduce) { tspan { animation: none !important } }
"""


class Screen:
    """The rows of a terminal that never scrolls: text, carriage return, line feed, erase to the end of the line."""

    def __init__(self, columns: int) -> None:
        self.columns, self.rows, self.column = columns, [""], 0

    def feed(self, text: str) -> None:
        for piece in PIECE.findall(text):
            if piece == "\x1b[K":
                self.rows[-1] = self.rows[-1][: self.column]
            elif piece[0] != "\x1b":
                self.put(piece)
            elif piece[-1] not in "mhl":  # colours and modes do not change the text
                raise ValueError(f"the recording has an unknown escape sequence: {piece!r}")

    def put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.rows.append("")
            self.column = 0
        else:
            if self.column == self.columns:
                self.put("\n")
            row = self.rows[-1].ljust(self.column)
            self.rows[-1] = row[: self.column] + character + row[self.column + 1 :]
            self.column += 1


def frames(lines: list[str]) -> Iterator[tuple[float, list[str]]]:
    """(seconds, rows) whenever the screen has changed, with waits cut to the recording's limit."""
    header, *events = map(json.loads, lines)
    limit, screen, clock, shown = header["idle_time_limit"], Screen(header["width"]), 0.0, -FRAME
    for (time, _, text), following in zip(events, [*events[1:], None], strict=True):
        screen.feed(text)
        wait = min(following[0] - time, limit) if following else FRAME
        if clock + wait >= shown + FRAME:
            shown = clock
            yield clock, list(screen.rows)
        clock += wait


def spans(screens: list[tuple[float, list[str]]]) -> list[list[list[tuple[float, float | None, str]]]]:
    """For each row its texts one after another, each as pieces (from, to, text). A row that only grows is one text."""
    rows: list[list[list[tuple[float, float | None, str]]]] = []
    for clock, screen in screens:
        rows += [[[]] for _ in range(len(screen) - len(rows))]
        for texts, new in zip(rows, screen, strict=True):
            old = "".join(text for _, _, text in texts[-1])
            if not new.startswith(old):
                texts[-1] = [(start, clock, text) for start, _, text in texts[-1]]
                texts.append([])
                old = ""
            if len(new) > len(old):
                texts[-1].append((clock, None, new[len(old) :]))
    return rows


def render(cast: str) -> str:
    lines = cast.splitlines()
    screens = list(frames(lines))
    header, length = json.loads(lines[0]), screens[-1][0] + HOLD
    styles: dict[tuple[float, float | None], str] = {}
    body = []
    for index, texts in enumerate(spans(screens)):
        y = BAR + MARGIN + LINE * index + 8
        for pieces in filter(None, texts):
            parts = []
            for start, end, text in pieces:
                name = styles.setdefault((start, end), f"t{len(styles)}")
                parts.append(f'<tspan class="{name}">{escape(text, quote=False)}</tspan>')
            kind = ' class="command"' if pieces[0][2].startswith("$ ") else ""
            body.append(f'<text x="{MARGIN}" y="{y}"{kind}>{"".join(parts)}</text>')
    css = STYLE % length
    for (start, end), name in styles.items():
        hidden = f"{end / length:.2%}{{visibility:hidden}}" if end else ""
        css += f".{name}{{animation-name:{name}{';visibility:hidden' if end else ''}}}"
        css += f"@keyframes {name}{{0%{{visibility:hidden}}{start / length:.2%}{{visibility:visible}}{hidden}}}\n"
    final = "\n".join(screens[-1][1]).rstrip()
    width = round(header["width"] * CHARACTER) + 2 * MARGIN
    height = BAR + 2 * MARGIN + LINE * (final.count("\n") + 1)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"
  role="img" aria-labelledby="title desc">
<title id="title">{escape(header["title"])}</title>
<desc id="desc">{escape(final)}</desc>
<style>{css}</style>
<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="#0d1117" stroke="#3d444d"/>
<path d="M0 {BAR}H{width}" stroke="#3d444d"/>
<text x="{width / 2:g}" y="22" text-anchor="middle" class="title">{escape(header["title"])}</text>
{chr(10).join(body)}
</svg>
"""


if __name__ == "__main__":
    (FOLDER / "session.svg").write_text(render((FOLDER / "session.cast").read_text()))
