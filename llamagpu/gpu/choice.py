"""Chooses the implementation of WebGPU, wgpu or Dawn, and the adapter.

Dawn is used only if its library passed a trial in a child process: one with other struct layouts than gpu/dawn.py has
would crash. The results of trials are kept in the cache, by library, adapter and driver.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llamagpu.errors import BadArgument, LlamaGpuError, NoAdapter
from llamagpu.files.atomic import atomic_write
from llamagpu.files.cache import cache_dir
from llamagpu.gpu.adapters import in_order, select_adapter
from llamagpu.gpu.caps import Library
from llamagpu.gpu.shaders import kernel_files
from llamagpu.gpu.webgpu import Adapter, GPUError

# On an H200 Dawn reads prompts up to 2.5 times as fast as wgpu, and one sequence decodes as fast: of eight models in
# Q4_0 at 94 to 102 % of wgpu's speed, in Q4_K_M at 95 to 98 %. Kernels take as long to compile. When steps of few rows
# were fused with wgpu only, 2 sequences of 1B with their prompts got 9.3 k tokens a second of wgpu and 6.3 k of Dawn,
# 4 got 14.7 k and 12.2 k, 8 got 21.1 k and 20.4 k, 16 got 24.7 k and 28.9 k (of 8B 2.3 k and 2.1 k, 3.6 k and 3.7 k,
# 4.6 k and 5.5 k, 4.4 k and 6.9 k). Since then a step of 2 rows takes as long with both.
FEW_SEQUENCES = range(2, 4)  # `generate`, `chat` and `serve` hold 4 by default, and mostly run one
TRIAL_S = 120.0  # a first compilation on a software adapter takes seconds
DAY_S = 86400
LIBRARY = "library"  # the key of the trial of all that comes before an adapter
Listing = Callable[[Library], list[Adapter]]
REMEDY_WGPU = "use --backend wgpu"
log = logging.getLogger("llamagpu")


def list_adapters(library: Library) -> list[Adapter]:
    """All adapters of wgpu or Dawn, in order of preference."""
    if library is Library.DAWN:
        return usable_adapters()
    from llamagpu.gpu.wgpu_native import wgpu_adapters

    return in_order(wgpu_adapters())


def choose_adapter(wanted: str | None, listed: Listing = list_adapters, sequences: int = 1) -> tuple[Adapter, str]:
    """The adapter that LLAMAGPU_BACKEND and `wanted` name, and why its implementation is used.

    `sequences`: how many may share a step.
    """
    library = wanted_library()
    if library is Library.DAWN:
        if not (offered := listed(Library.DAWN)):
            select_adapter(listed(Library.WGPU), wanted)  # where there is none at all, it says what is missing
            raise NoAdapter("Dawn finds no adapter with all that it needs; wgpu may", REMEDY_WGPU)
        adapter = select_adapter(offered, wanted)
        if not (trial := adapter_trial(adapter.info)).right:
            raise NoAdapter(f"Dawn is not used on {adapter.info['device']}: {trial.why}", REMEDY_WGPU)
        return adapter, "--backend dawn"
    found = listed(Library.WGPU)
    adapter = select_adapter(found, wanted)
    if library is Library.WGPU:
        return adapter, "--backend wgpu"
    try:
        if sequences in FEW_SEQUENCES:  # Dawn need not even be loaded
            raise NoAdapter(why_for_few())
        other = same_in_dawn(adapter, found, listed)
        log.info("Dawn is used: it has matrix units on %s", other.info["device"])
        return other, "Dawn's matrix units are faster"
    except (NoAdapter, GPUError, OSError) as error:
        why = error.cause if isinstance(error, NoAdapter) else str(error)
        log.info("wgpu is used: %s", why)
        return adapter, why


def why_for_few() -> str:
    """Why wgpu is used for few sequences."""
    from llamagpu.gpu.dawn import library_path

    library_path()
    return f"auto takes wgpu for {FEW_SEQUENCES[0]} and {FEW_SEQUENCES[-1]} sequences"


def wanted_library() -> Library:
    wanted = os.environ.get("LLAMAGPU_BACKEND", Library.AUTO)
    if wanted not in list(Library):
        raise BadArgument(f"LLAMAGPU_BACKEND is {wanted!r}", f"choose {', '.join(Library)}")
    return Library(wanted)


def same_in_dawn(adapter: Adapter, found: list[Adapter], listed: Listing) -> Adapter:
    """Dawn's adapter for the same GPU as this one of wgpu's, if Dawn is faster there; NoAdapter says why not."""
    if adapter.info["adapter_type"] == "CPU":
        raise NoAdapter("a software adapter has no matrix units")
    ours = [other for other in found if gpu_key(other) == gpu_key(adapter)]
    theirs = [other for other in listed(Library.DAWN) if gpu_key(other) == gpu_key(adapter)]
    if not theirs or ours[0] is not adapter:  # of equal GPUs Dawn gives only one
        raise NoAdapter("Dawn does not offer this adapter")
    trial = adapter_trial(theirs[0].info)
    if not trial.right or not trial.faster:
        raise NoAdapter(f"Dawn is not {'faster' if trial.right else 'right'} on this adapter: {trial.why}")
    return theirs[0]


def gpu_key(adapter: Adapter) -> tuple[Any, ...]:
    return tuple(adapter.info[name] for name in ("vendor_id", "device_id", "backend_type"))


@dataclass(frozen=True, slots=True)
class Trial:
    right: bool
    faster: bool = False  # than wgpu on this adapter
    why: str = ""  # why it is not right, or not faster


def usable_adapters() -> list[Adapter]:
    """The adapters of a library whose trial passed, whatever comes of each of them."""
    from llamagpu.gpu.dawn import REMEDY_LIBRARY, dawn_adapters, library_path

    path = library_path()
    trial = trials(path)[LIBRARY]
    if not trial.right:
        raise NoAdapter(f"Dawn ({path}) is not used: {trial.why}", REMEDY_LIBRARY)
    return in_order(dawn_adapters(path))


def adapter_trial(info: Mapping[str, Any]) -> Trial:
    """The result for this adapter of Dawn; the library is tried again where there is none."""
    from llamagpu.gpu.dawn import library_path

    path, key = library_path(), adapter_key(info)
    found = trials(path)
    if key not in found:
        found = trials(path, again=True)
    return found.get(key, Trial(False, why="its trial did not find this adapter"))


def trials(path: Path, again: bool = False) -> dict[str, Trial]:
    """By adapter, from the cache if they are there; failures for a day: memory or a driver may have been the cause."""
    from llamagpu.gpu.dawn import library_digest

    file = cache_dir() / "dawn" / f"{library_digest(path)}-{binding_digest()}.json"
    known: dict[str, Trial] = {}
    with suppress(OSError, ValueError, TypeError):
        known = {key: Trial(**trial) for key, trial in json.loads(file.read_text()).items()}
        failed = not all(trial.right for trial in known.values())
        if LIBRARY in known and not again and not (failed and time.time() - file.stat().st_mtime > DAY_S):
            return known
    known |= run_trials(path)
    with suppress(OSError, LlamaGpuError):  # a cache that cannot be written is not an error
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as writer:
            writer.write(json.dumps({key: asdict(trial) for key, trial in known.items()}).encode())
    return known


@cache
def binding_digest() -> str:
    """Of the files that decide what is tried with the library: others must be tried again."""
    package = Path(__file__).parents[1]
    kernels = "linear_matrix", "tile_f16", "halves_q4", "half2", "block_scale_eight", "blocks_f16"
    # `verify` alone multiplies with strip_q6
    skinny = "linear_skinny", "strip_q4", "subgroup_barrier_none", "subgroup_barrier_workgroup"
    files = [package / name for name in ("gpu/dawn.py", "gpu/caps.py", "engine/routes.py", "verify/dawn_trial.py")]
    files += [kernel_files()[name] for name in (*kernels, *skinny, "matrix_16x8", "matrix_8x8")]
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=4).hexdigest()


def run_trials(path: Path) -> dict[str, Trial]:
    """In a child process. What it was at when it crashed is wrong."""
    command = [sys.executable, "-P", "-m", "llamagpu.verify.dawn_trial", str(path)]
    package = str(Path(__file__).parents[2])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))}
    env.pop("LLAMAGPU_MINIMUM_LIMITS", None)
    found = {LIBRARY: Trial(False)}
    try:
        child = subprocess.run(command, capture_output=True, timeout=TRIAL_S, env=env)
        output, ended = child.stdout, f"its trial ended with code {child.returncode}" if child.returncode else ""
    except subprocess.TimeoutExpired as error:
        output, ended = error.stdout or b"", f"its trial took longer than {TRIAL_S:g} s"
    for line in output.decode(errors="replace").splitlines():
        with suppress(ValueError, TypeError):  # what a driver prints
            key, trial = json.loads(line)
            found[key] = Trial(**trial)
    return {
        key: Trial(False, why=ended) if not trial.right and not trial.why else trial for key, trial in found.items()
    }


def adapter_key(info: Mapping[str, Any]) -> str:
    parts = (info["vendor_id"], info["device_id"], info["device"], info["backend_type"], info["description"])
    return hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).hexdigest()
