PYTHON ?= python3
# Three at a time, for two cores: one of them is often waiting.
PYTEST = .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

.SUFFIXES: # no built-in rules: they would link diff- from diff-.o

help:
	@echo 'make run         train with rung 10; ARGS="--steps 200" passes options on, as in all that have ARGS'
	@echo 'make diff-03     what rung 03 changes; diff-ddp, diff-long, diff-train, diff-fsdp, diff-fp16'
	@echo 'make docs        the site: every diff as a page, in docs/site/'
	@echo 'make ladder      measure the scripts on this machine; ARGS="--profile --budget 30"'
	@echo 'make counts      FLOPs, bytes and kernels of each rung, by count, without a GPU; ARGS="--card 4090 --batch-size 16"'
	@echo 'make compare     two measurements side by side; ARGS="results/ONE results/OTHER"'
	@echo 'make plot        the losses of runs, from their logs; ARGS="runs/a.jsonl runs/b.jsonl"'
	@echo 'make test        lint and most tests, 5 to 9 minutes: before every commit'
	@echo 'make test-all    every test, as CI does'
	@echo 'make propagate   carry an edit into the scripts that stand on a file; ARGS=baseline.py'
	@echo 'make figures     write tables and plots into README.md and docs/pages/, from the scripts and results/'

run: .venv/run
	.venv/bin/python speedup_10_fused_adamw.py $(ARGS)

diff-%:
	@$(PYTHON) dev/diff.py $*

docs: .venv/dev
	.venv/bin/python docs/build_site.py

ladder: .venv/dev
	.venv/bin/python measure/measure.py $(ARGS)

counts: .venv/dev
	.venv/bin/python measure/counts.py $(ARGS)

compare: .venv/dev
	.venv/bin/python measure/compare.py $(ARGS)

plot: .venv/dev
	.venv/bin/python measure/plot.py $(ARGS)

test: .venv/dev lint
	$(PYTEST) -m 'not slow' $(ARGS)

test-all: .venv/dev lint chromium
	$(PYTEST) $(ARGS)

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

propagate: .venv/dev
	.venv/bin/python dev/propagate.py $(ARGS)

figures: .venv/dev
	.venv/bin/python measure/publish.py $(ARGS)

.venv/run: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -r requirements.txt
	@touch $@

.venv/dev: requirements-dev.txt pretrain/requirements.txt .venv/run
	.venv/bin/python -m pip install -r requirements-dev.txt
	@touch $@

# The site is tested in a browser where there is one. CI has none to begin with.
chromium:
	@if [ "$$CI" = true ] && ! command -v chromium && ! command -v google-chrome; then \
		apt-get update && apt-get install -y --no-install-recommends chromium; \
	fi

.PHONY: chromium compare counts docs figures help ladder lint plot propagate run test test-all
