"""Code imports only from permitted folders, each folder's README states its purpose, and all mentioned paths exist.

The programs in `pretrain/`, `measure/` and `docs/` are also run without the folders from which they must not import.
"""

import ast
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, copy_project, save_gpt2
from ladder import PLAIN_GIT, read_toml
from packaging.requirements import Requirement

LADDER = "the ladder"  # the scripts in the root folder
MAY_READ = {
    LADDER: set(),
    "branches": set(),
    "pretrain": {"pretrain"},
    "dev": {"dev", LADDER},
    "measure": {"measure", "dev", LADDER},
    "docs": {"docs", "measure", "dev"},
    "notebooks": {"notebooks", "docs", "dev"},
    "tests": {"tests", "notebooks", "docs", "measure", "dev", "pretrain", "branches", LADDER},
}
# Paths that commands or tests create, and placeholders for such paths.
MADE = r"docs/site\b|docs/pages/rungs/speedup_11|pretrain/fineweb10B|measure/counted\.py|"
MADE += r"results/(FOLDER|ONE|OTHER|<device>-<date>|\*|made-up|empty|nowhere)"


@pytest.fixture(scope="module")
def tracked():
    """Return the files that git tracks and the new files that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, env=PLAIN_GIT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


def part(file):
    """Return the top-level folder of a file, or LADDER for a file in the root folder."""
    return Path(file).parts[0] if "/" in file else LADDER


def reads(source, files):
    """Return the top-level folders from which a program imports, with LADDER for the root folder."""
    homes = {Path(file).stem: part(file) for file in files if file.endswith(".py") and file.count("/") <= 1}
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        found |= {homes[name.split(".")[0]] for name in names if name.split(".")[0] in homes}
    return found


def test_a_folder_imports_only_from_those_that_it_may_read(tracked):
    programs = [file for file in tracked if file.endswith(".py")]
    assert {part(file) for file in programs} == set(MAY_READ)
    for file in programs:
        too_much = reads((ROOT / file).read_text(encoding="utf-8"), programs) - MAY_READ[part(file)]
        assert not too_much, f"{file} imports from {too_much}"


def test_an_import_that_points_the_wrong_way_is_seen(tracked):
    assert reads("from conftest import ROOT", tracked) == {"tests"}
    assert reads("def later():\n    import speedup_02_tf32, torch", tracked) == {LADDER}


def without(folder, *kept):
    """Copy only the files and folders in `kept` from the project and return the copy."""
    root = copy_project(folder / "ladder")
    for path in root.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return root


def test_pretrain_runs_with_nothing_of_the_project_but_text_and_tokenizer(run, tmp_path):
    root, model = without(tmp_path, "pretrain", "input.txt", "tokenizer"), save_gpt2(tmp_path / "gpt2")[0]
    for words in (
        ["sample.py", model, "--tokens", 2],
        ["export_hf.py", model, tmp_path / "exported"],
        ["hellaswag.py", "--help"],
        ["fineweb.py", root / "input.txt", "--out", tmp_path / "shards"],
        ["train.py", "--help"],
        ["long_run.py", "--model", "nano", "--steps", 1, "--seq-len", 16, "--total-batch-size", 64, "--device", "cpu"],
    ):
        done = run(f"pretrain/{words[0]}", *words[1:], folder=root, TORCH_COMPILE_DISABLE="1")
        assert done.returncode == 0, done.stderr


def test_the_site_and_the_measuring_do_without_the_tests_and_the_folders_above_them(tmp_path):
    """The site builds a diff without tests/. The measuring programs start without tests/, docs/ and pretrain/.

    The test keeps the scripts that ladder.toml lists because the site reads them as text.
    """
    root = copy_project(tmp_path / "ladder")
    shutil.rmtree(root / "tests")
    for path in (*root.glob("pretrain/*.py"), *root.glob("branches/*.py")):
        if path.relative_to(root).as_posix() not in (root / "ladder.toml").read_text(encoding="utf-8"):
            path.unlink()
    look = (
        "import sys; sys.path.insert(0, 'docs'); import build_site; print(len(build_site.Site().diff(*sys.argv[1:])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", look, "baseline.py", "ddp_run.py"], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0 and int(done.stdout) > 1000, done.stderr
    shutil.rmtree(root / "docs")
    shutil.rmtree(root / "pretrain")
    for program in ("measure", "roof", "peers", "kernels", "compare", "plot", "machine", "allreduce", "attention"):
        done = subprocess.run(
            [sys.executable, f"measure/{program}.py", "--help"], cwd=root, capture_output=True, text=True
        )
        assert done.returncode == 0 or "error: expected a script to run, not --help" in done.stderr, done.stderr


def test_every_folder_has_a_readme_of_one_screen(tracked):
    folders = {part(file) for file in tracked} - {LADDER, "results"}
    for folder in sorted(name for name in folders if not name.startswith(".")):
        lines = (ROOT / folder / "README.md").read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("# ") and len(lines) <= 40, folder
        programs = [file for file in tracked if re.fullmatch(rf"{folder}/[a-z]\w*\.(py|sbatch)", file)]
        named = "\n".join(lines)
        missing = [file for file in programs if Path(file).name not in named and not file.startswith("tests/test_")]
        assert not missing, f"{folder}/README.md does not name {missing}"


def test_uv_and_pip_take_the_versions_that_the_tests_run_with():
    """Each pinned version is within its range in pyproject.toml, which pins torch to the same version."""
    project = read_toml("pyproject.toml")
    ranges = [*project["project"]["dependencies"], *itertools.chain(*project["dependency-groups"].values())]
    files = ROOT / "requirements.txt", ROOT / "requirements-dev.txt", ROOT / "pretrain" / "requirements.txt"
    lines = [line for file in files for line in file.read_text().splitlines() if "==" in line.partition("#")[0]]
    pins = [Requirement(line) for line in lines]
    for needed in map(Requirement, ranges):
        versions = [next(iter(pin.specifier)).version for pin in pins if pin.name == needed.name]
        assert versions and all(needed.specifier.contains(version) for version in versions), needed
    assert project["tool"]["uv"]["constraint-dependencies"] == [str(pin) for pin in pins if pin.name == "torch"]
    assert {pin.name for pin in pins} == {needed.name for needed in map(Requirement, ranges)}


def test_no_file_is_a_symbolic_link(tracked):
    assert [name for name in tracked if (ROOT / name).is_symlink()] == []


def texts(tracked):
    """Yield (file, text) for hand-written files, excluding results that programs wrote."""
    for name in tracked:
        if name != "tests/test_layout.py" and name.endswith(
            (".py", ".schema.json", ".md", ".toml", ".sbatch", ".html", ".css", ".js", ".yml", "Makefile")
        ):
            if not re.match("results/.*/", name):
                text = (ROOT / name).read_text(encoding="utf-8")
                yield name, re.sub(r"<!-- results, .*?<!-- end of", "", text, flags=re.DOTALL)


PATH = re.compile(
    r"(?<![\w/.$*}\])-])(?:tools|measure|dev|docs|tests|pretrain|branches|results|tokenizer)/[\w<][\w./<>*-]*"
)


def test_every_path_that_a_text_names_is_there(tracked):
    here = set(tracked) | {str(parent) for name in tracked for parent in Path(name).parents}
    missing = []
    for name, text in texts(tracked):
        for path in PATH.findall(text):
            path = re.sub(r"[.:,/]+$", "", path)
            there = path in here or ("*" in path and any(ROOT.glob(path)))
            if not there and not re.match(MADE, path):
                missing.append((name, path))
    assert not missing


def test_every_link_of_a_readme_leads_to_a_file(tracked):
    broken = []
    for name in tracked:
        if name.endswith(".md"):
            for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", (ROOT / name).read_text(encoding="utf-8")):
                if "{" not in link and not link.startswith("http") and not (ROOT / name).parent.joinpath(link).exists():
                    broken.append((name, link))
    assert not broken
