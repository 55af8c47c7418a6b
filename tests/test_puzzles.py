"""A puzzle's check fails on the planted mistake and passes for any right solution. The learner's script is kept."""

import subprocess
import sys

import pytest
from conftest import copy_project

from dev.puzzle import place, read_puzzles

FOUND = read_puzzles()
CLIP = "            norm = nn.utils.clip_grad_norm_(model.parameters(), {}1.0)  # returns the norm before clipping\n"
STEP, TIME = "            optimizer.step()\n", "            times.append(time.perf_counter() - start)\n"
OTHER = {  # number -> right solutions that are not the repository's: (text in the puzzle's script, its replacement)
    "04": (TIME, f"            loss.item()\n{TIME}"),  # the CPU needs the value, so it waits for the GPU, too
    "05": (STEP + CLIP.format(""), CLIP.format("max_norm=") + STEP),
    "08": (STEP, f"            for group in optimizer.param_groups:\n                group.update(lr=lr)\n{STEP}"),
    "09": (
        "                optimizer.zero_grad()\n",
        "                if micro_step == 0:\n                    model.zero_grad()\n",
    ),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return copy_project(tmp_path_factory.mktemp("puzzles") / "ladder")


@pytest.fixture
def puzzle(project):
    """Return a function that runs dev.puzzle in a copy of the project and returns (its exit status, its output)."""

    def puzzle(*args):
        command = [sys.executable, "-m", "dev.puzzle", *args]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return puzzle


def test_a_puzzle_from_the_list_to_the_answer(puzzle, project):
    script, about = project / "puzzles" / "01" / place("01", FOUND["01"]).name, FOUND["01"]
    wrong, ours = (f"self.transformer.wte.{name} = self.lm_head.weight" for name in ("weights", "weight"))
    right, symptom = "self.lm_head.weight = self.transformer.wte.weight", about["puzzle"]["symptom"]
    help = "for a hint: make puzzle-01 ARGS=--hint\n"
    assert [line[:2] for line in puzzle()[1].splitlines() if line[:2].isdigit()] == list(FOUND)
    assert puzzle("01", "--check") == (2, "puzzle.py: error: puzzle 01 is not begun: make puzzle-01\n")
    assert symptom in puzzle("01")[1] and wrong in (planted := script.read_text())
    assert puzzle("01", "--check") == (1, f"not solved; the symptom was: {symptom}\n{help}")
    assert [puzzle("01", "--hint")[1].count(" of 2: ") for _ in range(3)] == [1, 2, 2]

    script.write_text(planted.replace(wrong, "1 / 0"))
    status, printed = puzzle("01", "--check")
    assert puzzle()[1].splitlines()[0].endswith("  begun")
    assert status == 1 and printed.startswith(f'  File "{project}/tests/')
    assert printed.endswith("ZeroDivisionError: division by zero\nnot solved; an error ended the test\n")

    script.write_text(planted.replace(wrong, right))
    assert "is as you left it" in puzzle("1")[1] and right in script.read_text()
    assert puzzle("01", "--check") == (0, f"solved\nthe bug: {about['name']}\nits effect: {about['harm']}\n")
    assert puzzle()[1].splitlines()[0].endswith("  solved")
    printed = puzzle("01", "--answer")[1]
    assert f"\n-        {wrong}" in printed and f"\n+        {ours}" in printed and right in script.read_text()
    assert puzzle("01", "--again")[0] == 0 and script.read_text() == planted
    assert puzzle()[1].splitlines()[0].endswith("  begun")


@pytest.mark.slow
@pytest.mark.parametrize("number", FOUND)
def test_the_check_fails_as_planted_and_passes_for_another_right_solution(number, puzzle, project):
    puzzle(number)
    script = project / "puzzles" / number / place(number, FOUND[number]).name
    said = f"not solved; the symptom was: {FOUND[number]['puzzle']['symptom']}\n"
    assert puzzle(number, "--check") == (1, f"{said}for a hint: make puzzle-{number} ARGS=--hint\n")
    if number in OTHER:
        text, (wrong, right) = script.read_text(), OTHER[number]
        assert text.count(wrong) == 1
        script.write_text(text.replace(wrong, right))
        assert puzzle(number, "--check")[0] == 0


def test_bad_input(refused):
    assert list(FOUND) == [f"{number:02d}" for number in range(1, 13)]
    refused("dev/puzzle.py", "13", says="there is no puzzle 13: expected 01 to 12$")
    refused("dev/puzzle.py", "tying", says="there is no puzzle tying: ")
    refused("dev/puzzle.py", "--hint", says="which puzzle?")
