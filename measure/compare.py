"""Two measurements side by side:  python measure/compare.py results/FOLDER results/FOLDER

Prints, for each script that both have, its milliseconds per step (quartiles), how many times as fast the second is, and
whether the two interquartile ranges touch: if they do, the difference may be noise.
"""

import argparse
from pathlib import Path

from record import read
from render import commits, plain

SAME = ("device", "model", "batch_size", "seq_len")


def table(first, second):
    """The rows of the comparison, the head first."""
    head = [
        "script",
        "first, ms per step (quartiles)",
        "second, ms per step (quartiles)",
        "times as fast",
        "ranges touch",
    ]
    rows, others = [head], {row["name"]: row for row in second["rows"]}
    for row in first["rows"]:
        other = others.get(row["name"])
        if not (other and row["median_ms"] and other["median_ms"]):
            continue
        times = [
            f"{one['median_ms']:,.1f} ({one['quartiles_ms'][0]:,.1f}–{one['quartiles_ms'][1]:,.1f})"
            for one in (row, other)
        ]
        (low, high), (other_low, other_high) = row["quartiles_ms"], other["quartiles_ms"]
        touch = "yes" if low <= other_high and other_low <= high else "no"
        rows.append([row["name"], *times, f"{row['median_ms'] / other['median_ms']:.2f}×", touch])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    args = parser.parse_args()
    try:
        first, second = (read(folder / "ladder.json") for folder in (args.first, args.second))
        differ = [key for key in SAME if first["settings"][key] != second["settings"][key]]
        if differ:
            raise ValueError(f"the two differ in {', '.join(differ)}: their steps cannot be compared")
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    about = []
    for name, folder, data in (("first", args.first, first), ("second", args.second, second)):
        machine = data["machine"]
        about.append(
            f"{name}: {folder}, {machine['name']} {machine['capability']}, torch {machine['torch']}. {commits(data)}."
        )
    other = [key for key, value in first["machine"].items() if value != second["machine"][key]]
    if other:
        about.append(f"They differ in {', '.join(other)}: more than the scripts may have made the difference.")
    print(plain(*about, table(first, second)), end="")


if __name__ == "__main__":
    main()
