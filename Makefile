# Every target makes .venv if it is missing and installs what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# JAX's own threads and pytest-xdist share the cores; two workers fill a small machine.
WORKERS ?= 2

.PHONY: demo test lint docs bench clean

demo: $(VENV)/.demo
	JAX_PLATFORMS=cpu $(BIN)/python -m ejkernel.demo

test: lint $(VENV)/.dev
	JAX_PLATFORMS=cpu XLA_FLAGS=--xla_backend_optimization_level=0 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.dev
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[layers,cli]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,docs]'
	touch $@
