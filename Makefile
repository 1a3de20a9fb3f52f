# Shortcuts for CMake presets. `make test` on a fresh Debian machine installs missing packages, builds and tests.
.PHONY: help setup build demo test test-serve test-logs test-eval test-interop install asan tsan fuzz python cuda test-cuda test-emulated bench findings format tidy clean
JOBS ?= $(shell nproc)
# Of build, test and python: release, or cuda.
PRESET ?= release
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 20
PYTHON ?= /usr/bin/python3
INTEROP_VENV ?= build/interop-venv

help:
	@echo "make setup   install the packages that the build needs (Debian, Ubuntu)"
	@echo "make build   build build/release/furious"
	@echo "make demo    train three small models side by side and compare them"
	@echo "make test    install packages, build, and run all tests; PRESET=cuda: of the CUDA build (needs nvcc)"
	@echo "make test-serve   test the server with the openai package and Chromium (installs them)"
	@echo "make test-logs   read event files with TensorBoard (installs it)"
	@echo "make test-eval   compare scores of tasks with lm-evaluation-harness (downloads torch: gigabytes)"
	@echo "make install PREFIX=/usr/local   install the binary, libfurious and its headers"
	@echo "make asan    run the fast tests under the address and undefined-behaviour sanitizers"
	@echo "make tsan    run the tests with threads under the thread sanitizer"
	@echo "make fuzz    run the fuzzers of tests/fuzz, FUZZ_SECONDS=20 each (needs clang)"
	@echo "make python  build the wheel of the Python package with the library of the build (PRESET), and run its tests"
	@echo "make test-interop   load exported models and tokenizers with Hugging Face's library (downloads torch: gigabytes)"
	@echo "make cuda    build the CUDA preset (needs nvcc)"
	@echo "make test-cuda   build the CUDA preset and run all GPU tests (needs nvcc and a GPU)"
	@echo "make test-emulated   run GPU tests on a CPU, by an emulator (needs nvcc); QUICK=1: in a few minutes"
	@echo "make bench   measure mixer speed beside the floor of this machine"
	@echo "make findings   rebuild the tables and figures of docs/findings.md from its results"
	@echo "make format  run clang-format on the sources"
	@echo "make tidy    run clang-tidy on the sources"

setup:
	@scripts/setup.sh

build: setup
	cmake --preset $(PRESET)
	cmake --build --preset $(PRESET) -j $(JOBS)

demo:
	@scripts/setup.sh dict-gcide
	cmake --preset release
	cmake --build --preset release -j $(JOBS) --target furious
	build/release/furious demo --out demo

test: build
	ctest --preset $(PRESET) -j $(JOBS)

test-serve: build
	@scripts/setup.sh python3-venv chromium chromium-driver curl
	tests/serve_interop/run.sh build/release/furious build

test-logs: build
	@scripts/setup.sh python3-venv
	test -x build/logs-venv/bin/python || $(PYTHON) -m venv build/logs-venv
	build/logs-venv/bin/pip install -q tensorboard
	build/logs-venv/bin/python tests/log_interop/check_tensorboard.py build/release/furious

# EVAL_VENV names a virtual environment that has lm_eval already.
EVAL_VENV ?= build/eval-venv
test-eval: build
	@scripts/setup.sh python3-venv
	test -x $(EVAL_VENV)/bin/python || $(PYTHON) -m venv $(EVAL_VENV)
	$(EVAL_VENV)/bin/pip install -q lm-eval torch 'transformers>=4.57' accelerate
	$(EVAL_VENV)/bin/python tests/eval_interop/check_lm_eval.py build/release/furious

install: build
	cmake --install build/release --prefix $(PREFIX)

asan: setup
	cmake --preset asan
	cmake --build --preset asan -j $(JOBS)
	ctest --preset asan -j $(JOBS)

tsan: setup
	cmake --preset tsan
	cmake --build --preset tsan -j $(JOBS)
	ctest --preset tsan

# Each fuzzer starts from its corpus and stores new inputs in build/fuzz; a failing input is named.
fuzz:
	@scripts/setup.sh clang libclang-rt-dev
	cmake --preset fuzz
	cmake --build --preset fuzz -j $(JOBS)
	ls tests/fuzz/corpus | xargs -P $(JOBS) -I NAME scripts/fuzz.sh NAME $(FUZZ_SECONDS)

# The tests see Debian's torch through the virtual environment.
python: build
	@scripts/setup.sh python3-dev python3-venv python3-numpy python3-torch
	$(PYTHON) -m venv --system-site-packages build/python-venv
	build/python-venv/bin/pip install -q scikit-build-core nanobind pytest mypy
	rm -rf build/python-wheel
	build/python-venv/bin/pip wheel -q . --no-build-isolation --no-deps -w build/python-wheel \
	  --config-settings=cmake.define.FURIOUS_LIBRARY=build/$(PRESET)/libfurious.so
	build/python-venv/bin/pip install -q --force-reinstall --no-deps build/python-wheel/furious-*.whl
	build/python-venv/bin/mypy
	build/python-venv/bin/python -m pytest -q python/tests

# Exported directories in Hugging Face's library. torch and transformers come from the package index and need some
# gigabytes; INTEROP_VENV names a virtual environment that has them already. FURIOUS_FIXTURES=DIR adds checkpoints of other
# programs (tests/model/fixtures_test.cpp).
test-interop: build
	@scripts/setup.sh python3-dev python3-venv
	test -x $(INTEROP_VENV)/bin/python || $(PYTHON) -m venv $(INTEROP_VENV)
	$(INTEROP_VENV)/bin/pip install -q torch 'transformers>=4.57' tokenizers safetensors sentencepiece numpy pytest \
	  scikit-build-core nanobind
	rm -rf build/interop-wheel
	$(INTEROP_VENV)/bin/pip wheel -q . --no-build-isolation --no-deps -w build/interop-wheel \
	  --config-settings=cmake.define.FURIOUS_LIBRARY=build/release/libfurious.so
	$(INTEROP_VENV)/bin/pip install -q --force-reinstall --no-deps build/interop-wheel/furious-*.whl
	FURIOUS=build/release/furious $(INTEROP_VENV)/bin/python -m pytest -q tests/interop python/tests/test_hf.py

cuda: setup
	cmake --preset cuda
	cmake --build --preset cuda -j $(JOBS)

test-cuda:
	@scripts/test_cuda.sh $(JOBS)

# QUICK=1 leaves out the tests that take longer than 10 s.
test-emulated: setup
	cmake --preset cuda
	cmake --build --preset cuda -j $(JOBS) --target furious_emulated_tests
	@scripts/test_emulated.sh $(if $(QUICK),--quick) build/cuda/tests/furious_emulated_tests $(JOBS)

bench: build
	build/release/furious bench mixer --preset 2mamba --length 512,2048 --backward

findings: build
	scripts/findings.sh build/release/furious

format:
	@scripts/setup.sh clang-format
	git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs clang-format -i

tidy: build
	@scripts/setup.sh clang-tidy
	git ls-files 'src/*.cpp' | xargs -P $(JOBS) -n 1 clang-tidy -p build/release --quiet

clean:
	rm -rf build
