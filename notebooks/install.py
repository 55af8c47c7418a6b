"""Install the packages that the notebooks need and this environment lacks:  python notebooks/install.py

Colab and Kaggle provide most of these packages, in other versions than ours, such as PyTorch for their driver. Packages
that are already there keep their versions.
"""

import importlib.metadata
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ["torch", "tiktoken", "numpy", "transformers", "jinja2", "pygments", "unidiff"]
NEEDED += ["tomli"] if sys.version_info < (3, 11) else []


def version(name):
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version):
    """Return the first two numbers of a version, such as (2, 7) for 2.7.1+cu126."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def main():
    minima = dict(re.findall(r'"([\w-]+)>=([\w.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    for name in filter(version, NEEDED):
        if numbers(version(name)) < numbers(minima[name]):
            print(f"{name} {version(name)} is older than {minima[name]}, so some scripts may fail")
    missing = [f"{name}>={minima[name]}" for name in NEEDED if not version(name)]
    if not missing:
        print("nothing to install")
        return
    print(f"installing {', '.join(missing)}", flush=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kept.txt"  # without it, pip could replace NumPy to suit a package that it installs
        kept.write_text("".join(f"{name}=={version(name)}\n" for name in NEEDED if version(name)), encoding="utf-8")
        words = [sys.executable, "-m", "pip", "install", "-qq", "--constraint", kept, *missing]
        done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr}install.py: error: pip could not install {', '.join(missing)}")
    print(f"done in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
