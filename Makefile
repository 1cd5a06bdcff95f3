# `make demo` and `make test` are all it takes on a fresh machine: each sets up .venv first, once.
SHELL := /bin/bash
ROOT := $(dir $(abspath $(lastword $(MAKEFILE_LIST))))
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread for each process: tests and benchmarks parallelise over processes.
export OMP_NUM_THREADS ?= 1
export MPLBACKEND ?= Agg

.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(ROOT)Makefile | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

# Installed anew only when the package's requirements change, or what installation copies.
$(VENV)/.installed: setup.cfg setup.py sb3_ben/zoo/_hook.py pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[tests,docs]"
	touch $@

install: $(VENV)/.installed  ## create .venv and install everything

demo: $(VENV)/.installed  ## the main job: the tiger problem, a table and a picture
	$(BIN)/python -m benchmarks.demo

test: $(VENV)/.installed lint type pytest  ## lint, type-check and run all tests

pytest: $(VENV)/.installed  ## run the tests only
	$(BIN)/python -m pytest -n 2 --dist loadgroup

coverage: $(VENV)/.installed  ## run the tests and say which lines they leave out; fails below 95 %
	$(BIN)/python -m pytest -n 2 --dist loadgroup --cov=sb3_ben --cov-report=term-missing:skip-covered --cov-fail-under=95

lint: $(VENV)/.installed  ## check style with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/.installed  ## type-check every file with mypy
	$(BIN)/mypy

format: $(VENV)/.installed  ## rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: $(VENV)/.installed  ## speed of the environments, scores of the oracles, cost of the start-up hook
	$(BIN)/python -m benchmarks.env_speed
	$(BIN)/python -m benchmarks.startup
	$(BIN)/python -m benchmarks.oracle_search_and_rescue

compare: $(VENV)/.installed  ## BEN, RecurrentPPO and BootDQN+prior side by side in TensorBoard (ARGS="--env ... --seeds ...")
	$(BIN)/python -m benchmarks.compare $(ARGS)

screenshot: $(VENV)/.installed  ## a picture of that TensorBoard for the documentation
	$(BIN)/python -m benchmarks.screenshot $(ARGS)

docs: $(VENV)/.installed  ## build the documentation into docs/_build
	$(BIN)/python -m sphinx -q -W -b html docs docs/_build

clean:  ## remove .venv and everything generated
	rm -rf $(VENV) build dist *.egg-info docs/_build results .mypy_cache .ruff_cache .pytest_cache

.PHONY: help install demo test pytest coverage lint type format benchmark compare screenshot docs clean
