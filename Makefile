# `make demo` and `make test` do all set-up from a fresh clone, in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Where uv is, it installs the versions of uv.lock; else pip installs the newest that pyproject.toml allows.
UV ?= $(shell command -v uv)
PIP := $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,$(BIN)/pip install -qq)
WITH_PIP := { $(PYTHON) -m venv .venv && $(BIN)/pip install -qq -e ".[dev]"; }
# Spinning threads of several torch processes on few cores cost more than they give.
export OMP_NUM_THREADS ?= 1
# A file's tests share what is costly to make; tests/conftest.py puts the long files first.
PYTEST := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-full fast-tests all-tests gpu check lint types detectron2 docs dist lock clean

demo: .venv/ready
	$(BIN)/backbench demo --out runs/demo

# Tests wait for processes a seventh of their time; the type checker works meanwhile.
test: .venv/ready lint
	$(MAKE) --no-print-directory -j 2 types fast-tests

test-full: .venv/ready lint
	$(MAKE) --no-print-directory -j 2 types all-tests

fast-tests: .venv/ready
	$(BIN)/python -m pytest $(PYTEST) -m "not slow"

all-tests: .venv/ready
	$(BIN)/python -m pytest $(PYTEST)

# What only a GPU can show: everything on it against the CPU, then what it costs, beside the peers.
gpu: .venv/ready
	$(BIN)/python -m pytest -n 6 --dist loadgroup -m gpu tests/gpu
	$(BIN)/python benchmarks/gpu.py --keep

check: lint types

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

# Upstream's own instruction, pinned to the commit that was built and trained here. Needs g++ and a few minutes.
detectron2: .venv/ready
	PIP="$(PIP)" sh tools/install.sh detectron2

# The documentation's site, in site/. Building it asks the network for nothing.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# dist/: what is installed and tried from another folder by tests/test_release.py
dist: .venv/ready
	$(BIN)/python tools/dist.py dist

# After a change of the dependencies: uv.lock, and the same versions for pip
lock:
	$(UV) lock
	$(UV) export --quiet --frozen --all-extras --no-hashes --no-emit-project --no-annotate --no-header --output-file constraints.txt

.venv/ready: pyproject.toml
ifneq ($(UV),)
	$(UV) sync --quiet --frozen --inexact --extra dev --python $(PYTHON) || $(WITH_PIP)  # behind a mirror
else
	$(WITH_PIP)
endif
	touch $@

.venv/docs: .venv/ready
	$(PIP) -e ".[docs]"
	touch $@

clean:
	rm -rf .venv runs dist site .mypy_cache .ruff_cache
