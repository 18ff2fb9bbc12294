"""The report of a conversion, as lines of text and as JSON."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict
from typing import Any

from llamagpu.convert.convert import Report

WORST = 5  # tensors shown


def lines(report: Report, told: Collection[str] = ()) -> Iterator[str]:
    """The lines of text, without the notes that the user was `told` before."""
    before, after = report.bytes_before / 1e6, report.bytes_after / 1e6
    types = Counter(loss.ggml_type for loss in report.tensors)
    yield f"{report.source} -> {report.output}"
    yield f"size     {before:,.1f} MB -> {after:,.1f} MB, {report.bits:.2f} bits per weight"
    yield f"types    {', '.join(f'{count} {name}' for name, count in types.most_common())}"
    yield f"time     {report.seconds:.1f} s, {before / max(report.seconds, 1e-9):,.0f} MB/s"
    worst = sorted((loss for loss in report.tensors if loss.error), key=lambda loss: -loss.nmse)[:WORST]
    yield f"error    {report.nmse:.3g} of the weights' squares{'; most in' if worst else ''}"
    yield from (f"         {loss.nmse:.3g} {loss.ggml_type} {loss.name}" for loss in worst)
    yield from quality_lines(report)
    yield from (f"note     {note}" for note in report.notes if note not in told)


def quality_lines(report: Report) -> Iterator[str]:
    if not report.quality:
        return
    before = report.quality["before"].perplexity
    yield f"quality  perplexity {before:.4f} of the source"
    for name, label in (("after", "of the result"), ("plain", "with plain rounding")):
        if found := report.quality.get(name):
            change = 100 * (found.perplexity / before - 1)
            yield (
                f"         perplexity {found.perplexity:.4f} ({change:+.2f} %) {label}, "
                f"KL divergence {found.divergence:.5f}, same likeliest token {100 * found.same_top:.1f} %"
            )


def as_json(report: Report) -> dict[str, Any]:
    found = asdict(report)
    found |= {"weights": report.weights, "bits_per_weight": report.bits, "nmse": report.nmse}
    for tensor, loss in zip(found["tensors"], report.tensors, strict=True):
        tensor["nmse"] = loss.nmse
    return found
