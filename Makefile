# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The tests start hundreds of processes of Python: with compiled modules one imports in half the time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help env demo docs test lint unit versions mutants gpu-test bench tables wheels release clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s "$$(printf '\t')"

env: $(STAMP)  ## create .venv and install the package with everything the tests need

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("warploom needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(STAMP)

demo: env  ## the whole path for attention, then tune a real Triton kernel, with no GPU
	$(BIN)/warploom doctor
	$(BIN)/warploom optimize attention --gpu h200 -o out/demo/attention
	$(BIN)/warploom tune examples/tune_gemm_leaky_relu.py:kernel --alias triton --measure model --search guided --budget 30s -o out/demo
	$(BIN)/warploom sass verify out/demo/original.cubin out/demo/tuned.cubin --alias triton
	@echo
	@echo "Attention from the program to the cubin: out/demo/attention/report.html"
	@echo "The tuned Triton cubin, its manifest and a readable diff lie in out/demo:"
	@ls out/demo

tables:  ## rewrite the README's tables from bench/results
	$(BIN)/python -m bench.tables

build/docs/.installed: pyproject.toml
	$(PYTHON) -m venv build/docs
	build/docs/bin/python -m pip install --quiet --disable-pip-version-check '.[docs]'
	@touch $@

docs: env build/docs/.installed  ## the documentation site with its report pages: build/site/index.html
	$(BIN)/python -m bench.reports
	$(BIN)/python -m bench.notebooks
	NO_MKDOCS_2_WARNING=1 build/docs/bin/python -m mkdocs build --strict

bench: env  ## measure the claims on this machine's GPU and write bench/results
	$(BIN)/python -m bench.sass_search

test: env lint unit  ## everything that needs no GPU: lint, types, import contract, tests

lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --threads
	$(BIN)/lint-imports

unit: env
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not gpu' --ignore=tests/gpu -n 2 --dist worksteal --durations=20

versions: env  ## the wheel, its commands and a part of the tests under the other Pythons of this computer (minutes)
	$(BIN)/python -m tests.versions

mutants: env  ## plant faults in the checkers, and see which the tests catch (a night)
	mkdir -p out
	$(BIN)/python -m tests.mutants --jobs 2 --json out/mutants.json

gpu-test: env  ## the tests marked gpu, on a machine with one
	$(BIN)/python -m pytest -m gpu

wheels: env  ## dist: warploom, and warploom-kernels with the machine code of its defaults (minutes)
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m warploom.flows.pack build/warploom-kernels
	rm -rf build/lib build/bdist.* build/warploom-kernels/build
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . ./build/warploom-kernels
	@ls -l dist

release: wheels  ## a dry run of a release: versions, wheels, notes; it uploads nothing
	$(BIN)/python -m bench.release

clean:  ## remove what the targets made, but not the environment
	rm -rf build dist out .pytest_cache .ruff_cache .hypothesis
