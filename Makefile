# Every target makes .venv if it is missing and installs what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# JAX's own threads and pytest-xdist share the cores; two workers fill a small machine.
WORKERS ?= 2

.PHONY: demo test test-newest lint docs numerics coverage mutants bench clean

demo: $(VENV)/.demo
	JAX_PLATFORMS=cpu $(BIN)/python -m ejkernel.demo

# What the newest release of JAX changes shows here first; it needs a newer Python than the oldest we run on.
# (PYENV_VERSION makes pyenv offer that Python; elsewhere it means nothing.)
NEWEST ?= PYENV_VERSION=3.12 python3.12
NEWEST_TESTS ?= tests

test: lint $(VENV)/.dev
	JAX_PLATFORMS=cpu XLA_FLAGS=--xla_backend_optimization_level=0 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests

test-newest: $(VENV)-newest/.dev
	JAX_PLATFORMS=cpu XLA_FLAGS=--xla_backend_optimization_level=0 $(VENV)-newest/bin/python -m pytest -n $(WORKERS) --dist worksteal $(NEWEST_TESTS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

numerics: $(VENV)/.dev
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.numerics

bench: $(VENV)/.dev
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(VENV)-newest site .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[layers,cli]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

$(VENV)-newest/.dev: pyproject.toml
	$(NEWEST) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade jax -e '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,docs]'
	touch $@
