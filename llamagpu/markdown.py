"""Markdown tables with aligned columns."""

from collections.abc import Sequence


def padded(text: str, width: int) -> str:
    return text.ljust(-width) if width < 0 else text.rjust(width)


def table(names: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table: its first `left` columns are aligned to the left, the others to the right."""
    widths = [max(3, *(len(row[i]) for row in (names, *rows))) for i in range(len(names))]
    signed = [-w if i < left else w for i, w in enumerate(widths)]
    line = " | ".join(f"{'-' * (abs(w) - 1)}{'-' if w < 0 else ':'}" for w in signed)
    body = [" | ".join(padded(cell, w) for cell, w in zip(row, signed, strict=True)) for row in (names, *rows)]
    return "\n".join([f"| {body[0]} |", f"| {line} |", *(f"| {row} |" for row in body[1:])]) + "\n"
