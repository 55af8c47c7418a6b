"""Compare two measurements:  python measure/compare.py results/FOLDER results/FOLDER

For each script in both measurements, this program prints the two median step times with their quartiles, and the
speed-up of the second measurement over the first. It also prints whether the two interquartile ranges overlap. If they
do, the difference between the step times may be noise.
"""

import argparse
from pathlib import Path

from record import read
from render import part, plain, step

SAME = ("device", "model", "batch_size", "seq_len")


def cells(first, second):
    """Return a table of the scripts in both measurements: a list of rows, each a dict of heading -> cell."""
    others = {row["name"]: row for row in second["rows"] if row["median_ms"]}
    table = []
    for row in first["rows"]:
        other = others.get(row["name"])
        if not (other and row["median_ms"]):
            continue
        (low, high), (other_low, other_high) = row["quartiles_ms"], other["quartiles_ms"]
        table.append(
            {
                "script": row["name"],
                "first, ms per step (quartiles)": step(row),
                "second, ms per step (quartiles)": step(other),
                "times as fast": f"{row['median_ms'] / other['median_ms']:.2f}×",
                "ranges overlap": "yes" if low <= other_high and other_low <= high else "no",
            }
        )
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    args = parser.parse_args()
    try:
        first, second = (read(folder / "ladder.json") for folder in (args.first, args.second))
        differ = [key for key in SAME if first["settings"][key] != second["settings"][key]]
        if differ:
            raise ValueError(f"the measurements differ in {', '.join(differ)}: their step times are not comparable")
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    sides = ("first", args.first, first), ("second", args.second, second)
    differ = [key for key, value in first["machine"].items() if value != second["machine"][key]]
    table = cells(first, second)
    print(plain(part("compare.txt", sides=sides, differ=differ, table=table).splitlines(), table), end="")


if __name__ == "__main__":
    main()
