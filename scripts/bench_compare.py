#!/usr/bin/env python3
"""Compare two runs of `llamagpu bench -o jsonl` (or llama-bench's) and report what changed by more than noise.

    scripts/bench_compare.py OLD.jsonl NEW.jsonl

A row counts as slower (or faster) when the means differ by more than three standard errors of both files together and
by more than --least percent. Exit status: 0 nothing is slower, 1 something is, 2 nothing in common.
"""

import argparse
import json
import math
import sys
from pathlib import Path

KEY = ("model_type", "n_batch", "n_ubatch", "type_k", "type_v", "n_prompt", "n_gen", "n_depth", "precision")


def read(path: Path) -> dict[tuple, dict]:
    """Rows by what they measured. If a test ran several times, the last run counts."""
    try:
        text = path.read_text()
        is_json = text.lstrip().startswith("[")  # -o json, not jsonl
        rows = json.loads(text) if is_json else [json.loads(line) for line in text.splitlines() if line.strip()]
        return {tuple(row.get(name) for name in KEY): row for row in rows}
    except (OSError, ValueError, AttributeError) as error:
        sys.exit(f"{path}: {error}")


def test_name(row: dict) -> str:
    parts = [f"pp{row['n_prompt']}"] * (row["n_prompt"] > 0) + [f"tg{row['n_gen']}"] * (row["n_gen"] > 0)
    return "+".join(parts) + (f" @ d{row['n_depth']}" if row["n_depth"] else "")


def noise(row: dict) -> float:
    """The standard error of avg_ts. That of a single repetition is not known: a twentieth is assumed."""
    count = len(row.get("samples_ts") or [])
    return row["stddev_ts"] / math.sqrt(count) if count > 1 else row["avg_ts"] / 20


def compare(old: dict, new: dict, least: float) -> tuple[str, float, float]:
    """(verdict, change, change that noise explains), both as fractions of the old speed."""
    change = new["avg_ts"] / old["avg_ts"] - 1
    threshold = max(3 * math.hypot(noise(old), noise(new)) / old["avg_ts"], least / 100)
    return "slower" if change < -threshold else "faster" if change > threshold else "same", change, threshold


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--least", type=float, default=1.0, help="percent below which no change counts [1]")
    args = parser.parse_args()
    old, new = read(args.old), read(args.new)
    shared = [key for key in old if key in new]
    if not shared:
        print("the two files have no test in common", file=sys.stderr)
        return 2
    slower = 0
    print(f"{'model':<30} {'test':>18} {'old t/s':>12} {'new t/s':>12} {'change':>8} {'noise':>7}")
    for key in shared:
        before, after = old[key], new[key]
        verdict, change, threshold = compare(before, after, args.least)
        slower += verdict == "slower"
        mark = {"same": "", "slower": "SLOWER"}.get(verdict, verdict)
        numbers = f"{before['avg_ts']:12.2f} {after['avg_ts']:12.2f} {change:+8.1%} {threshold:7.1%}"
        print(f"{before['model_type']:<30} {test_name(before):>18} {numbers} {mark}".rstrip())
    for name, only in (("old", old.keys() - new.keys()), ("new", new.keys() - old.keys())):
        if only:
            print(f"{len(only)} tests are only in the {name} file", file=sys.stderr)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
