# What a person types; `make help` lists it. Needs python3 >= 3.11, a C++ compiler and make. Everything is installed into the
# active virtual environment (VIRTUAL_ENV), else into .venv. Stamp files there make the second run start in seconds.

PYTHON ?= python3
ARGS ?=
VENV := $(or $(VIRTUAL_ENV),.venv)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# The stamps carry Python's version: once the system's has moved on, its environment holds nothing of ours.
PRINT_VERSION := import sys; print("%d.%d" % sys.version_info[:2])
PY_VERSION := $(shell for python in $(PY) $(PYTHON); do $$python -c '$(PRINT_VERSION)' 2>/dev/null && break; done)
# Otherwise an existing environment would silently stand in for the Python that was asked for.
ifneq ($(and $(filter command line,$(origin PYTHON)),$(filter-out test-python help clean,$(MAKECMDGOALS))),)
ifneq ($(shell $(PYTHON) -c '$(PRINT_VERSION)' 2>/dev/null),$(PY_VERSION))
$(error PYTHON=$(PYTHON) is not the Python $(PY_VERSION) of $(VENV): $(if $(VIRTUAL_ENV),deactivate it,remove that folder) first, or leave PYTHON out)
endif
endif
ifneq ($(and $(wildcard $(PY)),$(filter 3.0 3.1 3.2 3.3 3.4 3.5 3.6 3.7 3.8 3.9 3.10,$(PY_VERSION)),$(filter-out test-python help clean,$(or $(MAKECMDGOALS),help))),)
$(error Python 3.11 or newer is needed, and $(VENV) has Python $(PY_VERSION): $(if $(VIRTUAL_ENV),deactivate it,remove that folder) first)
endif
REQUIREMENTS := $(VENV)/.specdec-requirements-$(PY_VERSION)
INSTALLED := $(VENV)/.specdec-installed-$(PY_VERSION)
CORES := $(shell nproc 2>/dev/null || echo 1)
WORKERS ?= $(shell test $(CORES) -lt 4 && echo $(CORES) || echo 4)

NATIVE := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
VLLM := build/vllm
HAS_TORCH := import importlib.metadata as m, re, sys; \
  sys.exit(tuple(map(int, re.findall(r"\d+", m.version("torch"))[:2])) < (2, 11))

PYTEST := $(PY) -m pytest -q --no-header

.PHONY: docs help test test-all test-python test-transformers test-triton test-vllm test-peers test-llama-cpp demo build bench \
	bench-vllm gpu-report gpu-peers gpu-model sanitize fuzz resources soak lint format clean FORCE

help:  ## list what can be made
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 26
	@echo 'ARGS="..." goes on to the command: make test ARGS="-k verify_chain", make demo ARGS="--help"'

test: $(INSTALLED)  ## every op, rule and loop on every backend, a choice of the cases (9 minutes on two idle cores)
	@echo "==> running the tests in $(WORKERS) processes$(if $(ARGS),, (about 9 minutes on two idle cores))"
	@$(PYTEST) -n $(WORKERS) --dist loadgroup $(ARGS)

test-all: $(INSTALLED)  ## every test, a larger choice of its cases (half an hour on two cores)
	@echo "==> running the tests in $(WORKERS) processes$(if $(ARGS),, (about half an hour on two cores))"
	@$(PYTEST) -n $(WORKERS) --dist loadgroup --tier=all $(ARGS)

# An environment on top of this one, which differs from it in some packages and what they pin.
define environment
@echo "==> installing $(2) into $(1)"
@rm -rf $(1) && $(PY) -m venv $(1)
@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
  echo "import site; site.addsitedir('$$($(PY) -c "$$site")')" > "$$($(1)/bin/python -c "$$site")/outer.pth"
@$(1)/bin/python -m pip --disable-pip-version-check install -q $(2)
endef

HF_VERSIONS := 5.17.0 5.24.0
HF_TESTS := python_tests/integrations python_tests/decoding/test_stop.py
HF_READY := $(HF_VERSIONS:%=build/transformers-%/.installed)
test-transformers: $(HF_READY)  ## the plug-in in the oldest and the newest transformers that it knows (5 minutes)
	@set -e; for version in $(HF_VERSIONS); do echo "==> transformers $$version"; \
	  build/transformers-$$version/bin/python -m pytest -q --no-header -n $(WORKERS) --tier=all $(HF_TESTS) $(ARGS); done

# None of these is made anew for another build of the package, which they see through the environment below them.
build/transformers-%/.installed: $(REQUIREMENTS) | $(INSTALLED)
	$(call environment,$(@D),transformers==$*)
	@touch $@

TORCH ?= $(shell sed -n "s/^torch==//p" requirements-test.txt)
test-python:  ## ops and distributions with another Python and torch (PYTHON=python3.13 TORCH=2.14.1; fetches that torch)
	@.ci/other_python $(PYTHON) $(TORCH) $(ARGS)

OLDEST_TRITON := 3.6.0
build/triton-%/.installed: $(REQUIREMENTS) | $(INSTALLED)
	@echo "==> installing Triton $* into $(@D) (once)"
	@$(PIP) install -q --no-deps --upgrade --target $(@D) triton==$*
	@touch $@

test-triton: build/triton-$(OLDEST_TRITON)/.installed  ## the kernels compiled by the oldest Triton that they know (minutes; fetches it)
	@$(PYTEST) -n $(WORKERS) --tier=all python_tests/triton/test_compile.py -k older $(ARGS)

test-vllm: $(VLLM)/.specdec-installed  ## the plug-in inside vLLM, in an environment of its own (4 GB, once; 15 minutes)
	@$(VLLM)/venv/bin/python -m pytest -q --no-header -c integration_tests/pytest.ini integration_tests/vllm $(ARGS)

test-peers: $(INSTALLED)  ## FlashInfer's and SGLang's own tests on our functions of those names (SGLANG=, FLASHINFER=checkout; 5 minutes)
	@$(PYTEST) -c integration_tests/pytest.ini integration_tests/peers --flashinfer="$(abspath $(FLASHINFER))" \
	  --sglang="$(abspath $(SGLANG))" $(ARGS)

# llama-cpp-python is compiled here, as its wheels are not on the package index; for AVX2, as a virtual machine's
# processor may announce tiles (AMX) that the machine does not have.
build/llama-cpp/.installed: export CMAKE_ARGS := -DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF
test-llama-cpp: build/llama-cpp/.installed  ## the example around llama.cpp in llama.cpp itself (compiles that once: 15 minutes)
	@$(<D)/venv/bin/python -m pytest -q --no-header -c integration_tests/pytest.ini integration_tests/llama_cpp $(ARGS)

build/llama-cpp/.installed: $(REQUIREMENTS) | $(INSTALLED)
	$(call environment,$(@D)/venv,llama-cpp-python==0.3.36)
	@touch $@

docs: build/docs/.installed  ## the pages and the reference as HTML in build/docs/html; the notebook is run (1 minute)
	@$(<D)/venv/bin/python -m sphinx -q -E -W --keep-going -c docs $(ARGS) . build/docs/html
	@echo "==> build/docs/html/docs/index.html"

build/docs/.installed: $(REQUIREMENTS) | $(INSTALLED)
	$(call environment,$(@D)/venv,sphinx==9.0.4 myst-nb==1.4.0 myst-parser==5.2.0 furo==2025.12.19)
	@touch $@

bench-vllm: $(VLLM)/.specdec-installed  ## vLLM with and without the plug-in: tokens a second, and the sampler's time a step
	@$(VLLM)/venv/bin/python -m bench.vllm_engine $(ARGS)

demo: $(INSTALLED)  ## watch a real language model decode with and without speculation (about 2 minutes)
	@OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=3000 $(PY) -m specdec_kernels demo $(ARGS)

build: $(INSTALLED)  ## compile and install into the environment, in place

bench: $(INSTALLED)  ## measure the ops against their peers, on this machine
	$(PY) -m bench.run $(ARGS)

# With the torch that is there, in or outside .venv: a machine with a GPU may have no network.
gpu-report:  ## where there is a GPU: build, benchmarks, decoding, tests, sanitizer (ARGS="build bench": parts of under 9 minutes)
	@$(or $(wildcard $(PY)),$(PYTHON)) -m bench.gpu_report $(ARGS)

gpu-peers:  ## fetch what of FlashInfer and vLLM gpu-report measures into the folder peers (needs a package registry; 20 MB)
	@$(or $(wildcard $(PY)),$(PYTHON)) -m bench.peers $(ARGS)

gpu-model: $(INSTALLED)  ## a model, no measurement: what a GPU should take, from counts of the emulator and data sheets (minutes)
	$(PY) -m bench.gpu.model $(ARGS)

sanitize: $(INSTALLED)  ## the CUDA kernels on the CPU under ASan, UBSan and TSan, and planted defects (up to 10 minutes)
	@$(MAKE) -s -j$(WORKERS) -C csrc/emulator/tests sanitize
	@$(PYTEST) python_tests/emulator --sanitizers $(ARGS)

fuzz: $(INSTALLED)  ## random calls of the ops below the public API under ASan and UBSan (2 minutes; ARGS="--seconds 600")
	@$(PY) -m python_tests.fuzz $(ARGS)

resources: $(INSTALLED)  ## registers, shared memory and spills of the CUDA kernels on every architecture (needs nvcc; minutes)
	SPECDEC_WERROR=1 $(PY) setup.py -q build_kernels
	$(PY) .ci/resources.py build/obj/kernels

soak: $(INSTALLED)  ## random requests in threads and processes, cancelled and interrupted, every token tested (20 minutes)
	$(PY) -m python_tests.soak $(ARGS)

lint: $(INSTALLED)  ## ruff, mypy and clang-format, and that no compiler warned; changes nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(NATIVE)
	! grep -rE --include='*.log' --exclude-dir=_C_emulated 'warning( #[0-9]+(-D)?)? ?:' build/obj  # the tests build that part

format: $(REQUIREMENTS)  ## let ruff and clang-format rewrite the sources
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(NATIVE)

clean:  ## remove what was built, build/ with its environments included (.venv stays)
	rm -rf build dist *.egg-info specdec_kernels/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis $(INSTALLED)
	find specdec_kernels python_tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@test -z "$(VIRTUAL_ENV)" || { echo "VIRTUAL_ENV=$(VIRTUAL_ENV) holds no bin/python: deactivate it" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "Python 3.11 or newer is needed and $(PYTHON) is not; choose one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "==> creating the virtual environment $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf .venv; echo \
	  "$(PYTHON) cannot make a virtual environment (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }

$(REQUIREMENTS): requirements-test.txt .ci/pins.py | $(PY)
	@$(PIP) --version >/dev/null 2>&1 || $(PY) -m ensurepip || { echo "$(VENV) has no pip" >&2; exit 1; }
	@if $(PY) -c '$(HAS_TORCH)' 2>/dev/null; then echo "==> keeping the torch that $(VENV) already has"; else \
	  echo "==> installing PyTorch into $(VENV) (once; it is large: minutes, depending on the network)"; \
	  test -n "$(TORCH_INDEX)" || echo "    (TORCH_INDEX=https://download.pytorch.org/whl/cpu: a build without CUDA)"; \
	  test -t 1 || quiet=-q; $(PIP) install $$quiet $(TORCH_INDEX:%=--extra-index-url=%) \
	    "$$(grep '^torch==' requirements-test.txt)"; fi
	@echo "==> installing the other packages (once; about a minute)"
	@$(PY) .ci/pins.py < requirements-test.txt > $(REQUIREMENTS).txt
	@$(PIP) install -q -r $(REQUIREMENTS).txt
	@touch $@

# vLLM's wheels of torchvision and the like do not fit its torch, and a text model needs none of them.
$(VLLM)/.vllm: requirements-vllm.txt | $(PY)
	@echo "==> installing vLLM into $(VLLM)/venv (once; it is large: minutes, depending on the network)"
	@$(PY) -m venv $(VLLM)/venv && $(VLLM)/venv/bin/python -m pip --disable-pip-version-check install -q -r requirements-vllm.txt
	@$(VLLM)/venv/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

$(VLLM)/.specdec-installed: $(INSTALLED) $(VLLM)/.vllm $(shell find specdec_kernels -name '*.py')
	@echo "==> installing specdec_kernels into $(VLLM)/venv"
	@rm -f $(VLLM)/*.whl && SPECDEC_CUDA=0 $(PIP) wheel -q --no-build-isolation --no-deps -w $(VLLM) .
	@$(VLLM)/venv/bin/python -m pip --disable-pip-version-check install -q --no-deps --force-reinstall $(VLLM)/*.whl
	@$(PY) -c "from specdec_kernels.assets import model_dir; model_dir()"
	@touch $@

# The stamp holds the checkout it was made from: an environment may serve several, and holds the last one installed.
ifneq ($(shell cat $(INSTALLED) 2>/dev/null),$(CURDIR))
$(INSTALLED): FORCE
endif
$(INSTALLED): $(REQUIREMENTS) setup.py pyproject.toml $(addprefix specdec_kernels/,flat.py ops/arguments.py backends/contract.py) $(NATIVE)
	@echo "==> compiling and installing specdec_kernels (minutes the first time, then only what changed)"
	@mkdir -p build && { $(PIP) install -v --no-build-isolation --no-deps -e . 2>&1; echo $$? > build/install.status; } \
	  | tee build/install.log | sed -un 's/^ *\(specdec_kernels: \)/    \1/p'
	@test "$$(cat build/install.status)" = 0 || { cat build/install.log >&2; exit 1; }
	@echo "$(CURDIR)" > $@
