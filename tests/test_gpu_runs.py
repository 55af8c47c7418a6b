"""On a CUDA GPU, a run resumes from its checkpoint and reports errors in one line.

Between the micro-steps of a step, Python waits for the GPU only to copy a batch.
"""

import pytest
import torch
from conftest import LONG, ROOT, since

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("script", since(LONG))
def test_a_run_resumes_from_its_checkpoint(run, tmp_path, script, measured):
    words = script, "--steps", 6, "--total-batch-size", 8192, "--save-every", 4, "--checkpoint-dir", tmp_path

    def count():
        """Return (the number of tokens read, AdamW's step counts). Both are integers and can be compared exactly."""
        saved = torch.load(tmp_path / "step_00000006.pt", map_location="cpu", weights_only=True)
        return saved["position"], {int(state["step"]) for state in saved["optim"]["state"].values()}

    whole = run(*words, torchrun=1)
    assert whole.returncode == 0, whole.stderr
    assert count() == (6 * 8192, {6})
    (tmp_path / "step_00000006.pt").unlink()
    rest = run(*words, "--resume", torchrun=1)
    assert rest.returncode == 0, rest.stderr
    assert count() == (6 * 8192, {6}) and rest.losses == pytest.approx(whole.losses[4:], abs=0.02)
    measured(f"losses {whole.losses}, resumed {rest.losses}")


def test_between_micro_steps_only_the_copies_of_a_batch_wait(run, tmp_path, measured):
    (tmp_path / "watched.py").write_text(
        "import runpy, sys, torch, warnings\n"
        "warnings.simplefilter('always')\n"
        "torch.cuda.set_sync_debug_mode('warn')\n"
        f"sys.argv[0] = {str(ROOT / 'ddp_run.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )

    def waits(micro_steps):
        words = "--steps", 3, "--batch-size", 4, "--total-batch-size", micro_steps * 4096
        done = run("watched.py", *words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stderr.count("called a synchronizing CUDA operation")

    found = waits(8), waits(1)
    # Python waits for the copies of x and y in each micro-step, and for the loss and the norm once per step. Each of
    # the 7 additional micro-steps in each of the 3 steps therefore adds 2 waits.
    assert found[0] == found[1] + 3 * 7 * 2 and found[1] > 0
    measured(f"{found[0]} waits in 3 steps of 8 micro-steps, {found[1]} in 3 of one")


def test_more_ranks_than_gpus_is_refused(run, measured):
    done = run("ddp_run.py", torchrun=torch.cuda.device_count() + 1)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("ddp_run.py: error: "))
    assert done.returncode != 0 and "PyTorch" in line and "finds only cpu, cuda, cuda:0" in line
    measured(line)


@pytest.mark.parametrize("script", ["baseline.py", "speedup_10_fused_adamw.py"])
def test_out_of_memory_is_one_line(run, script, measured):
    done = run(script, "--model", "gpt2-medium", "--batch-size", 300, "--steps", 1)  # needs more than 200 GB
    assert done.returncode == 1
    said = f"{script}: error: out of memory: lower --batch-size or --seq-len"
    assert [line for line in done.stderr.splitlines() if "error" in line or "Traceback" in line] == [said]
    measured(said)
