"""Every script as a user runs it: what it prints is true, it learns, and it does the same twice."""

import math
import re
import shutil
import statistics

import pytest
from conftest import BF16_CPU, FP16, ROOT, SCRIPTS, STEP, SUMMARY, clips, since

PARAMETERS = {"baseline.py": 13_790_208} | dict.fromkeys(since(1, 7), 7_357_312) | dict.fromkeys(since(7), 7_363_328)


@pytest.fixture(scope="session")
def runs(run):
    """Script -> two runs of it with the same arguments, made when first asked for."""
    made = {}

    def twice(script):
        if script not in made:
            made[script] = [run(script, "--steps", 8) for _ in range(2)]
        return made[script]

    return twice


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_succeeds_without_a_warning_and_leaves_nothing_behind(runs, script):
    for done in runs(script):
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert done.left_behind == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_lines_are_those_of_the_contract(runs, script):
    lines = runs(script)[0].stdout.splitlines()
    tokens = 4 * 128  # nano's default batch
    assert (
        lines.pop(0)
        == "on a CPU the model is nano, 4 layers 128 wide, at T 128 (--model gpt2 trains GPT-2 all the same)"
    )
    if script in since(2):
        assert lines.pop(0).startswith("no TF32 here")
    if script in set(since(3)) - {FP16} and not BF16_CPU:
        assert lines.pop(0).startswith("no bf16 here")
    assert re.fullmatch(
        rf"device cpu \(.+\) \| torch \S+ \| nano {PARAMETERS[script]:,} parameters \| B 4 T 128", lines.pop(0)
    )
    assert lines.pop(0) == "loaded 338025 tokens"
    assert lines.pop(0) == "1 epoch = 660 batches"
    if script in since("ddp_run.py"):
        assert lines.pop(0) == "4096 tokens per step = 8 micro-steps * B 4 * T 128 * 1 ranks"
        tokens = 4096

    times = []
    for number, line in enumerate(lines[:8]):
        step = STEP.fullmatch(line)
        assert step, line
        assert int(step["step"]) == number
        assert (step["norm"] is not None) == (script in clips())
        assert (step["lr"] is not None) == (script in since(9))
        assert (step["left"] is not None) == (script in since("ddp_run.py"))
        assert step["scale"] == ("65536" if script == FP16 else None) and not step["skipped"]
        ms, rate = float(step["ms"]), float(step["rate"].replace(",", ""))
        assert rate == pytest.approx(tokens / (ms / 1000), rel=1e-3, abs=1)  # tokens per SECOND
        times.append(ms)
    summary = SUMMARY.fullmatch(lines[8])
    assert summary, lines[8]
    assert (summary["first"], summary["last"]) == ("4", "7")  # under 20 steps the first half is left out
    assert float(summary["ms"]) == pytest.approx(statistics.median(times[4:]), abs=0.02)
    assert float(summary["rate"].replace(",", "")) == pytest.approx(
        tokens / float(summary["ms"]) * 1000, rel=1e-3, abs=1
    )
    assert 0.2 < float(summary["memory"]) < 20  # GiB of a process that holds torch and a batch of logits
    assert len(lines) == 9


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_first_loss_is_that_of_a_guess_and_the_last_is_lower(runs, script):
    losses = runs(script)[0].losses
    assert losses[0] == pytest.approx(math.log(50257), abs=0.25)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_seed_gives_one_curve_and_another_seed_another(run, runs, script):
    first, second = runs(script)
    assert first.losses == second.losses
    if script == "baseline.py":
        assert run(script, "--steps", 1, "--seed", 1338).losses != first.losses[:1]


def test_from_20_steps_on_the_median_leaves_out_10(run):
    done = run("baseline.py", "--steps", 20, "--batch-size", 1, "--seq-len", 8)
    assert SUMMARY.search(done.stdout)["first"] == "10"


@pytest.mark.parametrize("script", ["baseline.py", "ddp_run.py"])
def test_a_script_runs_alone_in_another_folder(run, tmp_path, script):
    shutil.copy(ROOT / script, tmp_path)
    shutil.copy(ROOT / "input.txt", tmp_path)
    shutil.copytree(ROOT / "tokenizer", tmp_path / "tokenizer")
    done = run(script, "--steps", 1, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.losses) == 1


def test_ctrl_c_prints_the_summary_so_far(run, tmp_path):
    # a run that sends itself what a terminal sends, once two steps are done
    script = tmp_path / "interrupted.py"
    script.write_text(
        "import os, runpy, signal, sys, threading, time\n"
        "def press():\n"
        "    while 'torch' not in sys.modules or len(steps) < 2: time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "steps, write = [], sys.stdout.write\n"
        "sys.stdout.write = lambda text: (steps.append(1) if 'tok/s' in text else None, write(text))[1]\n"
        "threading.Thread(target=press, daemon=True).start()\n"
        f"sys.argv = ['baseline.py', '--steps', '1000']\n"
        f"runpy.run_path({str(ROOT / 'baseline.py')!r}, run_name='__main__')\n"
    )
    done = run(script.name, folder=tmp_path)
    assert done.returncode == 130
    assert done.stderr == ""
    assert 2 <= len(done.losses) < 1000
    assert SUMMARY.fullmatch(done.stdout.splitlines()[-1])["last"] == str(len(done.losses) - 1)


@pytest.fixture(scope="module")
def ranks(run):
    """The same 5 steps on one rank and on two."""
    arguments = ("ddp_run.py", "--steps", 5, "--batch-size", 2, "--total-batch-size", 1024)
    return run(*arguments), run(*arguments, torchrun=2, OMP_NUM_THREADS="1")


def test_two_ranks_give_the_curve_of_one(ranks):
    one, two = ranks
    assert two.returncode == 0, two.stderr
    assert two.losses == pytest.approx(one.losses, abs=1e-4)
    for alone, together in zip(one.steps, two.steps, strict=True):
        assert float(together["norm"]) == pytest.approx(float(alone["norm"]), rel=1e-2)
        rate = 1024 / float(together["ms"]) * 1000
        assert float(together["rate"].replace(",", "")) == pytest.approx(rate, rel=1e-2, abs=0.51)
    assert "1 epoch = 1320 batches\n1024 tokens per step = 4 micro-steps * B 2 * T 128 * 1 ranks" in one.stdout
    assert "1 epoch = 660 batches\n1024 tokens per step = 2 micro-steps * B 2 * T 128 * 2 ranks" in two.stdout


def test_rank_0_alone_prints(ranks):
    one, two = ranks
    assert len(two.losses) == 5
    assert len(two.stdout.splitlines()) == len(one.stdout.splitlines())
    assert two.stderr == ""


def test_torchrun_with_one_process_is_the_run_without_it(run, ranks):
    arguments = ("ddp_run.py", "--steps", 5, "--batch-size", 2, "--total-batch-size", 1024)
    assert run(*arguments, torchrun=1).losses == pytest.approx(ranks[0].losses, abs=1e-4)
