"""Show the kernels of one training step:  python -m measure.timeline speedup_06_flash_attn.py   (make timeline)

`make ladder ARGS=--profile` writes the kernels of one step of each script to kernels.json, next to the log. This
program reads the file and draws the step of one script. It also prints a table of the 20 kernels that take the most
time, with the FLOPs and bytes that measure/counts.py counts for each kernel. Calls to the same kernel with the same
counts share a row. The floor of a kernel is an estimated lower bound on its time (see measure/counts.py), computed from
the measured peaks of the device. A kernel that takes much longer than its floor may be worth optimizing. By default,
the program reads the latest measurement of the script.

If a kernel does not occur equally often in the counts and in the profile, its cells for counts and floor are empty.
"""

import argparse
import itertools
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Patch

from baseline import MODELS
from dev.ladder import ROOT, read_ladder, title
from measure import counts, plots, records
from measure.kernels import grouped
from measure.records import TEN

LAYER = "speedup_04_residual_init.py", TEN  # the scripts whose layers are compared
FIVE = "speedup_05_compile.py"  # from this rung on, steps are much shorter and are drawn on a second scale
KINDS = [*plots.GROUPS]  # the last group is "idle"
LABELS = {"softmax and loss": "loss", "normalization and element-wise": "element-wise", "idle": "no kernel runs"}

# ---- the file


def read(folder):
    """Return {script: step} from the kernels.json in a folder, or {} if there is none. See kernels.median_step()."""
    path = Path(folder) / "kernels.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        raise ValueError(f"{path}: not JSON") from None


def write(folder, script, step):
    """Add the step of a script to the kernels.json in a folder. After a crash, the file has its old or new content."""
    path = Path(folder) / "kernels.json"
    lines = [
        f"{json.dumps(name)}: {json.dumps(one, separators=(',', ':'))}"
        for name, one in (read(folder) | {script: step}).items()
    ]
    new = path.with_suffix(".new")
    new.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(new, path)


def calls(step):
    """Return the calls of a step in order: a list of (name, group, end, duration), in microseconds.

    One call of an operation can launch several kernels. The call then gets the name and group of the longest kernel,
    the end of the last kernel, and the sum of the durations.
    """
    found, latest = [], {}  # a call is a list of (duration, name, group, end); `latest` maps an operation to its call
    for at, long, place in step["kernels"]:
        kind, name = step["names"][place]
        again, name = name.startswith("+ "), name.removeprefix("+ ")
        operation = name.split()[0]
        if not again or operation not in latest:
            latest[operation] = []
            found.append(latest[operation])
        latest[operation].append((long, name, kind, at + long))
    return [(*max(call)[1:3], max(one[-1] for one in call), sum(one[0] for one in call)) for call in found]


# ---- pictures


def parts(step, start, end, count):
    """Divide the time from start to end, in microseconds, into `count` equal parts and return the group of each.

    Each part shows the group with the most time that has not been shown yet. Kernels shorter than a part are thus
    merged, but each group roughly keeps its share of the time. While two kernels overlap, only the first to
    start is counted.
    """
    edges, reached = np.linspace(start, end, count + 1), start
    time = np.zeros((len(KINDS), count))
    for at, long, name in step["kernels"]:
        begin, reached = max(at, reached), max(at + long, reached)
        time[KINDS.index(step["names"][name][0])] += np.diff(np.clip(edges, begin, reached))
    time[-1] = (end - start) / count - time.sum(0)
    owed, found = np.zeros(len(KINDS)), []
    for part in time.T:
        owed += part
        found.append(KINDS[owed.argmax()])
        owed[owed.argmax()] -= part.sum()
        owed *= part.max() < 0.999 * part.sum()  # otherwise, an earlier group could appear in a long kernel
    return found


def strip(axes, step, start, end, at, count, thickness, across=False):
    """Draw the step from start to end, in microseconds, as a strip on an axis in milliseconds.

    `at` is the position of the strip on the other axis. `thickness` is in points. With `across`, time runs along the
    y-axis. Returns a list of (group, first ms, last ms), with one item per sequence of parts of the same group.
    """
    found, edges = parts(step, start, end, count), np.linspace(start, end, count + 1) / 1000
    changes = [0, *(place for place in range(1, count) if found[place] != found[place - 1]), count]
    runs = [(found[a], edges[a], edges[b]) for a, b in itertools.pairwise(changes)]
    ends = np.array([start, end]) / 1000 - start / 1000 * across
    axes.plot(*(([at, at], ends) if across else (ends, [at, at])), color="white", linewidth=thickness)
    for kind in [kind for kind in KINDS[:-1] if kind in found]:
        times = np.array([(a, b, np.nan) for name, a, b in runs if name == kind]).ravel() - start / 1000 * across
        line = (np.full(len(times), at), times) if across else (times, np.full(len(times), at))
        axes.plot(*line, color=plots.GROUPS[kind], linewidth=thickness, solid_capstyle="butt")
    return runs


def legend(figure, columns):
    patches = [Patch(facecolor=color, label=LABELS.get(kind, kind)) for kind, color in plots.GROUPS.items()]
    patches[-1].set(facecolor="white", edgecolor=plots.INK, linewidth=0.5)
    figure.legend(handles=patches, loc="outside lower center", ncols=columns, fontsize=8, handlelength=1.2)


def ladder(steps, data, wide=True):
    """Draw a step of each script as a strip: the uncompiled scripts on one axis, the others enlarged on a second."""
    order = [rung.file for rung in read_ladder() if rung.file in steps]
    early = order[: order.index(FIVE)] if FIVE in order else order
    panels = [names for names in (early, order[len(early) :]) if names]
    figure = Figure(figsize=(10.0 if wide else 4.4, 1.9 + (0.33 if wide else 0.6) * len(order)))
    figure.suptitle(f"One training step, kernel by kernel\n{plots.about(data)}", x=0.01, ha="left", fontsize=11)
    grid = figure.subplots(len(panels), height_ratios=[len(names) + 0.5 for names in panels], squeeze=False)[:, 0]
    for axes, names in zip(grid, panels, strict=True):
        ends = [steps[name]["ms"] for name in names]
        limit = max(ends) * (1.12 if wide else 1.02)
        for place, (name, ms) in enumerate(zip(names, ends, strict=True)):
            count = max(1, round((720 if wide else 290) * ms / limit))
            for kind, first, last in strip(axes, steps[name], 0, 1000 * ms, place, count, 15):
                label = LABELS.get(kind, kind)
                if kind != "idle" and (last - first) / limit > (0.009 if wide else 0.022) * len(label):
                    ink = plots.INK if kind in plots.BRIGHT else "white"
                    axes.text((first + last) / 2, place, label, color=ink, fontsize=7, ha="center", va="center")
            axes.plot([ms, ms], [place - 0.3, place + 0.3], color=plots.INK, linewidth=1)
            if wide:
                axes.annotate(f"{ms:,.1f} ms", (ms, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
            else:
                axes.text(0, place - 0.3, f"{title(name)}: {ms:,.1f} ms", fontsize=8.5, va="bottom")
        axes.set(xlim=(0, limit), ylim=(len(names) - 0.45, -0.55 if wide else -0.9))
        axes.set_yticks(*(range(len(names)), [title(name) for name in names]) if wide else ([],))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    axes.set_xlabel("milliseconds of a profiled step")
    if len(panels) == 2:  # show which part of the first axis is enlarged on the second axis
        for share, x in (0, 0), (1, limit):
            ends = (x, len(early) - 0.45), (share, 1), "data", "axes fraction"
            line = ConnectionPatch(*ends, axesA=grid[0], axesB=grid[1], color=plots.INK, linestyle=":", linewidth=0.8)
            figure.add_artist(line)
        grid[0].xaxis.tick_top()  # keeps the space between the panels free for these lines
        grid[0].spines["bottom"].set_visible(False)
        grid[0].axvspan(0, limit, color=plots.INK, alpha=0.07, linewidth=0)
    legend(figure, 7 if wide else 2)
    return figure


def plain(name):
    """Return the name of a kernel as it appears in a picture or a table, without uninformative parts."""
    name, fused = re.subn(r"^(graph_\d+_cpp|triton_[a-z]+)_fused_|_\d+$", "", name)
    if fused > 1:
        name = re.sub(r"(?<![a-z])(_to_copy|_unsafe_view|view|select|slice|arange|expand|native)(_|$)", "", name)
        name = "fused " + (name.strip("_") or "copy")
    return name.removeprefix("_").replace("scaled_dot_product_", "").replace("_for_cpu", "")


def column(axes, step, start, end, span, wide=True):
    """Draw the kernels between `start` and `end`, in microseconds, from top to bottom, and label the longest ones.

    `span` is the length of the axis in milliseconds.
    """
    share, slots, letters = (end - start) / span / 1000, 34, 31 if wide else 20
    strip(axes, step, start, end, 0, max(1, round(400 * share)), 16, across=True)
    shown = []  # (middle of the visible part in ms, duration in microseconds, name)
    for at, long, name in step["kernels"]:
        if at < end and at + long > start:
            middle = (max(at, start) + min(at + long, end)) / 2 - start
            shown.append((middle / 1000, long, plain(step["names"][name][1].removeprefix("+ "))))
    shown = sorted(sorted(shown, key=lambda one: -one[1])[: max(15, round(slots * share))])
    places, gap = [], span / slots
    for middle, *_ in shown:  # move overlapping labels down, then up if they pass the end of the axis
        places.append(max(middle, places[-1] + gap if places else 0))
    for place in reversed(range(len(places))):
        places[place] = min(places[place], places[place + 1] - gap if place + 1 < len(places) else span - gap / 2)
    for place, (middle, long, name) in zip(places, shown, strict=True):
        axes.plot([0.25, 0.6, 0.8], [middle, place, place], color=plots.INK, linewidth=0.4, clip_on=False)
        text = f"{long:,.0f} {name}"
        axes.text(0.9, place, text if len(text) <= letters else f"{text[: letters - 1]}…", fontsize=7, va="center")
    axes.set(xlim=(-0.25, 4 if wide else 2.6), ylim=(span, 0), xticks=[])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(labelsize=7)


def layer_times(step, layers):
    """Return ((start, end) of the forward pass, (start, end) of the backward pass) of one layer, in microseconds.

    It is the layer of median duration among all layers except the first. A layer has four matmuls in the forward pass
    and eight in the backward pass. The head has one in the forward pass and two in the backward pass. A pass lasts from
    the end of the last matmul before the layer to the end of the layer's last matmul. Returns None if the step has a
    different number of matmuls.
    """
    ends = [end for _, kind, end, _ in calls(step) if kind == "matmul"]
    if len(ends) != 12 * layers + 3:
        return None
    found = []
    for number in range(1, layers):
        forward, backward = 4 * number, 4 * layers + 3 + 8 * (layers - 1 - number)
        found.append(((ends[forward - 1], ends[forward + 3]), (ends[backward - 1], ends[backward + 7])))
    found.sort(key=lambda passes: sum(end - start for start, end in passes))
    return found[len(found) // 2]


def layer(steps, data, wide=True):
    """Draw the forward and backward pass of one layer, in two scripts side by side, with the names of the kernels."""
    figure = Figure(figsize=(10.0, 5.6) if wide else (4.4, 10.6))
    found = {script: layer_times(step, MODELS[data.settings["model"]].n_layer) for script, step in steps.items()}
    for row, which in enumerate(("forward", "backward")):
        span = max(times[row][1] - times[row][0] for times in found.values()) / 1000
        for place, (script, times) in enumerate(found.items()):
            number = 1 + place + 2 * row
            axes = figure.add_subplot(*(1, 4) if wide else (2, 2), number)
            axes.set_title(f"{title(script)[:2]} {which}: {(times[row][1] - times[row][0]) / 1000:.2f} ms", fontsize=9)
            column(axes, steps[script], *times[row], span, wide)
    figure.axes[0].set_ylabel("milliseconds, top to bottom", fontsize=8)
    heading = f"One layer in {' and '.join(map(title, steps))}\nkernels in microseconds; {plots.about(data)}"
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11 if wide else 9)
    legend(figure, 7 if wide else 2)
    return figure


def whole(step, script, data, columns=4):
    """Draw the step of one script in columns of equal length, with the names of the longest kernels."""
    figure, span = Figure(figsize=(10.0, 6.0)), step["ms"] / columns
    for place in range(columns):
        axes = figure.add_subplot(1, columns, place + 1)
        axes.set_title(f"from {place * span:,.1f} ms", fontsize=9)
        column(axes, step, 1000 * place * span, 1000 * (place + 1) * span, span)
    heading = f"One step of {script}, {step['ms']:,.1f} ms\nkernels in microseconds; {plots.about(data)}"
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11)
    legend(figure, 7)
    return figure


def compared(data, steps):
    """Return {script: step} for the two scripts that layer() compares, or {} if it cannot compare them."""
    both = {script: steps[script] for script in LAYER if script in steps}
    found = [layer_times(step, MODELS[data.settings["model"]].n_layer) for step in both.values()]
    return both if len(found) == 2 and all(found) else {}


def pictures(data, steps):
    """Return {name: figure} for the steps of a measurement, with variants for a narrow screen."""
    made = {}
    for name, wide in ("", True), ("-narrow", False):
        made |= {f"steps{name}": ladder(steps, data, wide)} if steps else {}
        made |= {f"layer{name}": layer(both, data, wide)} if (both := compared(data, steps)) else {}
    return made


# ---- the table


def key(name):
    """Return the part of a kernel's name that is the same in a profile and in the counts."""
    if fused := re.search(r"fused_.*(?=_\d+$)", name):
        return fused[0]
    if "HtoD" in name:  # the batch, which the counts create on the device
        return name
    name = name.removeprefix("aten::").split()[0]
    if "attention" in name:  # the kernel depends on the device
        return "attention backward" if "backward" in name else "attention"
    return name.rstrip("_")  # the counts may contain the out-of-place operation, which moves the same number of bytes


def slowest(step, counted, card=None):
    """Return the table of the kernels that take the most time.

    The kernels of the profile and of `counted` are matched by name and order.
    """
    mine, its, rows = {}, {}, {}
    for call in calls(step):
        mine.setdefault(key(call[0]), []).append(call)
    for kernel in counted:
        its.setdefault(key(kernel.name), []).append(kernel)
    for same, those in mine.items():
        alike = its.get(same, []) if len(its.get(same, [])) == len(those) else [None] * len(those)
        for (name, kind, _, long), kernel in zip(those, alike, strict=True):
            row = rows.setdefault((plain(name), kind, kernel and kernel._replace(name="", group="")), [0, 0.0])
            row[:] = row[0] + 1, row[1] + long
    table = []
    for (name, kind, kernel), (times, long) in sorted(rows.items(), key=lambda row: -row[1][1])[:20]:
        floor = card.floor_ms(Counter({kernel: times}))[0] if kernel and card else 0
        table.append(
            {
                "kernel": name if len(name) <= 60 else f"{name[:59]}…",
                "group": LABELS.get(kind, kind),
                "calls": str(times),
                "ms": f"{long / 1000:,.2f}",
                "share": f"{long / 1000 / step['ms']:.0%}",
                "GFLOP": records.number(kernel and times * kernel.flops / 1e9 or None, ",.1f"),
                "MB": records.number(kernel and times * kernel.bytes / 1e6, ",.1f"),
                "floor, ms": records.number(floor or None, ",.2f"),
                "ms / floor": records.number(long / 1000 / floor if floor >= 0.005 else None, ".1f"),
            }
        )
    return table


def newest(script):
    """Return the folder of the latest measurement with the kernels of the script. Raises ValueError if none exists."""
    folders = [path.parent for path in (ROOT / "results").glob("*/kernels.json") if script in read(path.parent)]
    if not folders:
        raise ValueError(f"no measurement in results/ has the kernels of {script}: run make ladder ARGS=--profile")
    return max(folders, key=lambda folder: records.load(folder).finished)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=argparse.SUPPRESS)
    parser.add_argument("script", help="a script of the ladder, such as speedup_06_flash_attn.py")
    parser.add_argument("--results", type=Path, help="folder of a measurement, default: the latest")
    args = parser.parse_args()
    rung = next((rung for rung in read_ladder() if rung.file == args.script), None)
    try:
        if not rung:
            raise ValueError(f"{args.script}: expected a script of the ladder, such as {TEN}")
        folder = args.results or newest(args.script)
        data, steps = records.load(folder), read(folder)
        if args.script not in steps:
            raise ValueError(f"{folder} has no kernels of {args.script}: measure it with make ladder ARGS=--profile")
        step, row = steps[args.script], data.rows.get(args.script) or {}
        out = ROOT / "runs" / f"timeline-{Path(args.script).stem}.svg"
        out.parent.mkdir(exist_ok=True)
        plots.write_svg(whole(step, args.script, data), out)
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    usual = f"; median without the profiler: {row['median_ms']:,.1f} ms" if row.get("median_ms") else ""
    print(f"{args.script}, {plots.about(data)}\none step: {step['ms']:,.1f} ms{usual}")
    times = grouped([(0, 1000 * step["ms"], [(at, long, *step["names"][name]) for at, long, name in step["kernels"]])])
    print(", ".join(f"{LABELS.get(kind, kind)} {ms:,.1f} ms" for kind, ms in times.items()), flush=True)
    counted, card = [], counts.Card(data.peaks, data.roof["copy_gb_per_s"]) if data.roof else None
    if rung.part == "rung" or rung.kind == "speed":  # counts.py cannot count the other side rungs
        mine, its = torch.__version__.partition("+")[0], data.host["torch"].partition("+")[0]
        other = f"; the profile was made with torch {its}, so kernels may differ" if its != mine else ""
        print(f"counting a step with torch {mine}{other} (takes about half a minute)", file=sys.stderr)
        sizes = {name: data.settings[name] for name in ("model", "batch_size", "seq_len")}
        counted = counts.step(rung, **sizes, cuda=not data.cpu)
    print(f"\n{records.text(slowest(step, counted, card))}\n\n{out.relative_to(ROOT)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
