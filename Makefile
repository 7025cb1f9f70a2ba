# `make demo` and `make test` do all set-up from a fresh clone, in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Spinning threads of several torch processes on few cores cost more than they give.
export OMP_NUM_THREADS ?= 1

DETECTRON2 := git+https://github.com/facebookresearch/detectron2.git@02b5c4e295e990042a714712c21dc79b731e8833

.PHONY: demo test test-full gpu check detectron2 clean

demo: .venv/ready
	$(BIN)/backbench demo --out runs/demo

test: .venv/ready check
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-full: .venv/ready check
	$(BIN)/python -m pytest -n 2 --dist loadfile

# What only a GPU can show: everything on it against the CPU, then what it costs, beside the peers.
gpu: .venv/ready
	$(BIN)/python -m pytest -n 6 --dist loadgroup -m gpu tests/gpu
	$(BIN)/python benchmarks/gpu.py --keep

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Upstream's own instruction, pinned to the commit that was built and trained here. Needs g++ and a few minutes.
detectron2: .venv/ready
	$(BIN)/pip install -qq "setuptools<81" wheel ninja
	$(BIN)/pip install -qq --no-build-isolation "detectron2 @ $(DETECTRON2)"

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -qq -e ".[dev]"
	touch $@

clean:
	rm -rf .venv runs .mypy_cache .ruff_cache
