"""Build the site from the scripts, ladder.toml, results/ and docs/:  python docs/build_site.py   (make docs)

docs/pages/ is Markdown written by hand, in which {{ ... }} (Jinja) stands for what this file computes, by the templates
in docs/parts/. Zensical makes pages of it in docs/site/, which opens from a folder on disk or a server.
"""

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, groupby
from pathlib import Path

import jinja2
import numpy as np
import unidiff
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from pygments import lex
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "dev"), str(ROOT / "measure")]
import plot  # noqa: E402
import record  # noqa: E402
import render  # noqa: E402
from ladder import PLAIN_GIT, changed_lines, read_ladder, read_toml, split  # noqa: E402

from measure import TEN  # noqa: E402

DOCS, SITE = ROOT / "docs", ROOT / "docs" / "site"
LATER = "<div>The diff of two scripts</div>"  # stands for the diff until Zensical, which would parse it, is done


@dataclass
class Line:
    """A line of a diff: its sign, its number on either side (None where it is not there), its text, that as HTML."""

    sign: str
    old: int | None
    new: int | None
    text: str
    marks: list = field(default_factory=list)  # (from, to): the characters that differ from the line it is paired with
    row: int = 0  # in its block, side by side: a pair stands in one row
    html: Markup = Markup()


@dataclass
class Block:
    """A run of lines: unchanged ones on both sides, or what went on the left and what came on the right."""

    changed: bool
    old: list
    new: list


def title(script):
    """05 compile, for speedup_05_compile.py."""
    return Path(script).stem.removeprefix("speedup_").replace("_", " ")


def page(script):
    """Where a script's page is, seen from the top of the site."""
    return f"rungs/{Path(script).stem}.html"


def pair_page(before, after):
    return f"compare/{Path(before).stem}--{Path(after).stem}.html"


def git_diff(before, after):
    """What `git diff --no-index BEFORE AFTER` prints, whatever the reader's own git is set to."""
    command = ["git", "diff", "--no-index", before, after]
    done = subprocess.run(command, cwd=ROOT, env=PLAIN_GIT, capture_output=True, encoding="utf-8")
    if done.returncode != 1:
        raise ValueError(done.stderr.strip() or f"{before} and {after} are the same")
    return done.stdout


@cache
def highlighted(source):
    """Python source as one tuple of (CSS class, text) per line."""
    lines = [[]]
    for kind, value in lex(source, PythonLexer(stripnl=False, ensurenl=False)):
        first, *others = value.split("\n")
        lines[-1].append((STANDARD_TYPES.get(kind, ""), first))
        lines += [[(STANDARD_TYPES.get(kind, ""), text)] for text in others]
    return [tuple(line) for line in lines]


@cache  # most lines stand in many diffs
def paint(tokens, marks):
    """A line's tokens as HTML, the marked characters in spans of their own."""
    html, start = "", 0
    for css, text in tokens:
        cuts = {0, len(text)} | {min(max(cut - start, 0), len(text)) for mark in marks for cut in mark}
        for a, b in zip(sorted(cuts), sorted(cuts)[1:], strict=False):
            part = escape(text[a:b])
            if any(begin <= start + a < end for begin, end in marks):
                part = Markup('<span class="word">{}</span>').format(part)
            html += Markup('<span class="{}">{}</span>').format(css, part) if css else part
        start += len(text)
    return Markup(html)


def pair(old, new):
    """Pair what went with what came, the most alike lines first; mark the words in which a pair differs."""
    words = [[re.findall(r"\w+| {4}|.", line.text) for line in side] for side in (old, new)]
    solid = [[[word for word in line if word.strip()] for line in side] for side in words]
    alike = {
        (i, j): difflib.SequenceMatcher(None, gone, come, autojunk=False).ratio()
        for i, gone in enumerate(solid[0])
        for j, come in enumerate(solid[1])
    }
    pairs = []
    for i, j in sorted(alike, key=alike.get, reverse=True):
        if alike[i, j] >= 0.6 and all((i - a) * (j - b) > 0 for a, b in pairs):  # they never cross
            pairs.append((i, j))
            mark(old[i], words[0][i], new[j], words[1][j])
    row, a, b = 1, 0, 0
    for i, j in [*sorted(pairs), (len(old), len(new))]:
        for line, place in [*zip(old[a:i], range(i), strict=False), *zip(new[b:j], range(j), strict=False)]:
            line.row = row + place
        row += max(i - a, j - b)
        for line in (*old[i : i + 1], *new[j : j + 1]):
            line.row = row
        row, a, b = row + 1, i + 1, j + 1


def mark(old, gone, new, come):
    """Mark in two lines, given as their words, what differs."""
    first = len(os.path.commonprefix([gone, come]))
    last = len(os.path.commonprefix([gone[first:][::-1], come[first:][::-1]]))
    match = difflib.SequenceMatcher(
        None, gone[first : len(gone) - last], come[first : len(come) - last], autojunk=False
    )
    for kind, a, b, c, d in match.get_opcodes():
        for line, words, begin, end in ((old, gone, a, b), (new, come, c, d)):
            if kind != "equal":
                start = len("".join(words[: first + begin]))
                line.marks.append((start, start + len("".join(words[first + begin : first + end]))))


def read_diff(text, before, after):
    """A diff of two sources as (git's header, [(a hunk's first line, its blocks)])."""
    header, hunks = text[: text.index("@@ ")], []
    sides = highlighted(before), highlighted(after)
    for hunk in unidiff.PatchSet(text)[0]:
        lines = [Line(one.line_type, one.source_line_no, one.target_line_no, one.value.rstrip("\n")) for one in hunk]
        blocks = []
        for changed, run in groupby(lines, key=lambda line: line.sign != " "):
            run = list(run)
            old, new = ([line for line in run if line.sign != sign] for sign in "+-")
            if changed:
                pair(old, new)
            blocks.append(Block(changed, old, new))
        for line in lines:
            tokens = sides[0][line.old - 1] if line.sign == "-" else sides[1][line.new - 1]
            line.html = paint(tokens, tuple(line.marks))
        hunks.append((str(hunk).split("\n", 1)[0], blocks))
    return header, hunks


def fold(hunks, docstrings):
    """Part the hunks in two: the docstring's, whose last line is given for either side, and the code's."""

    def in_docstring(line):
        return (line.old or docstrings[0] + 1) <= docstrings[0] or (line.new or docstrings[1] + 1) <= docstrings[1]

    folded, shown = [], []
    for head, blocks in hunks:
        inside, outside = [], []
        for block in blocks:
            parts = Block(block.changed, [], []), Block(block.changed, [], [])
            for side in ("old", "new"):
                for line in getattr(block, side):
                    getattr(parts[not in_docstring(line)], side).append(line)
            inside += [parts[0]] if parts[0].old or parts[0].new else []
            outside += [parts[1]] if parts[1].old or parts[1].new else []
        if inside and not any(block.changed for block in outside):
            inside, outside = blocks, []
        folded += [(head, inside)] if inside else []
        shown += [("" if inside else head, outside)] if outside else []
    return folded, shown


class Site:
    """What the pages call. One method per {{ ... }}."""

    def __init__(self):
        self.rungs = read_ladder()
        self.results = {folder.name: record.read(folder / "ladder.json") for folder in render.newest()}
        if not self.results:
            raise ValueError("results/ holds no finished measurement: make ladder")
        self.first = next(iter(self.results))
        self.logged = next((name for name in self.results if self.worked(self.row(name, "baseline.py"))), self.first)
        self.no_gpu = render.no_gpu(self.results.values())
        loader = jinja2.FileSystemLoader([DOCS, DOCS / "pages"])
        options = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
        self.jinja = jinja2.Environment(loader=loader, autoescape=lambda name: name.endswith(".html"), **options)
        self.jinja.globals.update(
            site=self,
            files=[rung.file for rung in self.rungs],
            title=title,
            page=page,
            pair_page=pair_page,
            changed_lines=changed_lines,
            later=LATER,
        )

    def part(self, name, **values):
        return self.jinja.get_template(f"parts/{name}.html").render(**values)

    def source(self, script):
        return (ROOT / script).read_text(encoding="utf-8")

    def listing(self, script):
        """A whole script, syntax-coloured."""
        lines = highlighted(self.source(script).rstrip("\n"))
        return self.part("listing", script=script, lines=[paint(tokens, ()) for tokens in lines])

    def diff(self, before, after):
        """The diff of two scripts, inline and side by side, with the docstring's folded away."""
        sources = [self.source(script) for script in (before, after)]
        header, hunks = read_diff(git_diff(before, after), *sources)
        folded, shown = fold(hunks, [split(source)[0].count("\n") for source in sources])
        counts = changed_lines(before, after)
        return self.part("diff", header=header, folded=folded, shown=shown, before=before, after=after, counts=counts)

    def commands(self, rung):
        """How to run a script, and how to see its diff in a terminal."""
        docstring = split(self.source(rung.file))[0]
        several = re.search(r"^ +(torchrun .*?)(?:  .*)?$", docstring, re.MULTILINE)
        lines = ["source .venv/bin/activate  # made by make run", several[1] if several else f"python {rung.file}"]
        if rung.before:
            lines.append(f"make diff-{rung.number}")
        return "```bash\n" + "\n".join(lines) + "\n```"

    def mistakes(self, kind):
        """The mistakes of a kind, from dev/mistakes.toml, each with the diff that plants it."""
        parts = []
        for mistake in read_toml("dev/mistakes.toml")[kind]:
            name, harm, file = mistake["name"], mistake["harm"], mistake["file"]
            right = wrong = self.source(file)
            for old, new in mistake["edits"]:
                if wrong.count(old) != 1:
                    raise ValueError(f"dev/mistakes.toml: {name}: {file} has not got its lines once")
                wrong = wrong.replace(old, new)
            diff = list(difflib.unified_diff(right.splitlines(), wrong.splitlines(), n=0, lineterm=""))[2:]
            name = name if "_" in name.split()[0] else name[0].upper() + name[1:]
            parts.append(f'??? quote "{name}. {harm[0].upper()}{harm[1:]}."\n\n    In `{file}`:\n\n    ```diff\n')
            parts += [f"    {line}\n" for line in diff if not line.startswith("@@")]
            parts.append(f"    ```\n\n    Caught by `tests/{mistake['check'].format(script=file)}`\n\n")
        return "".join(parts)

    def label(self, name):
        data = self.results[name]
        device, settings = data["machine"], data["settings"]
        return f"{'CPU: ' if device['device'] == 'cpu' else ''}{device['name']}, {settings['model']}"

    def conditions(self, data):
        return " ".join(render.conditions(data))

    def batches(self, data):
        return render.batch_cells(data)

    def row(self, name, script):
        """What was measured of a script in one of the results, or None."""
        return next((row for row in self.results[name]["rows"] if row["name"] == script), None)

    def worked(self, row):
        return bool(row and row["median_ms"])

    def good(self, row):
        """The runs of a row that came to their end."""
        return [run for run in row["runs"] if not run["error"]]

    def predictions(self, script):
        """What results/predictions.toml says of a script, beside what was measured since, a sentence each."""
        said = []
        for p in read_toml("results/predictions.toml")["prediction"]:
            if not (expected := p["ms"].get(script)):
                continue
            low, high = expected
            where = f"{p['device']}, B {p['batch_size']}, T {p['seq_len']}"
            what = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            found = self.measured_ms(script, p)
            if found is None:
                result = "not measured yet"
            else:
                miss = found / high - 1 if found > high else min(0, found / low - 1)
                result = f"measured: {found:,.1f} ms, {f'{miss:+.0%}' if abs(miss) > 0.005 else 'as predicted'}"
            said.append(f"Predicted on {p['date']} for {where}: {what} ms per step; {result}.")
        return said

    def measured_ms(self, script, prediction):
        """The newest median step on the device, model, B and T of a prediction, or None."""
        found = []
        for data in map(record.read, (ROOT / "results").glob("*/ladder.json")):
            settings = data["settings"]
            here = data["machine"]["name"], settings["model"], settings["seq_len"]
            if here == (prediction["device"], prediction["model"], prediction["seq_len"]):
                found += [(data, settings["batch_size"], row) for row in data["rows"] if row["name"] == script]
                cells = [cell for cell in data["batches"] if script == TEN and cell["compile_mode"] == "default"]
                found += [(data, cell["batch_size"], cell) for cell in cells]
        times = [(d["finished"] or "", one["median_ms"]) for d, b, one in found if b == prediction["batch_size"]]
        return max((time for time in times if time[1]), key=lambda time: time[0], default=(None, None))[1]

    def measured(self, script, **predicted):
        """What was predicted for a script (speed, memory, loss) beside what was measured, with plots."""
        rung = next(rung for rung in self.rungs if rung.file == script)
        found = []
        for name in self.results:
            rows = [self.row(name, file) for file in (rung.before, script) if file]
            plots = self.plots(name, [row for row in rows if self.worked(row)]) if self.worked(rows[-1]) else []
            found.append((name, self.findings(name, rows[-1], rows[0] if rung.before else None), plots))
        return self.part("measured", predicted=predicted, found=found, predictions=self.predictions(script))

    def findings(self, name, row, before):
        """What was measured of a row, and of the one before it if there is one, in words."""
        if not self.worked(row):
            return {"speed": row["error"] if row else "not measured", "memory": "not measured", "loss": "not measured"}
        data, before = self.results[name], before if self.worked(before) else None
        speed = f"{row['median_ms']:,.1f} ms per step, {row['tokens_per_s']:,.0f} tokens/s"
        if row["roof_share"] is not None:
            speed += f", {row['roof_share']:.0%} of the roof"
        if before:
            ratio = row["over_before"] if row["before"] == before["name"] else None
            speed = f"from {before['median_ms']:,.1f} to {row['median_ms']:,.1f} ms per step"
            speed = f"{render.times(ratio)}, {speed}" if ratio else speed
            if ratio and ratio["low"] < 1 < ratio["high"]:
                speed += ". The passes lie on both sides of 1: nothing was shown"
            roofs = data["roof"] and [data["roof"]["ceilings_tflops"].get(one["precision"]) for one in (before, row)]
            if roofs and all(roofs) and row["precision"] != before["precision"]:
                speed += f". The measured roof is {roofs[1] / roofs[0]:.2f} times as high"
        if data["settings"]["repeat"] == 1:
            speed += ". One pass: nothing is known of the spread"
        if row["error"]:
            speed += f". A pass failed: {row['error']}"
        both = [one for one in (before, row) if one]
        memory = " to ".join(f"{one['peak_memory_gib']:.2f}" for one in both if one["peak_memory_gib"])
        whose = "of the process" if data["machine"]["device"] == "cpu" else "of the GPU's allocator"
        memory = f"{memory} GiB {whose}" if memory else "not measured"
        if row["fit"] and row["fit"].get("batch_size"):
            memory += f". The largest batch that ran was B {row['fit']['batch_size']}"
        losses = [self.good(one)[0]["losses"] for one in both]
        loss = f"{' to '.join(f'{one[-1]:.4f}' for one in losses)} after {len(losses[-1])} steps"
        return {"speed": speed, "memory": memory, "loss": loss}

    def plots(self, name, rows):
        """Of a script and the one before it: each step's time, the loss, where the time goes. [(alt text, SVG)]"""
        names, spread, made = [title(row["name"]) for row in rows], np.random.default_rng(0), []

        def axes(text, values):
            figure = Figure(figsize=(4.2, 2.7), layout="constrained", facecolor="none")
            axes = figure.add_subplot(facecolor="none")
            axes.spines[["top", "right"]].set_visible(False)
            made.append((f"{text} of {' and '.join(names)}: {' and '.join(values)}", figure))
            return axes

        times = axes("Time per step", [f"{row['median_ms']:,.1f} ms" for row in rows])
        losses = axes("Loss", [f"{self.good(row)[0]['losses'][-1]:.4f} at the last step" for row in rows])
        for place, row in enumerate(rows):
            steps = np.concatenate([record.steady(run["times_ms"]) for run in self.good(row)])
            colour = (render.RUNG, render.PEER)[place]
            times.plot(
                steps, place + spread.uniform(-0.25, 0.25, len(steps)), "o", color=colour, markersize=3, alpha=0.6
            )
            times.plot([row["median_ms"]] * 2, [place - 0.35, place + 0.35], color=render.INK)
            losses.plot(self.good(row)[0]["losses"], color=colour, linestyle=("-", "--")[place], label=names[place])
        times.set_xlabel("milliseconds per step; line: median")
        times.set_xlim(left=0)
        losses.set_xlabel("step")
        losses.set_ylabel("loss, nats per token")
        losses.legend(frameon=False)
        groups = [row["profile"]["groups_ms"] for row in rows if row["profile"]]
        if len(groups) == len(rows) and all(groups):
            sums = [", ".join(f"{kind} {ms:.0f} ms" for kind, ms in group.items()) for group in groups]
            kinds = axes("Where the time goes", sums)
            for kind, colour in render.GROUPS.items():
                left = [sum(list(group.values())[: list(group).index(kind)]) for group in groups]
                kinds.barh(names, [group[kind] for group in groups], left=left, color=colour, label=kind, height=0.6)
            kinds.set_xlabel("milliseconds per step, under the profiler")
            kinds.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.3))
            kinds.invert_yaxis()
        times.set_yticks(range(len(rows)), names)
        times.invert_yaxis()
        return [(text, self.inline(figure, f"{name}{text}")) for text, figure in made]

    def inline(self, figure, salt):
        """A figure as SVG to stand in a page, in the colours of its text."""
        with render.matplotlib.rc_context({"svg.hashsalt": salt}):
            text = render.svg(figure)
        text = text[text.index("<svg") :].replace(render.INK, "currentColor")
        text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)  # a style is the page's
        text = re.sub(r'<g id="[^"]*"', "<g", text)  # a page has several figures
        return Markup(re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2))

    def run(self, name):
        """A run of pretrain/train.py in results/: machine, losses as a plot and a table, samples."""
        folder = ROOT / "results" / name
        machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
        rows = plot.read(folder / "log.jsonl")
        evaluations = [row for row in rows if "val_loss" in row]
        steps, losses = plot.curve(rows, "loss")
        for before, row in zip(evaluations, evaluations[1:], strict=False):
            row["mean_loss"] = losses[(steps >= before["step"]) & (steps < row["step"])].mean()
        best = min(evaluations, key=lambda row: row["val_loss"])
        picture = self.inline(plot.draw({"this run": rows}, paper="none"), name)
        return self.part("run", machine=machine, evaluations=evaluations, best=best, picture=picture)

    def log(self):
        """The first and last lines that baseline.py printed in one of the results."""
        row, settings = self.row(self.logged, "baseline.py"), self.results[self.logged]["settings"]
        tokens = settings["batch_size"] * settings["seq_len"]
        run = self.good(row)[0]
        steps = list(enumerate(zip(run["losses"], run["times_ms"], strict=True)))
        lines = [
            f"step {step:4d} | loss {loss:.6f} | dt {ms:8.2f} ms | {1000 * tokens / ms:10,.0f} tok/s"
            for step, (loss, ms) in steps
        ]
        return "\n".join([*lines[:3], "...", *lines[-2:]])

    def write(self, folder):
        """Every page as Markdown, and Zensical's configuration."""
        pages = folder / "pages"
        shutil.copytree(DOCS / "pages", pages)
        rungs = {f"rungs/{Path(rung.file).stem}.md": rung for rung in self.rungs}
        if missing := [name for name in rungs if not (pages / name).exists()]:
            raise ValueError(f"docs/pages/{missing[0]} is missing")
        for path in sorted(pages.rglob("*.md")):
            name = path.relative_to(pages).as_posix()
            if name.startswith("rungs/") and name not in rungs:
                raise ValueError(f"docs/pages/{name} is of no rung in ladder.toml")
            path.write_text(self.jinja.get_template(f"pages/{name}").render(rung=rungs.get(name)), encoding="utf-8")
        (pages / "compare").mkdir()
        for before, after in combinations(self.rungs, 2):
            text = self.part("compare", before=before.file, after=after.file)
            (pages / pair_page(before.file, after.file)).with_suffix(".md").write_text(text, encoding="utf-8")
        config = self.jinja.get_template("zensical.toml").render()
        (folder / "zensical.toml").write_text(config, encoding="utf-8")


def search_from_disk(site):
    """A browser starts no worker from a file on disk, only from text that it has: give it the search's own."""
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    script = (site / "assets" / "iframe-worker.js").read_text(encoding="utf-8")
    text = script.replace('"SOURCE"', json.dumps(worker.read_text(encoding="utf-8")))
    (site / "assets" / "iframe-worker.js").write_text(text, encoding="utf-8")


def build(target=SITE):
    """Make the site. Raises ValueError, and leaves the one that was there, if it cannot be made."""
    with tempfile.TemporaryDirectory() as folder:
        print("1/3  filling in the pages", flush=True)
        folder = Path(folder)
        site = Site()
        site.write(folder)
        if not (zensical := shutil.which("zensical", path=Path(sys.executable).parent)):
            raise ValueError("Zensical is not installed: it takes Python 3.11 or later")
        print("2/3  Zensical turns them into HTML; this takes longest", flush=True)
        done = subprocess.run([zensical, "build", "--strict"], cwd=folder, capture_output=True, encoding="utf-8")
        if done.returncode or not (folder / "site" / "index.html").exists():
            said = re.sub(r"\x1b\[[\d;]*m", "", done.stderr).partition("Traceback")[0]
            raise ValueError(f"zensical: {said or done.stderr}")
        print("3/3  writing the diff of every two scripts", flush=True)
        for before, after in combinations([rung.file for rung in site.rungs], 2):
            path = folder / "site" / pair_page(before, after)
            text = path.read_text(encoding="utf-8").replace(LATER, site.diff(before, after))
            path.write_text(text, encoding="utf-8")
        search_from_disk(folder / "site")
        (folder / "site" / "404.html").unlink()  # it would look for its style at the top of the server
        (folder / "site" / ".nojekyll").touch()  # GitHub Pages: serve the folder as it is
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder / "site", target)


if __name__ == "__main__":
    try:
        build()
    except (OSError, ValueError, jinja2.TemplateError, subprocess.SubprocessError) as error:
        sys.exit(f"build_site.py: error: {' '.join(str(error).split())}")
    print(f"{SITE.relative_to(ROOT)}/index.html: open it in a browser")
