# Every target makes and fills the virtual environment first: Python 3.11 to 3.13, make and g++ are enough.
VENV ?= .venv
EXTRAS ?= test,dev
ARGS ?=
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.installed
CODE := finetune tests tools $(wildcard benchmarks notebooks)

# What `make quickstart` runs.
QUICKSTART = $(PYTHON) tools/quickstart.py

# The Python that the environment is made of: the first of these that is new enough.
SUITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
BASE_PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(SUITS)' 2>/dev/null && echo $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help install quickstart check test test-gpu soak format clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\): .*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

install: $(READY)  ## Make and fill the virtual environment

quickstart: $(READY)  ## Train the embedded model here, and show its answers before and after
	$(QUICKSTART)

check: $(READY)  ## Format, lint, import layers, types, spelling
	$(PYTHON) -m ruff format --check $(CODE)
	$(PYTHON) -m ruff check $(CODE)
	$(PYTHON) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
	$(PYTHON) -m mypy
	$(PYTHON) -m codespell_lib $(CODE) conf recipes docs $(wildcard *.md)

test: check  ## The checks, then all tests that a CPU can run in minutes (ARGS="-k words" selects)
	$(PYTHON) -m pytest -n 2 --dist loadfile $(ARGS)

test-gpu: $(READY)  ## The tests that need one or more GPUs
	$(PYTHON) -m pytest -m "gpu or multigpu" $(ARGS)

soak: $(READY)  ## The full matrices: every strategy, method and process count
	$(PYTHON) -m pytest -m soak --timeout 7200 $(ARGS)

format: $(READY)  ## Write what `make check` asks for, where a tool can
	$(PYTHON) -m ruff check --fix $(CODE)
	$(PYTHON) -m ruff format $(CODE)

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .ci/venv dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(READY): pyproject.toml constraints.txt tools/setup_venv.py
	@test -n "$(BASE_PYTHON)" || { echo "Python 3.11, 3.12 or 3.13 is needed; name one: make BASE_PYTHON=/path/to/python"; exit 2; }
	@command -v g++ >/dev/null || { echo "g++ is needed (DeepSpeed compiles its CPU optimizer with it)"; exit 2; }
	$(BASE_PYTHON) tools/setup_venv.py $(VENV) --extras "$(EXTRAS)"
	@touch $@
