# The commands of the README. Everything runs in .venv, which they create.
#
#   make demo       train a small GPT with jaxflash attention
#   make test       run the tests
#   make test-gpu   run them on a GPU; fails if none ran there
#   make bench      compare with other attention implementations (ARGS="--help")
#   make lint       format, lint, types, layers: what a change must pass
#   make sanitize   compute-sanitizer over small CUDA calls
#
# Settings:
#   PYTHON=python3.13   interpreter to build for
#   VENV=none           use PYTHON as it is: nothing is downloaded, and the package goes
#                       to build/site instead of into an environment
#   CUDA=auto|on|off|pip  auto: build the CUDA kernels if nvcc is found; pip: with the
#                       CUDA wheels, fetched for the build
#   EDITABLE=           install a copy instead of a link to these sources
#   PARALLEL=           run the tests in one process
#   TESTS=tests/...     what `make test` and `make test-gpu` run, default all of tests
#   ARGS=...            more arguments for pytest, the demo or the benchmark

PYTHON ?= python3
VENV ?= .venv
CUDA ?= auto
EDITABLE ?= -e
PARALLEL ?= -n auto --dist loadfile
TESTS ?= tests
ARGS ?=

# A GPU in the machine brings the JAX that can use it.
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
comma := ,
EXTRAS := test$(if $(GPU),$(comma)cuda)

CPP := $(shell find csrc -name '*.h' -o -name '*.cc' -o -name '*.cuh' -o -name '*.cu')
SOURCES := CMakeLists.txt pyproject.toml $(CPP) \
  $(shell find cmake csrc -name '*.cmake' -o -name '*.in' -o -name CMakeLists.txt)
MODULES := $(sort $(shell find jaxflash -name '*.py'))

export JAXFLASH_CUDA := $(CUDA)
# The package is always the installed one, never the folder that shares its name.
export PYTHONSAFEPATH := 1

ifeq ($(VENV),none)
  SITE := $(CURDIR)/build/site
  export PYTHONPATH := $(SITE)
  PY := $(PYTHON)
  TOOLS :=
  STATE := $(SITE)
  LINTERS :=
else
  PY := $(VENV)/bin/python
  TOOLS := $(VENV)/bin/
  STATE := $(VENV)
  LINTERS := $(VENV)/.linters
endif
INSTALLED := $(STATE)/.installed-$(CUDA)

.PHONY: demo test test-gpu bench lint sanitize install clean .FORCE
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(PY) examples/train_gpt.py $(ARGS)

test: $(INSTALLED)
	$(PY) -m pytest $(TESTS) $(PARALLEL) $(ARGS)

test-gpu: $(INSTALLED)
	$(PY) -m pytest $(TESTS) --require-gpu $(PARALLEL) $(ARGS)

bench: $(INSTALLED)
	$(PY) -m jaxflash.benchmark $(ARGS)

install: $(INSTALLED)

lint: $(INSTALLED) $(LINTERS)
	$(TOOLS)ruff format --check
	$(TOOLS)ruff check
	$(TOOLS)clang-format --dry-run -Werror $(CPP)
	$(PY) tools/check_layers.py
	$(PY) tools/check_kernels.py
	$(TOOLS)pyright --pythonpath $$($(PY) -c 'import sys; print(sys.executable)')

# The Hopper kernels without racecheck and initcheck: docs/kernels.md says why.
SANITIZE := $(addprefix sm80:,memcheck racecheck synccheck initcheck) \
  $(addprefix auto:,memcheck synccheck)

sanitize: $(INSTALLED)
	@failed=; \
	for run in $(SANITIZE); do \
	  kernels=$${run%:*} tool=$${run#*:}; \
	  echo "== $$tool, JAXFLASH_CUDA_KERNELS=$$kernels"; \
	  PATH="$$PATH:/usr/local/cuda/bin" JAXFLASH_CUDA_KERNELS=$$kernels \
	    compute-sanitizer --tool $$tool --error-exitcode 1 \
	    $(PY) tests/sanitize.py || failed="$$failed $$run"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

clean:
	rm -rf build dist .venv* .pytest_cache .ruff_cache .hypothesis

ifeq ($(VENV),none)
$(INSTALLED): $(SOURCES) $(MODULES)
	rm -rf $(SITE)
	$(PY) -m pip install --no-build-isolation --no-deps --no-index --target $(SITE) .
	touch $@
else
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# An editable install follows edits of Python files, but not new ones.
$(VENV)/.modules: .FORCE | $(VENV)/bin/python
	@echo $(MODULES) | cmp -s - $@ || echo $(MODULES) > $@

$(INSTALLED): $(SOURCES) $(VENV)/.modules $(if $(EDITABLE),,$(MODULES))
	rm -f $(VENV)/.installed-*
	$(PY) -m pip install $(EDITABLE) '.[$(EXTRAS)]'
	touch $@

$(LINTERS): pyproject.toml | $(VENV)/bin/python
	$(PY) -m pip install $$($(PY) -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']['lint'])")
	touch $@
endif
