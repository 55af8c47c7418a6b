"""Programs that measure the ladder. Run them from the repository's root: python -m measure.run. See README.md."""

import importlib.util
import sys

for package in "cpuinfo matplotlib numpy pandas psutil pynvml rich torch".split():
    if not importlib.util.find_spec(package):
        sys.exit(f"measure: error: {package} is not installed: pip install -r requirements-dev.txt")
