#!/usr/bin/env python3
"""Draws headline.json as headline.svg: decode speed of each engine, a group of bars for each model."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
WIDTH, LEFT, RIGHT, TOP = 760, 236, 150, 76  # px; RIGHT holds the label of the longest bar
BAR, PITCH, GROUP = 16, 20, 96  # px: height of a bar, from bar to bar, from group to group
# The card has a background of its own: an SVG sees the theme of the system, not that of the page around it.
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #57606a }
.card { fill: #f6f8fa; stroke: #d0d7de }
.strong { font-weight: 600; fill: #1f2328 }
.title { font-size: 16px }
.small { font-size: 11px }
.peer { fill: #a8b1bb }
.ours { fill: #1a7f37 }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1 }
  .card { fill: #151b23; stroke: #3d444d }
  .strong { fill: #f0f6fc }
  .peer { fill: #59636e }
  .ours { fill: #2ea043 }
}
"""


def label(x: float, y: int, text: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y}" class="{style}" text-anchor="{anchor}">{text}</text>'


def render(data: dict[str, Any]) -> str:
    """The SVG. Every bar has the same scale. The first run is ours, the second what it is compared with."""
    runs, models = data["runs"], data["models"]
    ours, baseline = runs[0], runs[1]
    longest = max(max(run["tokens_per_second"].values()) for run in runs)
    height = TOP + GROUP * len(models) + 30
    body, described = [], []
    for row, (model, name) in enumerate(models.items()):
        top = TOP + GROUP * row
        body.append(label(24, top + BAR - 3, name, "strong"))
        for index, run in enumerate(runs):
            speed, y = run["tokens_per_second"][model], top + PITCH * index
            width, style = speed / longest * (WIDTH - LEFT - RIGHT), "strong" if run is ours else ""
            ratio = speed / baseline["tokens_per_second"][model]
            value = f"{speed}" + (f" ({ratio:.1f}x {baseline['engine'].split()[-1]})" if run is ours else "")
            body.append(label(LEFT - 8, y + BAR - 3, run["engine"], style, "end"))
            kind = "ours" if run is ours else "peer"
            body.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" class="{kind}"/>')
            body.append(label(round(LEFT + width + 6, 1), y + BAR - 3, value, style))
        described.append(name + ": " + ", ".join(f"{r['engine']} {r['tokens_per_second'][model]}" for r in runs))
    measured = ", ".join(f"{run['engine'].split()[0]} {run['date']}" for run in (ours, baseline))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"
  role="img" aria-labelledby="title desc">
<title id="title">Decode speed on one {data["gpu"]}, Q4_0, tokens per second</title>
<desc id="desc">{"; ".join(described)}.</desc>
<style>{STYLE}</style>
<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6" class="card"/>
{label(24, 32, f"Decode on one {data['gpu']}, Q4_0: tokens per second", "strong title")}
{label(24, 53, "One sequence (tg128); longer bars are better")}
{chr(10).join(body)}
{label(24, height - 18, f"Random weights in the models' real shapes. Measured: {measured}.", "small")}
</svg>
"""


if __name__ == "__main__":
    (FOLDER / "headline.svg").write_text(render(json.loads((FOLDER / "headline.json").read_text())))
