"""Is the arithmetic of this adapter right? Every kernel and route against float64, then a tiny model end to
end. What was found is kept by adapter, driver and kernels, so that `devices` can show it."""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wgpu

from llamagpu.errors import LlamaGpuError, NumericCheckFailed
from llamagpu.gpu import routes, shaders
from llamagpu.gpu.device import Gpu, first_line
from llamagpu.tools.models import cache_dir
from llamagpu.tools.oracle import Bound, errors
from llamagpu.tools.verify_images import image_cases
from llamagpu.tools.verify_kernels import kernel_cases
from llamagpu.tools.verify_model import model_cases
from llamagpu.tools.verify_others import other_cases

NO_NUMBER = float("nan")


@dataclass(frozen=True, slots=True)
class Check:
    kernel: str
    shape: str
    nmse: float
    worst: float
    bound: Bound
    error: str = ""  # the kernel did not even run

    @property
    def ok(self) -> bool:
        return not self.error and self.nmse <= self.bound[0] and self.worst <= self.bound[1]  # False for NaN

    def line(self) -> str:
        verdict = "ok" if self.ok else f"WRONG {self.error}"
        numbers = f"{self.nmse:9.1e} {self.bound[0]:8.0e}  {self.worst:9.1e} {self.bound[1]:8.0e}"
        return f"{self.kernel:<17} {self.shape:<62} {numbers}  {verdict}".rstrip()


HEADER = f"{'kernel':<17} {'shape':<62} {'NMSE':>9} {'bound':>8}  {'largest':>9} {'bound':>8}"


def verify(gpu: Gpu, quick: bool = False, seen: Callable[[Check], None] | None = None) -> list[Check]:
    """All checks, each shown to `seen` as it is done; what came out of them is kept."""
    checks, started = [], time.time()
    images = image_cases(gpu) if gpu.caps.cpu else ()  # no other adapter uses them
    for case in (*kernel_cases(gpu, quick), *other_cases(gpu), *images, *model_cases(gpu, quick)):
        try:
            found, error = errors(*case.compare()), ""
        except (wgpu.GPUError, LlamaGpuError) as failure:
            found, error = (NO_NUMBER, NO_NUMBER), first_line(failure)
        checks.append(Check(case.kernel, case.shape, *found, case.bound, error))
        if seen:
            seen(checks[-1])
    keep(gpu.info, checks, quick, time.time() - started)
    return checks


def need_right(checks: list[Check]) -> None:
    wrong = [check for check in checks if not check.ok]
    if wrong:
        kernels = ", ".join(dict.fromkeys(check.kernel for check in wrong))
        raise NumericCheckFailed(
            f"{len(wrong)} of {len(checks)} checks are out of their bounds: {kernels}",
            "do not trust what this adapter computes; a newer driver may help",
        )


# What was found before


def kernel_set() -> str:
    """Changes with every kernel and every route."""
    digest = hashlib.blake2b(Path(routes.__file__).read_bytes(), digest_size=6)
    for name, path in shaders.kernel_files().items():
        digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()


def entry_name(info: dict[str, Any]) -> str:
    parts = (info["device"], info["backend_type"], info["description"], kernel_set())
    return hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).hexdigest()


def results_dir() -> Path:
    return cache_dir() / "verified"


def keep(info: dict[str, Any], checks: list[Check], quick: bool, seconds: float) -> None:
    """A cache that cannot be written is no reason to fail."""
    found = {
        "adapter": info["device"],
        "driver": info["description"],
        "kernels": kernel_set(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(seconds, 1),
        "quick": quick,
        "checks": len(checks),
        "wrong": [f"{check.kernel} {check.shape}" for check in checks if not check.ok],
    }
    try:
        results_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=results_dir(), delete=False) as file:
            json.dump(found, file)
        os.replace(file.name, results_dir() / f"{entry_name(info)}.json")
    except OSError:
        return


def verified(info: dict[str, Any]) -> dict[str, Any] | None:
    """What `verify` last found on this adapter with this driver and these kernels; None: never run."""
    try:
        found = json.loads((results_dir() / f"{entry_name(info)}.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def verified_line(info: dict[str, Any]) -> str:
    """For `devices`."""
    found = verified(info)
    if found is None:
        return "not verified with these kernels and this driver (llamagpu verify)"
    if found["wrong"]:
        failed = f"{len(found['wrong'])} of {found['checks']} checks FAILED"
        return f"{failed} on {found['time'][:10]}: {found['wrong'][0]}"
    return f"verified on {found['time'][:10]}: {found['checks']} checks{' (quick)' if found['quick'] else ''}"
