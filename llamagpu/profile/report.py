"""A profile as text, as JSON, and as a trace for Perfetto and chrome://tracing."""

from dataclasses import asdict
from typing import Any

from llamagpu.markdown import table
from llamagpu.profile.profile import Phase, Profile, Total, totals

COLUMNS = ("count", "us", "net us", "share", "GB/s", "of copy", "TFLOP/s")


def text(profile: Profile) -> str:
    """Tables by operation and by layer; times are per token in decode, per step in prefill."""
    lines = [
        f"{profile.model}, precision {profile.precision}, on {profile.adapter} ({profile.driver}, {profile.backend})",
        f"copy {profile.copy / 1e9:.1f} GB/s, f32 multiply-adds {profile.f32_peak / 1e12:.3g} TFLOP/s, "
        f"packed int8 {profile.int8_peak / 1e12:.3g} TOP/s",
    ]
    for phase in profile.phases:
        lines += ["", f"{phase.name}: {phase.overhead}", ""]
        for by, name in (("op", "operation (kernel)"), ("layer", "layer")):
            rows = [cells(t, phase, profile.copy) for t in totals(phase.timings, by)]
            lines += [table((name, *COLUMNS), rows)]
    return "\n".join(lines)


def cells(t: Total, phase: Phase, copy: float) -> list[str]:
    steps = phase.steps
    speed = t.bytes / t.net_ns if t.net_ns else 0.0
    return [
        t.name,
        f"{t.count / steps:g}",
        f"{t.ns / steps / 1e3:.1f}",
        f"{t.net_ns / steps / 1e3:.1f}",
        f"{t.net_ns / phase.net_ns:.1%}",
        f"{speed:.1f}",
        f"{speed * 1e9 / copy:.1%}",
        f"{t.flops / t.net_ns / 1e3:.3g}" if t.flops and t.net_ns else "-",
    ]


def as_json(profile: Profile) -> dict[str, Any]:
    found = asdict(profile)
    for phase, fields in zip(profile.phases, found["phases"], strict=True):
        fields["by_op"] = [asdict(t) for t in totals(phase.timings, "op")]
        fields["by_layer"] = [asdict(t) for t in totals(phase.timings, "layer")]
    return found


def trace(profile: Profile) -> dict[str, Any]:
    """Chrome's trace events, times in us. The two clocks are aligned where the host sees the pass end."""
    events: list[dict[str, Any]] = []
    for pid, name in ((1, f"GPU: {profile.adapter}"), (2, "host")):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
    for pid, tid, name in ((1, 1, "dispatches"), (1, 2, "layers"), (2, 1, "recorder")):
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
    zero = min((phase.host.began for phase in profile.phases), default=0.0)
    for phase in profile.phases:
        events += host_events(phase, zero) + gpu_events(phase, zero)
    facts = {
        "model": profile.model,
        "precision": profile.precision,
        "driver": profile.driver,
        "backend": profile.backend,
    }
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": facts}


def event(pid: int, tid: int, name: str, start_us: float, us: float, **args: Any) -> dict[str, Any]:
    times = {"ts": round(start_us, 3), "dur": round(us, 3)}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, **times, "args": args}


def host_events(phase: Phase, zero: float) -> list[dict[str, Any]]:
    h = phase.host
    stages = (("record", h.began, h.recorded), ("submit", h.recorded, h.submitted), ("wait", h.submitted, h.done))
    return [
        event(2, 1, f"{name} {phase.name}", (start - zero) * 1e6, (end - start) * 1e6, dispatches=h.dispatches)
        for name, start, end in stages
    ]


def gpu_events(phase: Phase, zero: float) -> list[dict[str, Any]]:
    h, timings = phase.host, phase.timings
    length = (timings[-1].start_ns + timings[-1].ns) / 1e3
    start = max((h.recorded - zero) * 1e6, (h.done - zero) * 1e6 - length)
    events, layer_start = [], 0.0
    for i, t in enumerate(timings):
        begin, us = start + t.start_ns / 1e3, t.ns / 1e3
        details = {"kernel": t.kernel, "layer": t.layer, "net_us": t.net_ns / 1e3, "bytes": t.bytes}
        events.append(event(1, 1, t.op, begin, us, **details))
        if i == 0 or timings[i - 1].layer != t.layer:
            layer_start = begin
        if t.layer is not None and (i + 1 == len(timings) or timings[i + 1].layer != t.layer):
            events.append(event(1, 2, f"layer {t.layer}", layer_start, begin + us - layer_start))
    return events
