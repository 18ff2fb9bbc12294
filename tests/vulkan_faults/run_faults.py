"""Loads a model and generates with it, once for every fault, all in this process; prints what each fault ended in.

Arguments: the layer's library, a model, its context, and JSON: a list of [call, number or fraction of all calls,
result], or "all". With LLAMAGPU_TEST_AHEAD=1 a software adapter is driven as a GPU is: submissions while the last one
runs, steps of a prompt in pieces, polls that do not block.
"""

import ctypes
import json
import os
import sys
from typing import Any

import llamagpu
from llamagpu.errors import LlamaGpuError
from llamagpu.gpu import recorder
from llamagpu.gpu.device import Gpu

CALLS = ("submit", "wait", "status", "allocate", "pipeline", "device")
RESULTS = ("lost", "memory")
PROMPT = "the quick brown fox jumps over the lazy dog " * 2


def generate(model: str, context: int) -> str:
    with llamagpu.load(model, context=context, chunk=16) as llama:
        return llama.complete(PROMPT, max_tokens=12, sampling=llamagpu.Sampling(temperature=0)).text


def run_fault(model: str, context: int, call: str, at: int, result: str) -> dict[str, Any]:
    """What a run with this fault ends in, and the text of the next run, which has none."""
    os.environ.update(FAULT_CALL=call, FAULT_AT=str(at), FAULT_RESULT=result)
    report: dict[str, Any] = {"call": call, "at": at, "result": result}
    try:
        report["text"] = generate(model, context)
    except LlamaGpuError as error:
        report |= {"code": error.exit_code, "cause": error.cause, "remedy": error.remedy}
    os.environ["FAULT_AT"] = "0"
    return report | {"next": generate(model, context)}


def every_fault(counts: dict[str, int]) -> list[tuple[str, int, str]]:
    return [(call, at, result) for call in CALLS for at in range(1, counts[call] + 1) for result in RESULTS]


def main() -> None:
    library, model, context, faults = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    if os.environ.get("LLAMAGPU_TEST_AHEAD") == "1":
        Gpu.software = property(lambda self: False)
        recorder.FIRST_PIECE, recorder.PIECE = 2, 4  # the model has few dispatches
    expected = generate(model, context)
    layer = ctypes.CDLL(library)
    counts = dict(zip(CALLS, (ctypes.c_long * len(CALLS)).in_dll(layer, "fault_counts"), strict=True))
    print(json.dumps({"text": expected, "counts": counts}), flush=True)
    fired = ctypes.c_long.in_dll(layer, "fault_fired")
    for call, at, result in every_fault(counts) if faults == "all" else faults:
        number = at if isinstance(at, int) else 1 + round(at * (counts[call] - 1))
        before = fired.value
        report = run_fault(model, context, call, number, result)
        report["fired"] = fired.value > before
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
