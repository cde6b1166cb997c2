# Every target makes .venv if it is missing and installs what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# JAX's own threads and pytest-xdist share the cores; two workers fill a small machine.
WORKERS ?= 2

.PHONY: demo test newest test-newest test-newest-smoke lint docs numerics coverage mutants peers bench gpu tpu tpu-training mesh clean

demo: $(VENV)/.demo
	JAX_PLATFORMS=cpu $(BIN)/python -m examples.demo

# What the newest release of JAX changes shows here first; it needs a newer Python than the oldest we run on.
# (PYENV_VERSION makes pyenv offer that Python; elsewhere it means nothing.)
NEWEST ?= PYENV_VERSION=3.12 python3.12
PYTEST := pytest -n $(WORKERS) --dist worksteal
# The tests start dozens of interpreters. Where the environment has Python keep no bytecode, each would compile all of
# JAX's sources anew, for a second or two; so it is kept, in a folder of ours.
BYTECODE := PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX='$(CURDIR)/build/bytecode'

test: lint $(VENV)/.dev
	$(BYTECODE) JAX_PLATFORMS=cpu $(BIN)/python -m $(PYTEST) tests

newest: $(VENV)-newest/.dev

ON_NEWEST := $(BYTECODE) JAX_PLATFORMS=cpu $(VENV)-newest/bin/python -m $(PYTEST)
test-newest: newest
	$(ON_NEWEST) tests

# The part of it that CI runs: what rests most on JAX, namely transformations, meshes, layers and Triton's interpreter.
# The longest comes first.
SMOKE := parallel/test_parallel.py::test_on_virtual_devices[sharding-ring_shard_map] \
  test_import.py test_dispatch.py xla_utils/test_utils.py test_linear_attention.py::test_pinned_paths \
  test_attention.py::test_transformations test_flash_attention.py::test_transformations \
  layers/test_nnx_layers.py::test_prefill_and_steps_are_one_pass \
  kernels/linear_recurrence/test_triton_kernels.py::test_vmap[False]

test-newest-smoke: $(VENV)-newest/.test
	$(ON_NEWEST) $(addprefix 'tests/,$(addsuffix ',$(SMOKE)))

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

SITE ?= site

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir $(SITE)

numerics: $(VENV)/.dev
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.numerics

# Branch coverage of the whole suite; what is not counted, and why, stands in pyproject.toml.
coverage: $(VENV)/.dev
	rm -rf build/coverage
	JAX_PLATFORMS=cpu $(BIN)/coverage run -m $(PYTEST) tests
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Breaks the modules that guard everything else, one place at a time, and asks whether a test notices. Takes an hour or
# two; MUTANTS='--every 5' takes a fifth of them, MUTANTS=ejkernel._dispatch one module.
mutants: $(VENV)/.dev
	$(BIN)/python tests/mutants.py $(MUTANTS)

# The layers beside those of transformers and flash-linear-attention. It installs gigabytes, so CI leaves it out; the
# docs show what it wrote last. PIP_PEERS='--index-url …' may name an index that has PyTorch for the CPU alone.
peers: $(VENV)-peers/.peers
	JAX_PLATFORMS=cpu $(VENV)-peers/bin/python -m benchmarks.peers --json benchmarks/results/layers.json

bench: $(VENV)/.dev
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.spread_time --json benchmarks/results/spread_time.json

# On a machine with an NVIDIA GPU, with the JAX for its driver: the tests that need one, then every time that the pages
# show of one. GPU='--parts tests,layers --seconds 500' chooses parts and ends in time.
gpu: $(VENV)/.gpu
	$(BIN)/python -m benchmarks.gpu $(GPU)

# Compiles the TPU kernels for five generations with their own compiler, which needs no TPU, and writes what docs/tpu.md
# shows. An hour on two cores; interrupted, it goes on where it was.
TPU := JAX_PLATFORMS=cpu PYTHONPATH=. $(VENV)-tpu/bin/python -m benchmarks.tpu
tpu: $(VENV)-tpu/.installed
	$(TPU) --json benchmarks/results/tpu_compiled.json
	$(TPU) --schedule --json benchmarks/results/tpu_schedules.json
	$(TPU) --op delta_rule --json benchmarks/results/tpu_delta_rule_compiled.json
	$(TPU) --op delta_rule --schedule --json benchmarks/results/tpu_delta_rule_schedules.json
	$(TPU) --op convolution --json benchmarks/results/tpu_convolution_compiled.json
	$(TPU) --op convolution --schedule --json benchmarks/results/tpu_convolution_schedules.json

# The same for a training step on whole topologies, up to 256 chips, for docs/scaling.md.
tpu-training: $(VENV)-tpu/.installed
	PYTHONPATH=. $(VENV)-tpu/bin/python -m benchmarks.tpu_training --json benchmarks/results/tpu_training.json
	PYTHONPATH=. $(VENV)-tpu/bin/python -m benchmarks.tpu_phases --json benchmarks/results/tpu_phases.json

# What each of several GPUs and TPUs runs and moves of a sharded call, for docs/scaling.md and docs/tpu.md. The JAX of the
# first has a CUDA plugin that compiles for GPUs by their description; it installs gigabytes.
mesh: $(VENV)-cuda/.installed $(VENV)-tpu/.installed
	JAX_PLATFORMS=cpu PYTHONPATH=. $(VENV)-cuda/bin/python -m benchmarks.mesh gpu --json benchmarks/results/gpu_mesh.json
	JAX_PLATFORMS=cpu PYTHONPATH=. $(VENV)-tpu/bin/python -m benchmarks.mesh tpu --json benchmarks/results/tpu_mesh.json

clean:
	rm -rf $(VENV) $(VENV)-newest $(VENV)-peers $(VENV)-tpu $(VENV)-cuda build site .pytest_cache .mypy_cache .ruff_cache

# A new environment with the newest pip, which reads an index in a third of the time of one that is years old; where
# Python has no pip that could install it, the one that comes with Python.
define environment
$(1) -m venv --without-pip $(2)
$(1) -m pip --python $(2)/bin/python install --no-compile --quiet --disable-pip-version-check pip || $(1) -m venv $(2)
endef

$(VENV)/bin/python:
	$(call environment,$(PYTHON),$(VENV))

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml
	@echo "installing into $(VENV), which takes about half a minute"
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -e '.[layers,cli]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

$(VENV)-peers/.peers: pyproject.toml
	$(call environment,$(PYTHON),$(VENV)-peers)
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_PEERS) torch
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check -e '.[layers,peers]'
	touch $@

$(VENV)-newest/.test: pyproject.toml
	$(call environment,$(NEWEST),$(VENV)-newest)
	$(VENV)-newest/bin/python -m pip install --no-compile --quiet --disable-pip-version-check --upgrade jax -e '.[test]'
	touch $@

$(VENV)-newest/.dev: $(VENV)-newest/.test
	$(VENV)-newest/bin/python -m pip install --no-compile --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

CUDA ?= cuda13
$(VENV)/.gpu: $(VENV)/.dev
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check 'jax[$(CUDA)]' -e '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -e '.[dev,docs]'
	touch $@

$(VENV)-tpu/.installed: pyproject.toml
	$(call environment,$(PYTHON),$(VENV)-tpu)
	$(VENV)-tpu/bin/python -m pip install --quiet --disable-pip-version-check 'jax[tpu]' jaxtyping flax
	touch $@

$(VENV)-cuda/.installed: pyproject.toml
	$(call environment,$(NEWEST),$(VENV)-cuda)
	$(VENV)-cuda/bin/python -m pip install --quiet --disable-pip-version-check 'jax[cuda12]==0.11.*' -e '.[cuda,layers]'
	touch $@
