PYTHON ?= python3
# The calls in the pages and notebooks, such as diff("06"), are functions of these modules.
COG = .venv/bin/python -m cogapp -PUn utf-8 -p "from dev.diff import *; from measure.tables import *; from dev.puzzle import puzzles"
# Three workers for two cores, because tests often wait for a process that they started.
PYTEST = .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

.SUFFIXES: # disables the built-in rules, which would try to link diff-03 from diff-03.o

help:
	@echo 'make run         train with rung 10; ARGS="--steps 200" passes options to the script, as in every target with ARGS'
	@echo 'make diff-03     show what rung 03 changes; also diff-ddp, diff-long, diff-train, and side rungs, such as diff-muon'
	@echo 'make puzzle      list twelve scripts with a bug to find; make puzzle-01 begins the first'
	@echo 'make docs        build the site in docs/site/; needs Python 3.11 or later'
	@echo 'make ladder      measure the scripts on this machine; ARGS="--profile --budget 30"'
	@echo 'make timeline    draw and list the kernels of one step from the latest profile; ARGS=speedup_06_flash_attn.py'
	@echo 'make quality     measure the held-out loss of each rung on nano over five seeds; takes about an hour on a CPU'
	@echo 'make counts      count the FLOPs, bytes and kernels of each rung, without a GPU; ARGS="--card 4090 --batch-size 16"'
	@echo 'make compare     print one measurement, or two side by side; ARGS="results/ONE results/OTHER"'
	@echo 'make plot        plot the losses of runs from their log files; ARGS="runs/a.jsonl runs/b.jsonl"'
	@echo 'make test        run lint and most tests, in 4 minutes; run this before every commit'
	@echo 'make test-all    run every test, as CI does'
	@echo 'make propagate   carry an edit of one script into the scripts that build on it; ARGS=baseline.py'
	@echo 'make figures     write the diffs, tables and plots of the README, the pages and the notebooks from the scripts and results/'

run: .venv/run
	.venv/bin/python speedup_10_fused_adamw.py $(ARGS)

diff-%:
	@$(PYTHON) -m dev.diff $*

puzzle: .venv/dev
	@.venv/bin/python -m dev.puzzle $(ARGS)

puzzle-%: .venv/dev
	@.venv/bin/python -m dev.puzzle $* $(ARGS)

docs: .venv/docs
	@test -x .venv/bin/zensical || { echo 'make docs needs Python 3.11 or later'; exit 1; }
	cd docs && ../.venv/bin/zensical build --strict
	@echo 'To read the site: cd docs && ../.venv/bin/zensical serve'

ladder: .venv/dev
	.venv/bin/python -m measure.run $(ARGS)

timeline: .venv/dev
	.venv/bin/python -m measure.timeline $(ARGS)

quality: .venv/dev
	.venv/bin/python -m measure.quality $(ARGS)

counts: .venv/dev
	.venv/bin/python -m measure.counts $(ARGS)

compare: .venv/dev
	.venv/bin/python -m measure.tables $(ARGS)

plot: .venv/dev
	.venv/bin/python -m measure.plots $(ARGS)

test: .venv/dev lint
	$(PYTEST) -m 'not slow' $(ARGS)

test-all: .venv/dev lint
	$(PYTEST) $(ARGS)

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

propagate: .venv/dev
	.venv/bin/python -m dev.propagate $(ARGS)

figures: .venv/dev
	.venv/bin/python -m measure.tables --plots
	$(COG) -r --verbosity=1 README.md 'docs/pages/*.md' 'docs/pages/rungs/*.md' 'notebooks/*.ipynb'

.venv/run: requirements.txt
	@echo 'Installing PyTorch, transformers and tiktoken in .venv: a download of 2.8 GB on Linux, 0.2 GB on macOS'
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m dev.install requirements.txt
	@touch $@

.venv/dev: requirements-dev.txt docs/requirements.txt pretrain/requirements.txt .venv/run
	@echo 'Installing the packages for tests, measurements and pages in .venv: a download of 0.2 GB'
	@.venv/bin/python -m dev.install requirements-dev.txt
	@touch $@

.venv/docs: docs/requirements.txt
	@echo 'Installing Zensical, which builds the site, in .venv: a download of 20 MB'
	@test -d .venv || $(PYTHON) -m venv .venv
	@.venv/bin/python -m dev.install docs/requirements.txt
	@touch $@

.PHONY: compare counts docs figures help ladder lint plot propagate puzzle quality run test test-all timeline
