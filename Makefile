# Every target works on a fresh clone with Python 3.11 or newer, pip, make and a C compiler; the first one installs into .venv.

VENV := .venv
SOURCES := src:packages/ir/src:packages/ops/src:packages/capture/src:packages/compiler/src:packages/simulator/src:packages/runtime/src:packages/report/src:packages/autotune/src:packages/interop/src:packages/traces/src
PACKAGES := piper piper_ir piper_ops piper_capture piper_compiler piper_simulator piper_runtime piper_report piper_autotune piper_interop piper_traces
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
MANIFESTS := constraints.txt pyproject.toml VERSION
INSTALLED := $(VENV)/.installed

# What `make run` does; `make run RUN="... another command"` replaces it. With --no-kill at its end no worker is killed.
RUN ?= $(PY) examples/gpt_text.py
# More arguments for pytest: `make test ARGS="-k capture -x"`.
ARGS ?=
# Two processes, a file to each (conftest.py says in which order, and which files go together): the suite is as long as its CPU
# time, and two cores are what it is planned for.
PYTEST := $(PY) -m pytest -n 2 --dist loadfile --durations=10

# The first interpreter that is new enough, unless the caller names one: `make test PYTHON=/path/to/python3.12`.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
PIP := $(PY) -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt
PIP_FAILED := { echo "make: pip could not install the above; nothing is lost, the next make goes on from here" >&2; exit 1; }

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install run check test test-long bench gpu-check gallery docs mutants zoo interop hosts clean FORCE

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

install: $(INSTALLED) ## create .venv with everything pinned (the other targets do it when needed)

run: $(INSTALLED) ## profile, tune, confirm and train a small GPT on two Ray workers; a report of it; go on after a kill
	$(RUN)

check: $(INSTALLED) ## ruff (lint and format), mypy --strict on the packages and src/piper, mypy on examples as a user runs it
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	MYPYPATH=$(SOURCES) $(PY) -m mypy --config-file= --warn-unused-ignores --ignore-missing-imports --follow-imports=silent examples tests/house/public_types.py

test: $(INSTALLED) ## the test suite, without what is marked long or bench
	$(PYTEST) --timeout=300 -m "not long and not bench" $(ARGS)

test-long: $(INSTALLED) ## the whole suite, long tests too, with fresh random examples
	$(PYTEST) --timeout=3600 -m "not bench" --hypothesis-profile=long $(ARGS)

bench: $(INSTALLED) ## measure: a CSV file and a table with machine and date
	$(PY) benchmarks/run.py $(ARGS)

gpu-check: $(INSTALLED) ## what one CUDA device can prove: a table to paste; without a device it says so
	$(PY) benchmarks/gpu_check.py $(ARGS)

gallery: $(INSTALLED) ## docs/schedules.md: all schedules drawn, with their numbers; docs/why.md: an explained step; README's picture
	$(PY) docs/gallery.py
	$(PY) docs/why.py
	$(PY) docs/overview.py

docs: $(INSTALLED) ## build/docs: a reference of the API, made of the docstrings (a package)
	@$(PIP) --no-build-isolation -e '.[docs]' || $(PIP_FAILED)
	$(PY) -m pdoc --docformat google --output-directory build/docs $(PACKAGES)

mutants: $(INSTALLED) ## seed faults into compiler and runtime; a table of which check catches each
	$(PY) -m tests.faults.mutants $(ARGS)

zoo: $(INSTALLED) ## train public models on two stages beside plain PyTorch: the table of docs/models.md (packages, an hour and more)
	PYTHONPATH=. $(PY) -m tests.zoo.run $(ARGS)

interop: $(INSTALLED) ## let the parsers of torchtitan and other systems judge imports and exports (packages, some minutes)
	$(PY) -m tests.interop.run $(ARGS)

hosts: $(INSTALLED) ## train on machines that fail: network namespaces (root, iproute2), a Slurm of one node (slurmctld, slurmd, munge)
	$(PY) -m pytest -m "" -ra --durations=10 tests/hosts $(ARGS)

clean: ## remove .venv, caches and build leftovers
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +

# An environment knows its own path: in a tree that was moved or copied it would import the old tree, so it is made anew there.
ifneq ($(wildcard $(INSTALLED)),)
ifneq ($(shell cat $(INSTALLED)),$(CURDIR))
$(VENV)/.created: FORCE
endif
endif
FORCE:

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer on PATH; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: $(PYTHON) is not Python 3.11 or newer; name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "make: $(PYTHON) cannot create environments (no venv or ensurepip module); on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "creating $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@

# torch first and alone, so that nothing else chooses its build; then the build backend in the version of constraints.txt, which
# build isolation would not take; then Piper with what it requires. The finder of an editable install comes after the path, on
# which a folder named piper beside a script (a clone, say) would be found first as a package without code: hence the paths.
$(INSTALLED): $(VENV)/.created $(MANIFESTS)
	@echo "installing torch (a large download when it is not there yet)"
	@$(PIP) torch==2.13.0 || $(PIP_FAILED)
	@echo "installing Piper and the development tools"
	@$(PIP) setuptools || $(PIP_FAILED)
	@$(PIP) --no-build-isolation -e '.[dev]' || $(PIP_FAILED)
	@for folder in $(subst :, ,$(SOURCES)); do echo "$(CURDIR)/$$folder"; done \
		> "$$($(PY) -c 'import site; print(site.getsitepackages()[0])')/piper-sources.pth"
	@echo "$(CURDIR)" > $@
