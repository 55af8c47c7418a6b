"""Write the README's table of scripts from ladder.toml and the scripts:  python dev/readme.py   (make readme)"""

import sys

from ladder import ROOT, changed_lines, read_ladder

BEGIN, END = "<!-- the ladder, written by `make readme` from ladder.toml -->\n", "<!-- end of the ladder -->\n"
HEAD = """
| file | kind | idea | lines | why it helps | when it does not |
| --- | --- | --- | --- | --- | --- |
"""


def with_table(readme):
    """The README's text with the table as it is now."""
    rows = []
    for rung in read_ladder():
        lines = ""
        if rung.before:
            added, removed = changed_lines(rung.before, rung.file)
            lines = f"+{added} −{removed} in {', '.join(f'`{name}`' for name in rung.touches)}"
        cells = f"[`{rung.file}`]({rung.file})", rung.kind, rung.idea, lines, rung.why, rung.when_not
        rows.append(f"| {' | '.join(cells)} |\n")
    start, end = readme.index(BEGIN) + len(BEGIN), readme.index(END)
    return readme[:start] + HEAD + "".join(rows) + "\n" + readme[end:]


if __name__ == "__main__":
    path = ROOT / "README.md"
    try:
        readme = with_table(path.read_text(encoding="utf-8"))
        path.write_text(readme, encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"readme.py: error: {error}")
