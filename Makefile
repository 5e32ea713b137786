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
# Python compiles a module when it is first imported: pip would compile all of torch, for half a minute.
INSTALL := $(PY) -m pip --disable-pip-version-check install -qq --no-compile
CXX_FILES = $(shell find csrc tests -name '*.cpp' -o -name '*.hpp')
NATIVE_SOURCES = $(shell find csrc -type f) CMakeLists.txt

# Not $(MAKE) in a recipe: `make -n` runs such a line, which here would install and measure.
AGAIN := $(MAKE)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-portable test-cpus bench bench-cpu bench-training bench-amx fuzz soak
.PHONY: ptx-check gpu-check
.PHONY: lint format native-test arm-test wheel sdist docs site clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup: $(VENV)/ready ## environment and extension (the others do it by themselves)

demo: $(VENV)/built $(VENV)/torch ## name a photograph, check ViT against PyTorch on this machine, time both, save the picture
	$(PY) -m vitkern demo $(ARGS)

test: lint $(VENV)/ready ## lint, then all tests but the long ones, in two processes
	$(PY) -m pytest -q -n 2 --dist worksteal $(ARGS)

test-full: $(VENV)/ready ## all tests: also those that take long and rarely find anything
	$(PY) -m pytest -q -n 2 --dist worksteal -m "not ptx_full" $(ARGS)

test-portable: $(VENV)/ready ## operators, models and commands: what runs where Triton does not
	$(PY) -m pytest -q -n 2 --dist worksteal tests/ops tests/model tests/cli $(ARGS)

test-cpus: $(VENV)/ready ## the tests that compare floats, with libraries forced to other CPUs' kernels
	$(PY) tools/other_cpus.py $(ARGS)

bench: $(VENV)/peers ## all benchmarks and sweeps with eager PyTorch beside each, then bench-cpu: 30 minutes
	@echo "about 30 minutes on 2 cores; close everything else"
	$(PY) -m pytest benchmarks --benchmark-only --scaling $(ARGS)
	$(PY) -m benchmarks.report
	$(PY) -m benchmarks.cpu

bench-cpu: $(VENV)/peers ## vitkern, PyTorch, torch.compile, ONNX Runtime and OpenVINO in turns: 20 minutes
	$(PY) -m benchmarks.cpu $(ARGS)

bench-training: $(VENV)/ready ## training steps, memory and loss beside eager PyTorch and torch.compile: 10 minutes
	$(PY) -m benchmarks.training $(ARGS)

bench-amx: ## the same on a CPU with AMX, 10 minutes at a time: again for the rest
	@grep -qsw amx_tile /proc/cpuinfo || \
	  { echo "bench-amx: this CPU has no AMX; make bench-cpu measures the class that it has" >&2; exit 1; }
	@$(AGAIN) PYTHON="$(PYTHON)" bench-cpu ARGS="--minutes 10 --preload auto $(ARGS)"

fuzz: $(VENV)/ready ## odd input to every surface, faults with their replay: ARGS="--minutes 10 --seed 7"
	$(PY) -m tests.fuzz $(ARGS)

soak: $(VENV)/ready ## threads, changing weights and sizes, every result checked, memory flat: ARGS="--minutes 5"
	$(PY) -m tests.fuzz.soak $(ARGS)

PTX_TESTS := tests/gpu/test_ptx.py tests/gpu/test_ptx_block.py

ptx-check: $(VENV)/ready ## all operators and a block as Triton compiles them for sm_80 to sm_120, emulated: 40 minutes
	$(PY) -m pytest -q -n 2 --dist worksteal -m ptx_full $(PTX_TESTS) $(ARGS)

lint: $(VENV)/ready ## ruff, clang-format and mypy, changing nothing
	$(PY) -m ruff check -q .
	$(PY) -m ruff format -q --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)
	$(PY) -m mypy

format: $(VENV)/installed ## ruff and clang-format, rewriting files
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

ARM_TOOLS := aarch64-linux-gnu-g++ qemu-aarch64

arm-test: $(VENV)/tools ## the portable kernels on 64-bit ARM: cross-compiled, run under qemu
	@for tool in $(ARM_TOOLS); do command -v $$tool > /dev/null || \
	  { echo "$$tool is missing: apt-get install g++-aarch64-linux-gnu qemu-user" >&2; exit 1; }; done
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake -S . -B build/arm -G Ninja -DVITKERN_NATIVE_TEST=ON \
	  -DVITKERN_SANITIZE=OFF -DVITKERN_WERROR=ON -DCMAKE_TOOLCHAIN_FILE=tests/ops/native/aarch64.cmake
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --build build/arm --target run_native_test

native-test: $(VENV)/installed ## the kernels without Python, under ASan and UBSan
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake -S . -B build/native -G Ninja \
	  -DVITKERN_NATIVE_TEST=ON -DVITKERN_WERROR=ON
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --build build/native
	build/native/native_test
	build/native/native_launcher_test

wheel: $(VENV)/tools ## a wheel for this Python with every instruction set, into dist/
	CMAKE_ARGS= $(PY) -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation -w dist .

sdist: $(VENV)/tools ## the source archive, into dist/
	$(PY) setup.py -q sdist

docs: $(VENV)/ready ## docs/ops.md from the operator table
	$(PY) tools/gen_ops_docs.py $(ARGS)

site: $(VENV)/site ## the documentation as a site, into build/site; a broken link is an error; ARGS=--verbose
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --clean $(ARGS)
	@echo "open build/site/index.html, or $(PY) -m http.server -d build/site for its search"

gpu-check: $(VENV)/ready ## all GPU kernels for all architectures: build, gates, docs/gpu_kernels.md, an emulated block, other Tritons: 3 hours; ARGS="--arch sm_90" for one
	$(PY) tools/gpu_check.py $(ARGS)
	$(PY) -m tools.gpu_waves --check
	$(PY) -m tools.gpu_prediction --check
	$(PY) -m pytest -q -n 2 --dist worksteal -m ptx_full tests/gpu/test_ptx_block.py
	$(PY) -m pytest -q -m full tests/gpu/test_triton_versions.py
	$(PY) -m tools.triton_matrix

clean: ## remove everything that make made, .venv included
	rm -rf $(VENV) build dist vitkern.egg-info vitkern/_C*.so .pytest_cache .ruff_cache .mypy_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- Set-up: a stamp per step, so that a second run starts at once ------------------------------
# The extension needs no torch, so that it is compiled while pip unpacks torch: two jobs at once.
MAKEFLAGS += -j2
# Not for Ninja below: it would look for the jobserver of this make, whose files it does not inherit.
unexport MAKEFLAGS

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "vitkern needs Python >= 3.10: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "no venv module: apt-get install python3-venv, or make PYTHON=..." >&2; exit 1; }

$(VENV)/tools: requirements-build.txt | $(PY)
	@echo "installing the build tools into $(VENV)"
	@$(INSTALL) -r requirements-build.txt
	@touch $@

# The pinned torch comes first and alone in its step: what follows finds its range satisfied.
$(VENV)/torch: requirements-torch.txt | $(VENV)/tools
	@echo "installing PyTorch (a minute, once)"
	@$(INSTALL) -r requirements-torch.txt
	@touch $@

$(VENV)/installed: requirements-dev.txt requirements-timm.txt $(VENV)/torch
	@echo "installing the development tools"
	@$(INSTALL) -r requirements-dev.txt
	@$(if $(PEERS),$(INSTALL) --no-deps -r requirements-timm.txt)
	@touch $@

# The kernels that this CPU can run (or that the tests emulate on it): a wheel has them all.
export CMAKE_ARGS := -DVITKERN_WERROR=ON -DVITKERN_ISAS=host $(CMAKE_ARGS)

$(VENV)/built: $(VENV)/tools $(NATIVE_SOURCES) setup.py
	@echo "building vitkern._C for this CPU"
	@$(PY) setup.py -q build_ext --inplace
	@touch $@

$(VENV)/peers: requirements-peers.txt requirements-torch.txt $(VENV)/ready
	@echo "installing the inference engines to compare with"
	@$(INSTALL) -r requirements-peers.txt -c requirements-torch.txt
	@touch $@

$(VENV)/site: requirements-site.txt | $(VENV)/tools
	@echo "installing what builds the site"
	@$(INSTALL) -r requirements-site.txt
	@touch $@

$(VENV)/ready: $(VENV)/installed pyproject.toml setup.py | $(VENV)/built
	@$(INSTALL) --no-build-isolation -e ".[dev]"
	@touch $@
