"""A profile as one self-contained page: bars per layer, a roofline, the tables. No script, no network."""

import math
from collections.abc import Sequence
from html import escape

from llamagpu.files.config import CONV, CONV_IN, CONV_OUT
from llamagpu.profile.labels import Box, place_labels
from llamagpu.profile.profile import Phase, Profile, Total, ceilings, computing, totals
from llamagpu.profile.report import COLUMNS, cells

# A colour for each category of operations: distinct for colour-blind readers, legible on white and on black
CATEGORIES = {
    "qkv": "#4477aa",
    "attention": "#ee6677",
    "attn_output": "#66ccee",
    "feed forward": "#228833",
    "ffn_down": "#ccbb44",
    "norm": "#aa3377",
    "other": "#999999",
}
CONVOLUTION = {CONV_IN: "qkv", CONV: "attention", CONV_OUT: "attn_output"}  # in the place of attention
WIDTH = 960
LETTER_WIDTH, TEXT_HEIGHT = 7.0, 14.0  # of names at 12 px, with a margin
STYLE = """
:root { color-scheme: light dark;
  --ink: #1b1f24; --soft: #656d76; --line: #d0d7de; --page: #ffffff; --band: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --page: #0d1117; --band: #151b23; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto;
       max-width: 1000px; padding: 24px 20px 60px; }
h1 { font-size: 1.5rem; margin: 0 0 4px; } h2 { font-size: 1.15rem; margin: 40px 0 4px; }
p { margin: 4px 0 12px; color: var(--soft); }
svg { width: 100%; height: auto; display: block; font: 12px system-ui, sans-serif; }
svg text { fill: var(--soft); }
svg .name { fill: var(--ink); paint-order: stroke; stroke: var(--page); stroke-width: 4px;
            stroke-linejoin: round; }
.grid { stroke: var(--line); stroke-width: 1; } .roof { stroke: var(--ink); stroke-width: 1.5; fill: none; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0; color: var(--ink); font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
            vertical-align: -1px; }
.wide { overflow-x: auto; margin: 14px 0; } summary { cursor: pointer; color: var(--soft); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
tbody tr:hover { background: var(--band); }
"""


def page(profile: Profile) -> str:
    body = [
        f"<h1>{escape(profile.model)}</h1>",
        f"<p>{escape(profile.adapter)} ({escape(profile.driver)}, {escape(profile.backend)}), "
        f"precision {escape(profile.precision)}; a copy reaches {si(profile.copy, 'B/s')}, "
        f"f32 multiply-adds {si(profile.f32_peak, 'FLOP/s')}, "
        f"packed int8 products {si(profile.int8_peak, 'OP/s')} here.</p>",
        "<h2>Roofline</h2>",
        "<p>Linears and attention: operations per byte that must be moved against speed. The slope is the speed of a "
        "copy; a point above it reads from a cache. A ceiling is the arithmetic measured in this run, or the fastest "
        "operation where that is faster.</p>",
        roofline(profile),
    ]
    for phase in profile.phases:
        body += [f"<h2>{escape(phase.name.capitalize())}</h2>", f"<p>{escape(phase.overhead)}.</p>"]
        body += [legend(phase), layer_bars(phase)]
        body.append(table(phase, "op", "operation (kernel)", profile.copy))
        layers = table(phase, "layer", "layer", profile.copy)
        body.append(f"<details><summary>By layer</summary>{layers}</details>")
    title = escape(f"Profile of {profile.model}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def si(value: float, unit: str) -> str:
    power = max(0, min(5, int(math.log10(max(value, 1)) // 3)))
    return f"{value / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P'][power]}{unit}"


def category(op: str) -> str:
    if op in ("qkv", "attention", "attn_output", "ffn_down"):
        return op
    if op == "rotate":
        return "qkv"
    if op in CONVOLUTION:
        return CONVOLUTION[op]
    if op.endswith("norm"):
        return "norm"
    return "feed forward" if op in ("gate_up", "ffn_gate", "ffn_up", "glu_mul", "router") else "other"


def legend(phase: Phase) -> str:
    present = {category(timing.op) for timing in phase.timings}
    items = (
        f'<span><i style="background:{colour}"></i>{name}</span>'
        for name, colour in CATEGORIES.items()
        if name in present
    )
    return f'<div class="legend">{"".join(items)}</div>'


def layer_bars(phase: Phase) -> str:
    """A column for each layer and one for the rest: net time per step, stacked by category."""
    stacks: dict[int | None, dict[str, float]] = {}
    for timing in phase.timings:
        stack, name = stacks.setdefault(timing.layer, {}), category(timing.op)
        stack[name] = stack.get(name, 0.0) + timing.net_ns / phase.steps / 1e3
    layers = sorted(stacks, key=lambda layer: (layer is None, layer or 0))
    most = nice(max((sum(stack.values()) for stack in stacks.values()), default=1.0))
    left, height, bottom = 56, 250, 34
    elements = []
    for i in range(5):
        y = 10 + height * i / 4
        elements.append(f'<line class="grid" x1="{left}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        elements.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{most * (4 - i) / 4:g}</text>')
    spacing = (WIDTH - left) / max(1, len(layers))
    for column, layer in enumerate(layers):
        x, y = left + spacing * (column + 0.12), 10.0 + height
        label = "rest" if layer is None else str(layer)
        for name, colour in CATEGORIES.items():
            us = stacks[layer].get(name, 0.0)
            tall = height * us / most
            y -= tall
            tooltip = f"{'outside the layers' if layer is None else f'layer {layer}'}, {name}: {us:.1f} us"
            elements.append(
                f'<rect x="{x:.1f}" y="{y:.2f}" width="{spacing * 0.76:.1f}" height="{tall:.2f}" '
                f'fill="{colour}"><title>{escape(tooltip)}</title></rect>'
            )
        if len(layers) <= 24 or column % 4 == 0 or layer is None:
            elements.append(f'<text x="{x + spacing * 0.38:.1f}" y="{height + 27}" text-anchor="middle">{label}</text>')
    label = f"Net microseconds per {'token' if phase.steps == phase.tokens else 'step'} and layer"
    return svg(height + bottom, label, elements) + f"<p>{label}</p>"


def nice(value: float) -> float:
    """The next 1, 2, 4 or 8 times a power of ten, whose quarters are round numbers."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value)


def roofline(profile: Profile) -> str:
    """A chart with two logarithmic axes."""
    found = computing(profile)
    if not found:
        return ""
    roofs = ceilings(profile)
    peak = max(roof for _, roof in roofs)
    xs = [t.flops / t.bytes for _, t in found]
    ys = [t.flops / t.net_ns * 1e9 for _, t in found]
    x0, x1 = math.floor(math.log10(min(xs))), math.ceil(math.log10(max(*xs, peak / profile.copy)))
    y0, y1 = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(*ys, peak)))
    left, top, width, height = 76, 12, WIDTH - 76 - 170, 340

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - x0) / max(1, x1 - x0)
        return left + width * across, top + height * (1 - (math.log10(y) - y0) / max(1, y1 - y0))

    elements = []
    for power in range(x0, x1 + 1):
        x, _ = to_pixels(10.0**power, 10.0**y0)
        elements.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + height}"/>')
        elements.append(f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{10.0**power:g}</text>')
    for power in range(y0, y1 + 1):
        _, y = to_pixels(10.0**x0, 10.0**power)
        elements.append(f'<line class="grid" x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        elements.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{si(10.0**power, "")}</text>')
    elements.append(
        f'<text x="{left + width / 2}" y="{top + height + 38}" text-anchor="middle">'
        "operations per byte; upwards: per second</text>"
    )
    label_y = -math.inf  # of the last ceiling
    for (name, roof), dash in reversed([*zip(roofs, ("", ' stroke-dasharray="6 4"'), strict=False)]):
        knee = min(max(roof / profile.copy, 10.0**x0), 10.0**x1)
        start = max(10.0**x0, 10.0**y0 / profile.copy)
        end = to_pixels(10.0**x1, roof)
        line = " ".join(
            f"{x:.1f},{y:.1f}"
            for x, y in (to_pixels(start, min(start * profile.copy, roof)), to_pixels(knee, roof), end)
        )
        elements.append(f'<polyline class="roof" points="{line}"{dash}/>')
        label_y = max(label_y + TEXT_HEIGHT, end[1] + 4)
        elements.append(f'<text class="name" x="{end[0] + 6:.1f}" y="{label_y:.1f}">{name} {si(roof, "OP/s")}</text>')
    centres = [to_pixels(x, y) for x, y in zip(xs, ys, strict=True)]
    bounds = (left, top - 8, left + width, top + height)
    return svg(top + height + 48, "Roofline", elements + marks(found, centres, bounds)) + names_of(profile)


def marks(found: Sequence[tuple[int, Total]], centres: Sequence[tuple[float, float]], bounds: Box) -> list[str]:
    """A circle for each operation of the first phase, a square for the second. A line leads to a name farther off."""
    shapes, names = [], []
    ops = [t.name.split(" (")[0] for _, t in found]
    places = place_labels(centres, [LETTER_WIDTH * len(op) for op in ops], TEXT_HEIGHT, bounds)
    for (which, t), op, (x, y), (label_x, label_y) in zip(found, ops, centres, places, strict=True):
        rates = f"{si(t.flops / t.net_ns * 1e9, 'OP/s')}, {t.bytes / t.net_ns:.1f} GB/s"
        tooltip = f"<title>{escape(f'{t.name}: {rates}, {t.flops / t.bytes:.3g} operations per byte')}</title>"
        paint = f'fill="{CATEGORIES[category(op)]}" stroke="var(--page)"'
        if which == 0:
            shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" {paint}>{tooltip}</circle>')
        else:
            shapes.append(f'<rect x="{x - 5.5:.1f}" y="{y - 5.5:.1f}" width="11" height="11" {paint}>{tooltip}</rect>')
        if abs(label_y - y) > 1:
            end = label_x - 2 if label_x > x else label_x + LETTER_WIDTH * len(op) + 2
            names.append(f'<line class="grid" x1="{x:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{label_y:.1f}"/>')
        names.append(f'<text class="name" x="{label_x:.1f}" y="{label_y + 4:.1f}">{escape(op)}</text>')
    return names + shapes


def names_of(profile: Profile) -> str:
    shapes = ("&#9679;", "&#9632;")
    items = (f"<span>{shape} {escape(p.name)}</span>" for shape, p in zip(shapes, profile.phases, strict=False))
    return f'<div class="legend">{"".join(items)}</div>'


def svg(height: float, label: str, elements: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(elements)}</svg>'


def table(phase: Phase, by: str, name: str, copy: float) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in (name, *COLUMNS))
    rows = (cells(t, phase, copy) for t in totals(phase.timings, by))
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
