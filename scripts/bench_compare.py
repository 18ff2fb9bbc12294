#!/usr/bin/env python3
"""Compare two runs of `llamagpu bench -o jsonl` (or llama-bench's): what became slower than noise explains?

    scripts/bench_compare.py OLD.jsonl NEW.jsonl

A row counts as slower (or faster) when the means differ by more than three standard errors of both files
together and by more than --least percent. Exit status: 0 nothing is slower, 1 something is, 2 nothing in
common.
"""

import argparse
import json
import math
import sys
from pathlib import Path

SAME = ("model_type", "n_batch", "n_ubatch", "type_k", "type_v", "n_prompt", "n_gen", "n_depth", "precision")


def read(path: Path) -> dict[tuple, dict]:
    """Rows by what they measured; of several runs of one test the last counts."""
    try:
        text = path.read_text()
        whole = text.lstrip().startswith("[")  # -o json
        rows = json.loads(text) if whole else [json.loads(line) for line in text.splitlines() if line.strip()]
        return {tuple(row.get(name) for name in SAME): row for row in rows}
    except (OSError, ValueError, AttributeError) as error:
        sys.exit(f"{path}: {error}")


def test_name(row: dict) -> str:
    parts = [f"pp{row['n_prompt']}"] * (row["n_prompt"] > 0) + [f"tg{row['n_gen']}"] * (row["n_gen"] > 0)
    return "+".join(parts) + (f" @ d{row['n_depth']}" if row["n_depth"] else "")


def noise(row: dict) -> float:
    """The standard error of avg_ts; of a single run nothing is known, so a twentieth."""
    count = len(row.get("samples_ts") or [])
    return row["stddev_ts"] / math.sqrt(count) if count > 1 else row["avg_ts"] / 20


def compare(old: dict, new: dict, least: float) -> tuple[str, float, float]:
    """(verdict, change, what noise explains), both as parts of the old speed."""
    change = new["avg_ts"] / old["avg_ts"] - 1
    bar = max(3 * math.hypot(noise(old), noise(new)) / old["avg_ts"], least / 100)
    return "slower" if change < -bar else "faster" if change > bar else "same", change, bar


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
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
        verdict, change, bar = compare(before, after, args.least)
        slower += verdict == "slower"
        said = "" if verdict == "same" else verdict.upper() if verdict == "slower" else verdict
        numbers = f"{before['avg_ts']:12.2f} {after['avg_ts']:12.2f} {change:+8.1%} {bar:7.1%}"
        print(f"{before['model_type']:<30} {test_name(before):>18} {numbers} {said}".rstrip())
    for name, only in (("old", old.keys() - new.keys()), ("new", new.keys() - old.keys())):
        if only:
            print(f"{len(only)} tests are only in the {name} file", file=sys.stderr)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
