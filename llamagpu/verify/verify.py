"""Checks the arithmetic of an adapter: every kernel and route against float64, then a tiny model end to end.

The results are saved by adapter, driver and kernels, so that `devices` can show them.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from llamagpu.engine import routes
from llamagpu.errors import LlamaGpuError, NumericCheckFailed
from llamagpu.files.atomic import atomic_write
from llamagpu.files.cache import cache_dir
from llamagpu.gpu import shaders
from llamagpu.gpu.adapters import identity
from llamagpu.gpu.device import Gpu, first_line
from llamagpu.gpu.webgpu import GPUError
from llamagpu.verify.kernels import kernel_cases
from llamagpu.verify.model import model_cases
from llamagpu.verify.others import other_cases
from llamagpu.verify.reference import Bound, errors
from llamagpu.verify.textures import texture_cases

NO_NUMBER = float("nan")
AdapterInfo = Mapping[str, object]  # Gpu.info


@dataclass(frozen=True, slots=True)
class Check:
    kernel: str
    shape: str
    nmse: float
    worst: float
    bound: Bound
    error: str = ""  # why the kernel did not run

    @property
    def ok(self) -> bool:
        return not self.error and self.nmse <= self.bound[0] and self.worst <= self.bound[1]  # False for NaN

    def line(self) -> str:
        verdict = "ok" if self.ok else f"WRONG {self.error}"
        numbers = f"{self.nmse:9.1e} {self.bound[0]:8.0e}  {self.worst:9.1e} {self.bound[1]:8.0e}"
        return f"{self.kernel:<21} {self.shape:<62} {numbers}  {verdict}".rstrip()


HEADER = f"{'kernel':<21} {'shape':<62} {'NMSE':>9} {'bound':>8}  {'largest':>9} {'bound':>8}"


def verify(gpu: Gpu, quick: bool = False, seen: Callable[[Check], None] | None = None) -> list[Check]:
    """Run all checks, give each to `seen` when it is done, and save the results."""
    checks: list[Check] = []
    started = time.time()
    textures = texture_cases(gpu) if gpu.caps.cpu else ()  # no other adapter uses them
    for case in (*kernel_cases(gpu, quick), *other_cases(gpu), *textures, *model_cases(gpu, quick)):
        try:
            found, error = errors(*case.compare()), ""
        except (GPUError, LlamaGpuError) as failure:
            found, error = (NO_NUMBER, NO_NUMBER), first_line(failure)
        checks.append(Check(case.kernel, case.shape, *found, case.bound, error))
        if seen:
            seen(checks[-1])
    save_results(gpu.info, checks, quick, time.time() - started)
    return checks


def need_right(checks: list[Check]) -> None:
    wrong = [check for check in checks if not check.ok]
    if wrong:
        kernels = ", ".join(dict.fromkeys(check.kernel for check in wrong))
        raise NumericCheckFailed(
            f"{len(wrong)} of {len(checks)} checks are out of their bounds: {kernels}",
            "do not trust what this adapter computes; a newer driver may help",
        )


# Results of earlier runs


@dataclass(frozen=True, slots=True)
class Results:
    adapter: str
    driver: str
    kernels: str  # kernel_set()
    time: str
    seconds: float
    quick: bool
    checks: int
    wrong: list[str]


def kernel_set() -> str:
    """A digest that changes with every kernel and every route."""
    digest = hashlib.blake2b(Path(routes.__file__).read_bytes(), digest_size=6)
    for name, path in shaders.kernel_files().items():
        digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()


def results_dir() -> Path:
    return cache_dir() / "verified"


def results_path(info: AdapterInfo) -> Path:
    key = f"{identity(info)}|{kernel_set()}"
    return results_dir() / f"{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.json"


def save_results(info: AdapterInfo, checks: list[Check], quick: bool, seconds: float) -> None:
    """Save the results. A cache that cannot be written is not an error.

    A quick run that found nothing wrong says less than a whole one with the same kernels, which stays.
    """
    if quick and all(check.ok for check in checks) and (before := verified(info)) and not before.quick:
        return
    results = Results(
        adapter=str(info["device"]),
        driver=str(info["description"]),
        kernels=kernel_set(),
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        seconds=round(seconds, 1),
        quick=quick,
        checks=len(checks),
        wrong=[f"{check.kernel} {check.shape}" for check in checks if not check.ok],
    )
    with suppress(OSError, LlamaGpuError):
        results_dir().mkdir(parents=True, exist_ok=True)
        with atomic_write(results_path(info)) as file:
            file.write(json.dumps(asdict(results)).encode())


def verified(info: AdapterInfo) -> Results | None:
    """The last results for this adapter, driver and kernel set; None if `verify` has not run."""
    try:
        return Results(**json.loads(results_path(info).read_text()))
    except (OSError, ValueError, TypeError):  # not there, or damaged
        return None


def verified_line(info: AdapterInfo) -> str:
    """The last results in one line, for `devices`."""
    results = verified(info)
    if results is None:
        return "not verified with these kernels and this driver (llamagpu verify)"
    day = results.time[:10]
    if results.wrong:
        return f"{len(results.wrong)} of {results.checks} checks FAILED on {day}: {results.wrong[0]}"
    return f"verified on {day}: {results.checks} checks{' (quick)' if results.quick else ''}"
