"""Functions for the cells of the notebooks: show a diff, run a script, and draw the chart."""

import re
import subprocess
import sys

import jinja2
import torch
from IPython.display import HTML, display

from dev.ladder import ROOT, changed_lines, read_ladder, read_toml, title
from docs.diffs import paint, read_diff

RUNGS = {rung.file: rung for rung in read_ladder()}
SUMMARY = re.compile(r"^median of steps .*: (\d+\.\d+) ms, ([\d,]+) tok/s.*$", re.MULTILINE)
JINJA = jinja2.Environment(
    loader=jinja2.FileSystemLoader([ROOT / "notebooks", ROOT / "docs"]), autoescape=True, trim_blocks=True
)
JINJA.filters["paint"] = paint
runs = {}  # (script, sequence length or None for the default) -> (ms per step, tokens per second)


def show(name, **values):
    """Display a template of this folder, with the styles that it needs, because Colab isolates each output."""
    styles = (ROOT / "docs/pages/assets/colours.css", ROOT / "notebooks/style.css")
    css = "".join(path.read_text(encoding="utf-8") for path in styles)
    display(HTML(f'<style>{css}</style><div class="ladder">{JINJA.get_template(name).render(**values)}</div>'))


def compute_capability():
    """Return the compute capability of the NVIDIA GPU, such as (7, 5) for a T4, or None if there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() and not torch.version.hip else None


def fp16_only():
    """Return whether the GPU is fast in fp16 but has no bf16, such as a T4 or a V100."""
    return (7, 0) <= (compute_capability() or (0, 0)) < (8, 0)


def describe_device():
    """Print the device, the version of PyTorch and the optimizations that the device supports."""
    print(f"torch {torch.__version__}, ", end="")
    if not torch.accelerator.is_available():
        bf16 = "with" if torch.cpu.get_capabilities().get("avx512_bf16") else "without"
        print(f"no GPU. On this CPU ({bf16} bf16), the scripts train nano, a model with 4 layers.")
        return
    if not (capability := compute_capability()):
        print(f"{torch.accelerator.current_accelerator().type}. We have not tested the scripts on this kind of GPU.")
        return
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    print(f"{torch.cuda.get_device_name()}, {gib:.1f} GiB, compute capability {capability[0]}.{capability[1]}")
    able = {"fp16": (7, 0), "TF32 (02)": (8, 0), "bf16 (03)": (8, 0), "torch.compile (05)": (7, 0)}
    print(" | ".join(f"{name}: {'yes' if capability >= needed else 'no'}" for name, needed in able.items()))


def show_diff(script):
    """Display the diff of a script from the script that it builds on, as on the site."""
    before = RUNGS[script].before
    show("diff.html", before=before, after=script, counts=changed_lines(before, script), **read_diff(before, script))


def stream(*words, every=1):
    """Run a Python program, print its output as it arrives, and return the output and the exit status.

    Of the lines that a script prints after each step, only every `every`-th is printed.
    """
    words = [str(word) for word in words]
    print("$ python", *words, flush=True)
    said = []
    together = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
    with subprocess.Popen([sys.executable, "-u", *words], cwd=ROOT, **together) as child:
        try:
            for line in child.stdout:
                said.append(line)
                step = re.match(r"step +(\d+) ", line)
                if not step or int(step[1]) % every == 0:
                    print(line, end="", flush=True)
        except KeyboardInterrupt:  # the button that stops a cell
            child.terminate()
            raise
    if child.returncode:
        print(f"{words[0]} failed with exit status {child.returncode}")
    return "".join(said), child.returncode


def python(*words):
    """Run a Python program and print its output as it arrives."""
    stream(*words)


def run(script, seq_len=None, **options):
    """Run a script of the ladder, then display its median step time and the chart of all runs so far.

    If the script fails, its last lines say why, and the chart is unchanged.
    """
    options |= {"seq_len": seq_len} if seq_len else {}
    text, status = stream(script, *(str(w) for k, v in options.items() for w in (f"--{k.replace('_', '-')}", v)))
    if not status and (found := SUMMARY.search(text)):
        runs[script, seq_len] = float(found[1]), int(found[2].replace(",", ""))
        chart(script, seq_len, found[0])


def chart(script, seq_len, line):
    """Display the line that matters and a bar per run. The run of `script` is marked."""
    rows = []
    for (file, length), (ms, speed) in runs.items():
        before = RUNGS[file].before
        while before and (before, length) not in runs:  # the previous rung may have been replaced, as 03 on a T4
            before = RUNGS[before].before
        gain = f"{runs[before, length][0] / ms:.2f}× over {RUNGS[before].number}" if before else ""
        row = {"label": title(file) + (f", T {length}" if length else ""), "speed": speed, "note": gain}
        rows.append(row | {"marked": (file, length) == (script, seq_len)})
    show("bars.html", line=line, rows=rows, most=max(row["speed"] for row in rows))


def train(script, text, minutes, weights):
    """Train on a text for about `minutes` after the first step, and save the weights.

    The number of steps follows from the measured speed of `script` or, for ddp_run.py, of rung 10.
    """
    measured = "speedup_10_fused_adamw.py" if script == "ddp_run.py" else script
    if not (done := runs.get((measured, None))):
        print(f"First run the cell of {measured}. Its speed determines the number of steps, so it must not fail.")
        return
    steps = max(1, round(60_000 * minutes / done[0]))
    options = ["--data", text, "--steps", steps, "--save", weights]
    if script == "ddp_run.py":  # one micro-step per step, as in rung 10
        options += ["--total-batch-size", 4 * (1024 if torch.accelerator.is_available() else 128)]
    stream(script, *options, every=max(1, steps // 20))


def beside_public_figures():
    """Display the fastest run of GPT-2 on this GPU beside the public figures in results/public.toml."""
    rows = [
        {"label": one["card"], "speed": one["tokens_per_s"], "note": f"B {one['batch_size']}"}
        for one in read_toml("results/public.toml")["speed"]
        if one.get("plain", True) and "batch_size" in one and one["ran"].startswith("PyTorch")
    ]
    if not runs:
        print("Run a script first. The chart shows only the public figures.")
    elif torch.accelerator.is_available():
        (script, _), (_, speed) = max(runs.items(), key=lambda one: one[1][1])
        cuda = torch.cuda.is_available()
        name = torch.cuda.get_device_name() if cuda else torch.accelerator.current_accelerator().type
        here = {"label": f"{name}, here", "note": title(script), "marked": True}
        rows.append(here | {"speed": speed})
    else:
        print("This machine trained nano, which is not comparable with GPT-2. The chart shows only the public figures.")
    rows.sort(key=lambda row: row["speed"])
    show("bars.html", line="", rows=rows, most=rows[-1]["speed"])
