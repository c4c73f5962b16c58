PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FAST := $(VENV)/.fast
INSTALLED := $(VENV)/.installed
PINNED := --constraint constraints.txt --build-constraint constraints.txt

# The tensors here are small, and some tests run two ranks: more threads than this only fight for the cores.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
# Each process that a test starts would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

# tests/conftest.py says which tests stay together and which go first.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder --durations 10

.PHONY: help install test test-fast test-long test-outside test-programs lint format demo docs clean

help:
	@echo 'make demo     a first training run: a table and a picture, a minute; options by ARGS="--steps 200"'
	@echo 'make test     the whole suite, on two cores; more by WORKERS=4'
	@echo 'make test-fast'
	@echo '              the core alone, for the inner loop: needs only torch; no ranks, nothing slow'
	@echo 'make test-long'
	@echo '              random training loops, other ones each time, for an hour'
	@echo 'make test-outside'
	@echo '              the test suites of pytorch_optimizer, torch, Lightning and transformers, mechanized; the last'
	@echo '              three from checkouts: TORCH=path LIGHTNING=path TRANSFORMERS=path; options by ARGS="--only torch"'
	@echo 'make test-programs'
	@echo '              the programs of docs/programs.md, installed by pip into .programs/; one by ARGS="--only litgpt",'
	@echo '              and Mechanic against the default rates of others: ARGS="--only quick-starts --keep"'
	@echo 'make lint     ruff and mypy --strict'
	@echo 'make format   let ruff rewrite the files'
	@echo 'make docs     the documentation, into site/; fails on a broken link'
	@echo 'All install .venv first: 2.6 GB with the CPU build of torch (PIP_EXTRA_INDEX_URL, see README);'
	@echo 'make demo installs less than half of it'
	@echo 'make clean    remove the virtual environment and all caches'

install: $(INSTALLED)

# What the demo needs: torch, matplotlib and scikit-learn. A first look should not wait for the frameworks.
# The pip that comes with an older python cannot read dependency groups, hence the upgrade.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("the pinned versions need python 3.11 or later: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[demo]' $(PINNED)
	touch $@

# For the inner loop: torch and pytest.
$(FAST): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --group fast --editable . $(PINNED)
	touch $@

# DS_BUILD_OPS=0: DeepSpeed compiles the operators it needs on first use, not all of them here.
$(INSTALLED): $(READY)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --group dev --editable '.[all]' $(PINNED)
	touch $@

test: $(INSTALLED)
	@# minutes the first time, nothing after that; without a compiler it says what will be skipped
	$(BIN)/python tests/helpers/build_ops.py
	$(PYTEST)

test-fast: $(FAST)
	$(PYTEST) -m 'not slow and not ranks' $(wildcard tests/test_*.py) $(addprefix tests/,rule weights optimizer kernels interface)

test-long: $(INSTALLED)
	MECHANIC_EXAMPLES=33 $(BIN)/python -m pytest tests/optimizer/test_state_machine.py tests/distributed/test_state_machine_on_ranks.py

# Not a part of CI: it needs the network, checkouts and some ten minutes.
test-outside: $(INSTALLED)
	$(BIN)/python tests/outside/run.py $(if $(TORCH),--torch $(TORCH)) $(if $(LIGHTNING),--lightning $(LIGHTNING)) \
		$(if $(TRANSFORMERS),--transformers $(TRANSFORMERS)) $(ARGS)

# Not a part of CI: it installs every program.
test-programs: $(INSTALLED)
	$(BIN)/python tests/programs/run.py $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

demo: $(READY)
	$(BIN)/python examples/demo.py $(ARGS)

# A group of its own, installed here alone: the tests do not wait for it.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --group docs --constraint constraints.txt
	$(BIN)/python docs/options.py
	$(BIN)/python docs/api.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # --quiet would hide warnings from --strict

clean:
	rm -rf $(VENV) .outside .programs dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
