"""Install packages with pip, and print little output:  .venv/bin/python -m dev.install requirements.txt

On a terminal, you see the progress of downloads of 100 MB or more. If pip fails, you see all of its output.
"""

import re
import subprocess
import sys

LARGE = 100  # MB


def install(*arguments):
    """Run `pip install` in this Python's environment and return its exit status."""
    command, printed, name = [sys.executable, "-m", "pip", "install", *arguments], [], ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        for line in pip.stdout:
            if not (sizes := re.match(r"Progress (\d+) of (\d+)", line)):
                printed.append(line)
                if line.startswith("Installing collected packages"):
                    print("pip has downloaded the packages and is installing them", flush=True)
                if file := re.match(r" *Downloading (?:\S*/)?(\w+-[\w.]+)", line):
                    name = file[1]
                continue
            done, total = (int(size) / 1e6 for size in sizes.groups())
            if total >= LARGE and (sys.stdout.isatty() or done == total):
                print(f"\r{name}: {done:.0f} of {total:.0f} MB", end="\n" if done == total else "", flush=True)
    if pip.returncode:
        print(*printed, sep="", end="", file=sys.stderr)
    return pip.returncode


def main():
    try:  # older versions of pip cannot report their progress to a program
        sys.exit(install("--quiet", "pip>=24.1") or install("--progress-bar=raw", "-r", sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
