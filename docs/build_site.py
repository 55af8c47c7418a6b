"""Build the site from the scripts, ladder.toml, results/ and docs/:  python -m docs.build_site   (make docs)

docs/pages/ contains handwritten Markdown with Jinja calls of the form <!-- {{ ... }} -->. This program replaces each
call with generated text, using the templates in docs/parts/. Zensical then converts the pages to HTML in docs/site/.
You can open the site from disk or serve it.
"""

import difflib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path

import jinja2
import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from dev.ladder import ROOT, changed_lines, read_ladder, read_toml, title
from docs.diffs import highlighted, paint, read_diff, source
from measure import counts, plots, records, tables

DOCS, SITE = ROOT / "docs", ROOT / "docs" / "site"
TOPICS = (  # topics of the mistakes, in the order in which the page lists them
    "Model and attention",
    "Initialization and weights",
    "Data",
    "Training loop, optimizer and schedule",
    "Mixed precision",
    "Compilation and kernels",
    "Gradient accumulation and distributed training",
    "Checkpoints and evaluation",
    "Timing and comparisons",
    "Peaks, profiles and plots",
    "Files and messages",
)
LATER = "<div>The diff of two scripts</div>"  # the diff is inserted later, because Zensical would parse it


def page(script):
    """Return the path of a script's page, relative to the root of the site."""
    return f"rungs/{Path(script).stem}.html"


def pair_page(before, after):
    return f"compare/{Path(before).stem}--{Path(after).stem}.html"


def in_page(svg):
    """Return an SVG file's text with its lines and letters in the text colour of the page."""
    text = svg[svg.index("<svg") :].replace(plots.INK, "currentColor").replace("fill: #ffffff", "fill: none")
    # Styles are removed, because they would affect the whole page.
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # remove these ids, which would not be unique on a page
    return re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)


PICTURE = re.compile(
    r'<picture>\n<source media="[^"]+" srcset="(?P<narrow>[^"]+)">\n<img alt="(?P<alt>[^"]+)" src="(?P<wide>[^"]+)">\n'
    r"</picture>|!\[(?P<text>[^]]+)\]\((?P<one>img/[^)]+\.svg)\)"
)


def with_figures(markdown):
    """Return a page with its pictures inlined, because image files cannot follow the theme that the reader chose."""

    def figure(alt, name, where=""):
        svg = in_page((DOCS / "pages" / name).read_text(encoding="utf-8"))
        svg = re.sub(r'( id="|url\(#|href="#)', rf"\1{Path(name).stem}-", svg)  # ids must be unique on a page
        return f'<figure class="{where}" role="img" aria-label="{escape(alt)}">{svg}</figure>'

    def figures(found):
        if found["one"]:
            shown = figure(found["text"], found["one"])
        else:
            shown = figure(found["alt"], found["wide"], "wide") + figure(found["alt"], found["narrow"], "narrow")
        return f'<div class="plots whole" data-search-exclude>\n{shown}\n</div>'

    return PICTURE.sub(figures, markdown)


# The first alternatives match text that must not be linked: code blocks, headings, summaries and existing links.
NAMED = re.compile(
    r"^ *```.*?^ *```|^#.*?$|<summary>.*?</summary>|\[[^]\n]*\]\([^)]*\)"
    r"|`(?P<file>(?:\w+/)*[\w-]+\.(?:py|ipynb|sbatch|toml))`",
    re.MULTILINE | re.DOTALL,
)


def with_files(markdown, name):
    """Return a page in which the first mention of each project file links to its copy in the site's files/."""
    linked = set()

    def link(found):
        file = found["file"]
        if not file or file in linked or not (ROOT / file).is_file():
            return found[0]
        linked.add(file)
        return f'<a href="{"../" * name.count("/")}files/{file}"><code>{file}</code></a>'

    return NAMED.sub(link, markdown)


class Site:
    """Provides the methods that the pages call in {{ ... }}."""

    def __init__(self):
        self.rungs = read_ladder()
        self.results = tables.newest() | tables.newest(partial=True)
        self.steps = counts.read_counts()
        loader = jinja2.FileSystemLoader([DOCS, DOCS / "pages"])
        self.jinja = jinja2.Environment(
            loader=loader,
            undefined=jinja2.StrictUndefined,
            autoescape=lambda name: name.endswith(".html"),
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.jinja.filters.update(number=records.number, paint=paint)
        self.jinja.globals.update(
            site=self,
            files=[rung.file for rung in self.rungs],
            title=title,
            page=page,
            pair_page=pair_page,
            changed_lines=changed_lines,
            times=records.speed_up,
            later=LATER,
        )
        # Calls in a page are HTML comments, because GitHub renders the same file and hides HTML comments.
        self.pages = self.jinja.overlay(variable_start_string="<!-- {{", variable_end_string="}} -->")

    def part(self, name, **values):
        return self.jinja.get_template(f"parts/{name}").render(**values)

    def listing(self, script):
        """Return a whole script with syntax highlighting."""
        return self.part("listing.html", script=script, lines=highlighted(source(script).rstrip("\n")))

    def diff(self, before, after):
        """Return the diff of two scripts for both views, inline and side by side. The docstring's hunks are folded."""
        return self.part("diff.html", before=before, after=after, **read_diff(before, after))

    def mistakes(self, kind):
        """Return the mistakes of one kind in dev/mistakes.toml, sorted by topic, each with its diff.

        Raises ValueError if an entry is invalid.
        """
        mistakes = read_toml("dev/mistakes.toml")[kind]
        for mistake in mistakes:
            where = f"dev/mistakes.toml: {mistake.get('name', 'a mistake')}"
            if missing := {"name", "harm", "topic", "file", "check", "edits"} - mistake.keys():
                raise ValueError(f"{where}: it has no {min(missing)}")
            if mistake["topic"] not in TOPICS:
                raise ValueError(f"{where}: unknown topic {mistake['topic']}")
            right = wrong = source(mistake["file"])
            for old, new in mistake["edits"]:
                if wrong.count(old) != 1:
                    raise ValueError(f"{where}: {mistake['file']} does not contain its lines exactly once")
                wrong = wrong.replace(old, new)
            diff = list(difflib.unified_diff(right.splitlines(), wrong.splitlines(), n=0, lineterm=""))[2:]
            mistake["diff"] = [line for line in diff if not line.startswith("@@")]
        return self.part("mistakes.md", mistakes=sorted(mistakes, key=lambda one: TOPICS.index(one["topic"])))

    def readme(self):
        """Return the README as the front page. Links to files other than pages and scripts become plain text."""
        text = re.sub(r"\]\((\w[\w/]*\.(?:py|ipynb))\)", r"](files/\1)", source("README.md"))
        text = re.sub(r"\[([^]]+)\]\((?!https?:|docs/pages/|files/)[^)]+\)", r"\1", text)
        return text.replace("](docs/pages/", "](").replace('"docs/pages/', '"')

    def head(self, rung, predicted=""):
        """Return the numbers at the top of a rung's page: the reading time, the predicted gain and the measured gain.

        The predicted gain is the step time of the previous rung divided by the step time of this rung. Each step time
        is the midpoint of its range in results/predictions.toml.
        """
        for one in read_toml("results/predictions.toml")["prediction"]:
            middles = [sum(one["ms"].get(script, ())) / 2 for script in (rung.before, rung.file)]
            where = f"{one['device']}, B {one['batch_size']}"
            if middles[1] and not predicted and not (rung.before and not middles[0]):
                gain = f"{middles[0] / middles[1]:.2f}×" if rung.before else f"{middles[1]:.0f} ms per step"
                predicted = f"{gain}, {where}"
        measured = ""
        for data in self.results.values():
            row = data.rows.get(rung.file, {})
            gain = records.speed_up(row.get("over_before"))
            if not rung.before and row.get("median_ms"):
                gain = f"{row['median_ms']:,.0f} ms per step"
            measured = measured or gain and f"{gain}, {data.label}"
        return self.part("head.html", rung=rung, predicted=predicted, measured=measured)

    def counts(self, rung):
        """Return the FLOPs, bytes and kernels of two adjacent rungs, and the bytes of the kernel groups that differ."""
        steps = self.steps[tables.COUNTED]
        names = [script for script in (rung.before, rung.file) if script]
        if missing := [script for script in names if script not in steps]:
            return f"{missing[0]} is not counted yet: see [three counts](../counts.md)."
        both, rows = [steps[script] for script in names], {}
        for what, unit, place in (("FLOPs", "TFLOP", 0), ("bytes moved", "GB", 1), ("kernels", "", 2)):
            rows[what] = [counts.totals(step)[place] for step in both], unit
        least = 0.01 * rows["bytes moved"][0][0]  # leave out the kernel groups whose bytes change by less
        for kind in plots.GROUPS:
            moved = [counts.totals(step, kind)[1] for step in both]
            if max(moved) - min(moved) >= least or len(both) == 1 and moved[0]:
                rows[f"bytes: {kind}"] = moved, "GB"
        return self.part("counts.md", rows=rows, names=["before", "after"] if rung.before else ["count"])

    def measured_ms(self, script, prediction):
        """Return the latest median step time in ms for a prediction's device, model, B and T, or None."""
        wanted, times = [prediction[key] for key in ("device", "model", "seq_len", "batch_size")], []
        for data in (records.load(path.parent) for path in (ROOT / "results").glob("*/runs.jsonl")):
            settings = data.settings
            rows = [
                row | {"batch_size": settings["batch_size"]} for row in data.rows.values() if row["script"] == script
            ]
            if script == records.TEN:
                rows += [row for row in data.batches if row["compile_mode"] == "default"]
            for row in rows:
                here = [data.host["name"], settings["model"], settings["seq_len"], row["batch_size"]]
                if here == wanted and row["median_ms"]:
                    times.append((data.finished, row["median_ms"]))
        return max(times, key=lambda time: time[0], default=(None, None))[1]

    def measured(self, rung, **predicted):
        """Return a script's predictions (speed, memory and loss) next to the measurements, with plots.

        A measurement made with --only appears if the script has no other measurement for the device and the model.
        """
        found = {}
        for name, data in self.results.items():
            row, before = data.rows.get(rung.file), data.rows.get(rung.before)
            before = before if before and before["median_ms"] and row and row["over_before"] else None
            here = data.host["name"], data.settings["model"]
            if row and (row["median_ms"] or row["error"]) and here not in found:
                plots = self.plots(name, [one for one in (before, row) if one]) if row["median_ms"] else []
                found[here] = name, row, before, plots
        found = list(found.values()) or [(next(iter(self.results)), None, None, [])]
        predictions = [p for p in read_toml("results/predictions.toml")["prediction"] if rung.file in p["ms"]]
        for prediction in predictions:
            prediction["found"] = self.measured_ms(rung.file, prediction)
        return self.part("measured.html", script=rung.file, predicted=predicted, found=found, predictions=predictions)

    def plots(self, name, rows):
        """Plot the step times, losses and kernel groups of a script and the previous script -> [(alt text, SVG)]."""
        names, spread, made = [title(row["script"]) for row in rows], np.random.default_rng(0), []

        def axes(text, values, **labels):
            figure = Figure(figsize=(3.6, 2.3))
            made.append((f"{text} of {' and '.join(names)}: {' and '.join(values)}", figure))
            return figure.add_subplot(**labels)

        medians = [f"{row['median_ms']:,.1f} ms" for row in rows]
        times = axes("Time per step", medians, xlabel="ms per step; line: median")
        ends = [f"{row['runs'][0]['losses'][-1]:.4f} at the last step" for row in rows]
        losses = axes("Loss", ends, xlabel="step", ylabel="loss, nats per token")
        for place, row in enumerate(rows):
            runs = row["runs"]
            steps = np.concatenate([records.steady(run["step_ms"]) for run in runs])
            colour = (plots.RUNG, plots.PEER)[place]
            spots = place + spread.uniform(-0.25, 0.25, len(steps))
            times.plot(steps, spots, "o", color=colour, markersize=3, alpha=0.6)
            times.plot([row["median_ms"]] * 2, [place - 0.35, place + 0.35], color=plots.INK)
            losses.plot(runs[0]["losses"], color=colour, linestyle=("-", "--")[place], label=names[place])
        times.set_xlim(left=0)
        times.set_yticks(range(len(rows)), names)
        times.invert_yaxis()
        losses.legend()
        groups = [row["profile"]["groups_ms"] for row in rows if row["profile"]]
        if len(groups) == len(rows):
            sums = [", ".join(f"{kind} {ms:.0f} ms" for kind, ms in group.items()) for group in groups]
            kinds = axes("Where the time goes", sums)
            plots.stacks(kinds, names, rows, height=0.6)
            kinds.set_xlabel("ms per step, profiled")
            legend = {"ncols": 2, "fontsize": 9, "columnspacing": 1, "handlelength": 1}
            kinds.figure.legend(*kinds.get_legend_handles_labels(), loc="outside lower center", **legend)
        return [(text, self.inline(figure, f"{name}{text}")) for text, figure in made]

    def inline(self, figure, salt):
        """Return a figure as SVG for a page, in the text colour of the page."""
        for part in (figure, *figure.axes):
            part.set_facecolor("none")
        with matplotlib.rc_context({"svg.hashsalt": salt}):
            return Markup(in_page(plots.svg(figure)))

    def run(self, name):
        """Describe a run of pretrain/train.py in results/: its machine, its losses (plot and table) and its samples."""
        folder = ROOT / "results" / name
        machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
        rows = plots.read(folder / "log.jsonl")
        evaluations = [row for row in rows if "val_loss" in row]
        steps, losses = plots.curve(rows, "loss")
        for before, row in zip(evaluations, evaluations[1:], strict=False):
            row["mean_loss"] = losses[(steps >= before["step"]) & (steps < row["step"])].mean()
        best = min(evaluations, key=lambda row: row["val_loss"])
        picture = self.inline(plots.losses({"this run": rows}), name)
        return self.part("run.html", machine=machine, evaluations=evaluations, best=best, picture=picture)

    def write(self, folder):
        """Write the Markdown pages and the Zensical configuration. Raises ValueError if a page is invalid."""
        pages = folder / "pages"
        shutil.copytree(DOCS / "pages", pages)
        rungs = {f"rungs/{Path(rung.file).stem}.md": rung for rung in self.rungs}
        if missing := [name for name in rungs if not (pages / name).exists()]:
            raise ValueError(f"docs/pages/{missing[0]} is missing")
        config = self.jinja.get_template("zensical.toml").render()
        (folder / "zensical.toml").write_text(config, encoding="utf-8")
        for path in sorted(pages.rglob("*.md")):
            name = path.relative_to(pages).as_posix()
            if f'"{name}"' not in config:  # each rung has a line in the configuration
                raise ValueError(f"docs/pages/{name} belongs to no rung and has no line in nav in docs/zensical.toml")
            if re.search(r"(?<!<!-- )\{\{", path.read_text(encoding="utf-8")):
                raise ValueError(
                    f"docs/pages/{name}: write a call as <!-- {{{{ ... }}}} -->, which GitHub does not show"
                )
            text = self.pages.get_template(f"pages/{name}").render(rung=rungs.get(name))
            text = re.sub(r"<!-- github -->\n.*?<!-- end of github -->\n", "", text, flags=re.DOTALL)  # only for GitHub
            text = with_figures(with_files(text, name))
            path.write_text(text, encoding="utf-8")
            for file in re.findall(r"\bfiles/([\w./-]+\.(?:py|ipynb|sbatch|toml))\b", text):
                (pages / "files" / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, pages / "files" / file)
        (pages / "compare").mkdir()
        for before, after in combinations(self.rungs, 2):
            text = self.part("compare.html", before=before.file, after=after.file)
            (pages / pair_page(before.file, after.file)).with_suffix(".md").write_text(text, encoding="utf-8")


def search_from_disk(site):
    """Embed the search worker in iframe-worker.js, because browsers do not start a worker from a file on disk."""
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    script = (site / "assets" / "iframe-worker.js").read_text(encoding="utf-8")
    text = script.replace('"SOURCE"', json.dumps(worker.read_text(encoding="utf-8")))
    (site / "assets" / "iframe-worker.js").write_text(text, encoding="utf-8")


def build(target=SITE):
    """Build the site in `target`. If the build fails, raise ValueError and leave the old site unchanged."""
    with tempfile.TemporaryDirectory() as folder:
        print("1/3  filling in the pages", flush=True)
        folder = Path(folder)
        site = Site()
        site.write(folder)
        if not (zensical := shutil.which("zensical", path=Path(sys.executable).parent)):
            raise ValueError("Zensical is not installed: it needs Python 3.11 or later")
        print("2/3  converting them to HTML with Zensical, the longest step", flush=True)
        done = subprocess.run([zensical, "build", "--strict"], cwd=folder, capture_output=True, encoding="utf-8")
        if done.returncode or not (folder / "site" / "index.html").exists():
            said = re.sub(r"\x1b\[[\d;]*m", "", done.stderr).partition("Traceback")[0]
            raise ValueError(f"zensical: {said or done.stderr}")
        print("3/3  writing the diff of each pair of scripts", flush=True)
        for before, after in combinations([rung.file for rung in site.rungs], 2):
            path = folder / "site" / pair_page(before, after)
            text = path.read_text(encoding="utf-8").replace(LATER, site.diff(before, after))
            path.write_text(text, encoding="utf-8")
        search_from_disk(folder / "site")
        (folder / "site" / "404.html").unlink()  # it loads a style sheet from the server's root, not the site's
        (folder / "site" / ".nojekyll").touch()  # tells GitHub Pages to serve the folder as it is
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder / "site", target)


if __name__ == "__main__":
    try:
        build()
    except (OSError, ValueError, jinja2.TemplateError, subprocess.SubprocessError) as error:
        sys.exit(f"build_site.py: error: {' '.join(str(error).split())}")
    print(f"{SITE.relative_to(ROOT)}/index.html: open it in a browser")
