#!/usr/bin/env python3
"""scripts/convert.py ARGS is `llamagpu convert ARGS`. It needs the packages that `scripts/run` installs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from llamagpu.cli.main import main

sys.argv.insert(1, "convert")
main()
