"""The folder for what can be fetched or computed again."""

import os
from pathlib import Path


def cache_dir() -> Path:
    import platformdirs  # here: `--help` and `-m FILE` do not need it

    folder = os.environ.get("LLAMAGPU_CACHE")
    return Path(folder).expanduser() if folder else Path(platformdirs.user_cache_dir("llamagpu", False))
