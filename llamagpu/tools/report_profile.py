"""A profile as text, as JSON, and as a trace that Perfetto and chrome://tracing open."""

from dataclasses import asdict
from typing import Any

from llamagpu.tools.profile import Phase, Profile, Total, totals
from llamagpu.tools.report import table

COLUMNS = ("count", "us", "net us", "share", "GB/s", "of copy", "TFLOP/s")


def text(profile: Profile) -> str:
    """Tables by operation and by layer; times are per token in decode, per step in prefill."""
    lines = [
        f"{profile.model}, precision {profile.precision}, on {profile.adapter} ({profile.driver})",
        f"copy {profile.copy / 1e9:.1f} GB/s, f32 multiply-adds {profile.f32_peak / 1e12:.3g} TFLOP/s, "
        f"packed int8 {profile.i8_peak / 1e12:.3g} TOP/s",
    ]
    for phase in profile.phases:
        lines += ["", f"{phase.name}: {phase.overhead}", ""]
        for by, name in (("op", "operation (kernel)"), ("layer", "layer")):
            rows = [cells(t, phase, profile.copy) for t in totals(phase.slices, by)]
            lines += [table((name, *COLUMNS), rows)]
    return "\n".join(lines)


def cells(t: Total, phase: Phase, copy: float) -> list[str]:
    steps = phase.steps
    speed = t.bytes / t.net_ns if t.net_ns else 0.0
    return [
        t.name, f"{t.count / steps:g}", f"{t.ns / steps / 1e3:.1f}", f"{t.net_ns / steps / 1e3:.1f}",
        f"{t.net_ns / phase.net_ns:.1%}", f"{speed:.1f}", f"{speed * 1e9 / copy:.1%}",
        f"{t.flops / t.net_ns / 1e3:.3g}" if t.flops and t.net_ns else "-",
    ]  # fmt: skip


def as_json(profile: Profile) -> dict[str, Any]:
    found = asdict(profile)
    for phase, made in zip(profile.phases, found["phases"], strict=True):
        made["by_op"] = [asdict(t) for t in totals(phase.slices, "op")]
        made["by_layer"] = [asdict(t) for t in totals(phase.slices, "layer")]
    return found


def trace(profile: Profile) -> dict[str, Any]:
    """Chrome's trace events, times in us. The two clocks are joined where the host sees the pass end."""
    events: list[dict[str, Any]] = []
    for pid, name in ((1, f"GPU: {profile.adapter}"), (2, "host")):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
    for pid, tid, name in ((1, 1, "dispatches"), (1, 2, "layers"), (2, 1, "recorder")):
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
    zero = min((phase.host.began for phase in profile.phases), default=0.0)
    for phase in profile.phases:
        events += host_events(phase, zero) + gpu_events(phase, zero)
    facts = {"model": profile.model, "precision": profile.precision, "driver": profile.driver}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": facts}


def event(pid: int, tid: int, name: str, start_us: float, us: float, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "ts": round(start_us, 3),
        "dur": round(us, 3),
        "args": args,
    }


def host_events(phase: Phase, zero: float) -> list[dict[str, Any]]:
    h = phase.host
    parts = (
        ("record", h.began, h.recorded),
        ("submit", h.recorded, h.submitted),
        ("wait", h.submitted, h.done),
    )
    return [
        event(
            2, 1, f"{name} {phase.name}", (start - zero) * 1e6, (end - start) * 1e6, dispatches=h.dispatches
        )
        for name, start, end in parts
    ]


def gpu_events(phase: Phase, zero: float) -> list[dict[str, Any]]:
    h, slices = phase.host, phase.slices
    length = (slices[-1].start_ns + slices[-1].ns) / 1e3
    start = max((h.recorded - zero) * 1e6, (h.done - zero) * 1e6 - length)
    events, layer_start = [], 0.0
    for i, s in enumerate(slices):
        begin = start + s.start_ns / 1e3
        events.append(
            event(
                1,
                1,
                s.op,
                begin,
                s.ns / 1e3,
                kernel=s.kernel,
                layer=s.layer,
                net_us=s.net_ns / 1e3,
                bytes=s.bytes,
            )
        )
        if i == 0 or slices[i - 1].layer != s.layer:
            layer_start = begin
        if s.layer is not None and (i + 1 == len(slices) or slices[i + 1].layer != s.layer):
            events.append(event(1, 2, f"layer {s.layer}", layer_start, begin + s.ns / 1e3 - layer_start))
    return events
