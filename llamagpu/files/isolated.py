"""The command that runs a module in a process of its own, which cannot harm this one."""

import importlib.util
import sys
from pathlib import Path


def isolated_python(module: Path, *packages: str) -> list[str]:
    """Run the module's `main` with the standard library, `packages` and nothing else: no environment, no site-packages.

    Its own package is not imported: a start takes 20 ms, and the time of `packages`.
    """
    found = [importlib.util.find_spec(name) for name in packages]
    folders = [Path(spec.origin).parents[1] for spec in found if spec and spec.origin]
    start = f"import sys; sys.path += sys.argv[1:]; from {module.stem} import main; main()"
    return [sys.executable or "python3", "-I", "-S", "-c", start, *map(str, folders), str(module.parent)]
