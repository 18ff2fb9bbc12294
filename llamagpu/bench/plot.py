"""Benchmark rows as a picture: speed over depth or batch, a roofline, steps over rows. Needs the extra `plot`."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from llamagpu.bench.report import Row, test_name
from llamagpu.errors import LlamaGpuError, install_extra
from llamagpu.profile.labels import place_labels
from llamagpu.profile.profile import Profile, Total, ceilings, computing

AXES = {"n_depth": "tokens in the cache", "n_ubatch": "tokens per step (-ub)", "n_prompt": "prompt tokens"}


def need_matplotlib() -> Any:
    """matplotlib's Figure class; pyplot would look for a display."""
    try:
        return import_module("matplotlib.figure").Figure
    except ImportError:
        raise LlamaGpuError("--plot needs matplotlib", install_extra("plot")) from None


def plot(rows: Sequence[Row], profiles: Sequence[Profile], path: Path) -> None:
    figure = need_matplotlib()(figsize=(13, 5.5), dpi=150, layout="constrained")
    speed, roof = figure.subplots(1, 2)
    speeds(speed, rows)
    roofline(roof, profiles)
    figure.suptitle(f"{rows[0]['adapter']}, {rows[0]['driver']}")
    figure.draw_without_rendering()  # the layout must be known before names are placed
    figure.set_layout_engine("none")
    label_points(roof, profiles)
    save(figure, path)


def plot_steps(rows: Sequence[Row], path: Path) -> None:
    """The time of a step over its rows, on the GPU and by wall clock; cliffs are crosses."""
    figure = need_matplotlib()(figsize=(9, 5.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="token rows of a step", ylabel="us")
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.grid(alpha=0.3, which="both")
    for i, name in enumerate(dict.fromkeys(row["model_type"] for row in rows)):
        for field, label, style in (("gpu_ns", "GPU", "-"), ("wall_ns", "wall clock", ":")):
            found = [(row["n_rows"], row[field] / 1e3) for row in rows if row["model_type"] == name and row[field]]
            if found:
                axes.plot(*zip(*found, strict=True), style, marker=".", color=f"C{i}", label=f"{name}, {label}")
    if marked := [(row["n_rows"], (row["gpu_ns"] or row["wall_ns"]) / 1e3) for row in rows if row["cliff"]]:
        axes.plot(*zip(*marked, strict=True), "x", color="red", markersize=9, label="cliff")
    axes.legend(fontsize=8)
    figure.suptitle(f"{rows[0]['adapter']}, {rows[0]['driver']}")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: matplotlib does not know the ending
        raise LlamaGpuError(
            f"cannot write {path}: {error}", "give a file name that ends in .png, .svg or .pdf"
        ) from error


def axis_of(rows: Sequence[Row]) -> str | None:
    """The field that varies; None if only the prompt and generation lengths do."""
    for field in ("n_depth", "n_ubatch", "n_prompt"):
        values = {row[field] for row in rows if row[field] or field == "n_depth"}
        if len(values) > 1:
            return field
    return None


def speeds(axes: Any, rows: Sequence[Row]) -> None:
    field = axis_of(rows)
    axes.set_ylabel("tokens per second")
    if field is None:
        names = [f"{row['model_type']}\n{test_name(row)}" for row in rows]
        axes.bar(names, [row["avg_ts"] for row in rows], yerr=[row["stddev_ts"] for row in rows], capsize=4)
        axes.tick_params(axis="x", labelsize=8, labelrotation=90 if len(rows) > 5 else 0)
        return
    series: dict[str, list[Row]] = {}
    for row in rows:
        base = test_name(row | {"n_depth": 0} if field == "n_depth" else row)
        name = "pp" if field == "n_prompt" and not row["n_gen"] else base
        series.setdefault(f"{row['model_type']} {name}", []).append(row)
    for name, members in series.items():
        members.sort(key=lambda row: int(row[field]))
        x, y, error = ([row[f] for row in members] for f in (field, "avg_ts", "stddev_ts"))
        axes.errorbar(x, y, yerr=error, marker="o", capsize=3, label=name)
    axes.set_yscale("log")
    axes.set_xlabel(AXES[field])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def roofline(axes: Any, profiles: Sequence[Profile]) -> None:
    """Every linear and attention as a point: operations per byte against operations per second."""
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    axes.grid(alpha=0.3, which="both")
    for profile in profiles[:1]:
        span = [0.5, 4000.0]
        for (name, peak), style in zip(ceilings(profile), ("-", "--"), strict=False):
            bends = sorted([*span, peak / profile.copy])
            speeds = [min(x * profile.copy, peak) / 1e12 for x in bends]
            axes.plot(bends, speeds, style, color="grey", label=f"{name} roof")
    for profile in profiles:
        for i, (phase, marker) in enumerate(zip(profile.phases, "os", strict=False)):
            found = [point(t) for which, t in computing(profile) if which == i]
            axes.scatter(*zip(*found, strict=True), marker=marker, label=f"{profile.model}, {phase.name}")
    axes.legend(fontsize=7, loc="lower right")


def point(total: Total) -> tuple[float, float]:
    return total.flops / total.bytes, total.flops / total.net_ns / 1e3


def label_points(axes: Any, profiles: Sequence[Profile]) -> None:
    """Name every point of the roofline; a thin line leads to a name that is farther off."""
    found = [t for profile in profiles for _, t in computing(profile)]
    if not found:
        return
    scale = axes.figure.dpi / 72  # pixels of a point of text
    names = [t.name.split(" (")[0] for t in found]
    pixels = [axes.transData.transform(point(t)) for t in found]
    box = axes.get_window_extent()
    height = axes.figure.bbox.height  # matplotlib's y grows upwards
    places = place_labels(
        [(x, height - y) for x, y in pixels],
        [4.8 * scale * len(name) for name in names],
        9 * scale,
        (box.x0, height - box.y1, box.x1, height - box.y0),
    )
    for name, (x, y), (label_x, label_y) in zip(names, pixels, places, strict=True):
        moved = abs(height - label_y - y) > 1
        line = {"arrowstyle": "-", "linewidth": 0.5, "color": "grey"} if moved else None
        offset = ((label_x - x) / scale, (height - label_y - y) / scale)
        data = axes.transData.inverted().transform((x, y))
        axes.annotate(name, data, offset, textcoords="offset points", va="center", fontsize=7, arrowprops=line)
