PYTHON ?= python3
# Three at a time, for two cores: one of them is often waiting.
PYTEST = .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

help:
	@echo 'make run       train with speedup_10_fused_adamw.py; ARGS="--steps 200" passes options on'
	@echo 'make test      lint and run the tests that take minutes at most: before every commit'
	@echo 'make test-all  every test, as CI does'
	@echo 'make ladder    measure the twelve scripts on this machine; ARGS="--profile --budget 30"'
	@echo 'make readme    write the table of rungs into README.md from ladder.toml'
	@echo 'make docs-figures  write what was measured into README.md and docs/img/; ARGS=results/FOLDER'
	@echo 'make docs      the site: every diff as a page, in docs/site/'
	@echo 'make diff-03   what rung 03 changes; diff-ddp, diff-fsdp, diff-fp16, diff-long, diff-train'

run: .venv/run
	.venv/bin/python speedup_10_fused_adamw.py $(ARGS)

test: .venv/dev lint
	$(PYTEST) -m 'not slow' $(ARGS)

test-all: .venv/dev lint chromium
	$(PYTEST) $(ARGS)

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

ladder: .venv/dev
	.venv/bin/python tools/measure.py $(ARGS)

docs-figures: .venv/dev
	.venv/bin/python tools/render.py $(ARGS)

docs: .venv/dev
	.venv/bin/python tools/docs.py

readme: .venv/dev
	.venv/bin/python tools/ladder.py

# The docstring of the rung, then the diff of what follows it. Words are compared, and whole lines if most of them are new.
diff-%:
	@file=$$(ls speedup_$*_*.py $*_run.py branches/$*_*.py pretrain/$*.py pretrain/$*_*.py 2>/dev/null); \
	if [ -z "$$file" ]; then echo 'there is no rung $*: make diff-01, diff-02 and so on, diff-ddp, diff-fsdp, diff-fp16, diff-long, diff-train' >&2; exit 1; fi; \
	before=$$(awk -F'"' -v file="$$file" '/^file =/ {before = last; last = $$2} /^before =/ {before = $$2} last == file {print before}' ladder.toml | tail -1); \
	case $* in 06|ddp|fp16|fsdp|long|train) words= ;; *) words=--word-diff=color ;; esac; \
	folder=$$(mktemp -d); \
	mkdir $$folder/branches $$folder/pretrain; \
	for side in $$before $$file; do sed '1,/^"""$$/d' $$side > $$folder/$$side; done; \
	sed '/^"""$$/q' $$file; \
	cd $$folder && git --no-pager diff --no-index --color=always $$words $$before $$file; \
	rm -r $$folder

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

.PHONY: chromium docs docs-figures help ladder lint readme run test test-all
