# Every target builds the environment it needs. `make demo` and `make test` work as the first
# command typed on a fresh clone; the first one installs for a minute or two, later ones start at once.
#
#   make PYTHON=python3.12 test        another Python (the environment is built once: `make clean`)
#   make PYTHON=python3 test-gpu       the Python and torch that are there, no environment: so does
#                                      bench-gpu. PYTHON=.venv/bin/python takes the environment's
#   make PAIRS='3.12:2.9' test-versions
#                                      other pairs of Python and torch than those of tests/versions.py
#   make PIP_ARGS='--extra-index-url URL' test
#                                      another package index as well: torch's own has CPU builds

PYTHON ?= python3
PIP_ARGS ?=
MINUTES ?= 60
TESTS ?=
PAIRS ?=
VENV := .venv
BIN := $(VENV)/bin
# Exists only where the whole installation went well, and is as old as what it was made from.
STAMP := $(VENV)/installed

# Two processes of a test would otherwise start a thread per core each.
export OMP_NUM_THREADS = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Ranks import one test file after the other: all but the first read what that one has compiled.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-slow test-stores test-versions test-peers test-gpu pages soak docs map package lint style
.PHONY: types contracts
.PHONY: check format bench bench-gpu clean

help:
	@echo 'make demo       train on 4 ranks, kill, resume on 2 and 3 with other runtimes, convert, find damage'
	@echo 'make test       the quick tests and the examples in docstrings (a few minutes)'
	@echo 'make test-all   more cases of the same tests: what CI runs'
	@echo 'make check      before a proposal: ruff, mypy, import contracts, then make test'
	@echo 'make lint       make check without the tests'
	@echo 'make format     put imports, layout and fixable findings right'
	@echo 'make test-slow  the tests that make test-all leaves out: every combination, long runs'
	@echo 'make test-stores  the tests of stores on Ceph, Azurite and others, which it installs'
	@echo 'make test-versions  the tests on other versions of Python and torch, which it installs'
	@echo 'make test-peers  the tests beside DeepSpeed, torchao and others, which it installs'
	@echo 'make test-gpu   the tests that need a GPU, with the torch of PYTHON=python3; no downloads'
	@echo 'make pages      the commands of README and of the how-to pages, with their outputs'
	@echo 'make soak       random commands, kills and faults, MINUTES=60 on disk and over S3 each'
	@echo 'make bench      a short form of the benchmarks, beside other libraries'
	@echo 'make bench-gpu  saves, stalls and loads of tensors on a GPU, beside DCP'
	@echo 'make map        every file of the product with its first line'
	@echo 'make docs       the documentation site, in site/; checks links and spelling'
	@echo 'make package    a release in dist/, tried in an empty environment'
	@echo 'make clean      remove the environment and every cache'

$(STAMP): pyproject.toml constraints.txt
	@echo 'Building $(VENV) with $(PYTHON), once: a minute or two.'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[test]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest

test-all: $(STAMP)
	$(BIN)/python -m pytest -m 'not slow and not gpu' $(TESTS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

test-stores: $(STAMP)
	tests/stores/install.sh $(BIN)/python
	CKPT_STORES_REQUIRED=1 $(BIN)/python -m pytest -m '' tests/stores

test-versions:
	$(PYTHON) tests/versions.py $(PAIRS)

test-peers:
	PYTHON=$(PYTHON) $(PYTHON) tests/with_peers.py

# No module of torch may start CUDA in the process that ranks are forked from.
test-gpu:
	CKPT_GPU_REQUIRED=1 PYTHONPATH=$(CURDIR) PYTORCH_NVML_BASED_CUDA_CHECK=1 \
		$(PYTHON) -m pytest -m gpu -W default tests/gpu

pages: $(STAMP)
	$(BIN)/python -m pytest -q -m slow tests/docs -k 'not (commands and (start or resume or preemption or branch))'

package: $(STAMP)
	$(BIN)/python tests/packages.py
	$(BIN)/python .ci/dist.py

map:
	@$(PYTHON) .ci/map.py

docs:
	PYTHON=$(PYTHON) $(PYTHON) .ci/site/build.py

soak: $(STAMP)
	$(BIN)/python tests/faults/soak.py --minutes $(MINUTES) --store disk
	$(BIN)/python tests/faults/soak.py --minutes $(MINUTES) --store s3

lint: style types contracts

style: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

check: lint test

format: $(STAMP)
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

bench: $(STAMP)
	$(BIN)/python benchmarks/all.py --short

bench-gpu:
	PYTHONPATH=$(CURDIR) $(PYTHON) benchmarks/gpu.py

clean:
	rm -rf $(VENV) .venvs build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
