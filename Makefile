# Each target sets up .venv on first use, with pip and the exact versions of constraints.txt, and again when
# pyproject.toml or constraints.txt changes. Needs GNU make and Python >= 3.11.
#
#   make demo       four peers train one model on this machine     DEMO_ARGS='--plain --steps 40'
#   make test       all tests                                      PYTEST_ARGS='tests/unit -x'
#   make simulate   the whole simulation of dying peers, which     SIMULATE_ARGS='random --seeds 100'
#                   make test plays a sample of: up to an hour
#   make check      lint, format, types, layers, docs
#   make docs       the documentation, into site/
#   make clean      remove .venv and everything generated

PYTHON ?= python3
DEMO_ARGS ?=
PYTEST_ARGS ?=
SIMULATE_ARGS ?=

# Works from any directory: make -f path/to/Makefile.
ROOT := $(dir $(lastword $(MAKEFILE_LIST)))
IN_ROOT := cd '$(ROOT)' &&
VENV_PYTHON := .venv/bin/python
INSTALLED := $(ROOT).venv/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test simulate check docs clean

help:
	@sed -n '3,$$ { /^#   /!d; s/^#   //; p; }' '$(ROOT)Makefile'

setup: $(INSTALLED)

$(INSTALLED): $(ROOT)pyproject.toml $(ROOT)constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'swarmavg needs Python 3.11 or newer: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	$(IN_ROOT) $(PYTHON) -m venv .venv
	$(IN_ROOT) $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench,uvloop]'
	@touch '$@'

demo: setup
	$(IN_ROOT) $(VENV_PYTHON) -m swarmavg.cli.main demo $(DEMO_ARGS)

# One thread per process: the tests start many processes, which would otherwise fight for the cores.
test: setup
	$(IN_ROOT) OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest $(PYTEST_ARGS)

simulate: setup
	$(IN_ROOT) OMP_NUM_THREADS=1 $(VENV_PYTHON) -m swarmavg.testing.simulate $(SIMULATE_ARGS)
	$(IN_ROOT) SWARMAVG_SIMULATE=all OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest -s \
	    tests/integration/test_round_processes.py tests/integration/test_leaving.py tests/simulation/test_leaving_bound.py

check: setup
	$(IN_ROOT) .venv/bin/ruff check
	$(IN_ROOT) .venv/bin/ruff format --check
	$(IN_ROOT) .venv/bin/mypy
	$(IN_ROOT) .venv/bin/lint-imports
	$(IN_ROOT) NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

docs: setup
	$(IN_ROOT) NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

clean:
	$(IN_ROOT) rm -rf .venv site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
