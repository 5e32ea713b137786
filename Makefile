# Two commands are enough on a fresh clone: `make demo` and `make test`. Each sets up .venv first, once.
#
#   make PYTHON=python3.12 test    another Python (>= 3.10)
#   make PEERS= test               without timm and torchvision; the tests against them are skipped
#   make test ARGS="-k attention"  arguments for pytest, for the demo or for the benchmarks

PYTHON ?= python3
PEERS ?= yes
ARGS ?=

# All paths are relative, so that a clone in a folder with spaces works.
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
CXX_FILES = $(shell find csrc tests -name '*.cpp' -o -name '*.hpp')
NATIVE_SOURCES = $(shell find csrc -type f) CMakeLists.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test bench ptx-check gpu-check lint format native-test docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(VENV)/built ## environment and extension (the others do it by themselves)

demo: $(VENV)/built ## check ViT against PyTorch on this machine, time both, save the picture
	$(PY) -m vitkern demo $(ARGS)

test: $(VENV)/built ## all tests, in two processes
	$(PY) -m pytest -q -n 2 $(ARGS)

bench: $(VENV)/built ## all benchmarks and sweeps with eager PyTorch beside each, then the report: 10 minutes
	@echo "about 10 minutes on 2 cores; close everything else"
	$(PY) -m pytest benchmarks --benchmark-only --scaling $(ARGS)
	$(PY) -m benchmarks.report

ptx-check: $(VENV)/built ## all operators as Triton compiles them for sm_80, emulated: 20 minutes
	$(PY) -m pytest -q -m ptx_full tests/test_gpu_ptx.py $(ARGS)

lint: $(VENV)/installed ## ruff and clang-format, changing nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/installed ## ruff and clang-format, rewriting files
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

native-test: $(VENV)/installed ## the kernels without Python, under ASan and UBSan
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake -S . -B build/native -G Ninja \
	  -DVITKERN_NATIVE_TEST=ON -DVITKERN_WERROR=ON
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --build build/native
	build/native/native_test

docs: $(VENV)/built ## docs/ops.md from the operator table
	$(PY) tools/gen_ops_docs.py $(ARGS)

gpu-check: $(VENV)/built ## all GPU kernels for all architectures: build, gates, docs/gpu.md's table: 30 minutes
	$(PY) tools/gpu_check.py $(ARGS)

clean: ## remove everything that make made, .venv included
	rm -rf $(VENV) build dist vitkern.egg-info vitkern/_C*.so .pytest_cache .ruff_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- Set-up: a stamp per step, so that a second run starts at once ------------------------------

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "vitkern needs Python >= 3.10: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "no venv module: apt-get install python3-venv, or make PYTHON=..." >&2; exit 1; }

# The pinned torch comes first and alone in its step: what follows finds its range satisfied.
$(VENV)/installed: requirements-dev.txt requirements-peers.txt | $(PY)
	@echo "installing PyTorch and the development tools into $(VENV) (a minute, once)"
	@$(PIP) install -qq -r requirements-dev.txt
	@$(if $(PEERS),$(PIP) install -qq --no-deps -r requirements-peers.txt)
	@touch $@

export CMAKE_ARGS := -DVITKERN_WERROR=ON $(CMAKE_ARGS)

$(VENV)/editable: $(VENV)/installed pyproject.toml setup.py
	@echo "building vitkern._C"
	@$(PIP) install -qq --no-build-isolation -e ".[dev]"
	@touch $@

$(VENV)/built: $(VENV)/editable $(NATIVE_SOURCES)
	@$(PY) setup.py -q build_ext --inplace
	@touch $@
