#!/usr/bin/env bash
# Builds the CUDA preset and runs every test that uses a GPU; fails, and says why, where there is none. Needs no
# environment variables: nvcc is found in /usr/local/cuda when it is not in PATH.
#   scripts/test_cuda.sh [JOBS] [arguments of the test binary...]
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=${1:-$(nproc)}
[ $# -eq 0 ] || shift

fail() {
  echo "test-cuda: $1" >&2
  exit 1
}

# Before the build, which takes minutes. /dev/dxg is a GPU under WSL.
compgen -G '/dev/nvidia[0-9]*' >/dev/null || [ -e /dev/dxg ] || nvidia-smi -L 2>/dev/null | grep -q ^GPU ||
  fail "this machine has no NVIDIA GPU, or no driver for it. Run it on one that has; make test-emulated runs most of the \
GPU tests on a CPU, and make test everything else."
command -v nvcc >/dev/null || PATH=$PATH:/usr/local/cuda/bin
command -v nvcc >/dev/null || fail "nvcc was not found. Install the CUDA toolkit."

scripts/setup.sh
cmake --preset cuda
cmake --build --preset cuda -j "$jobs" --target furious_tests

# Suites whose name ends in Cuda. In one process: starting CUDA for each of them would take longer than the tests.
log=$(mktemp)
trap 'rm -f "$log"' EXIT
build/cuda/tests/furious_tests --gtest_filter='*Cuda.*' "$@" | tee "$log"
if ! grep -q '^\[       OK \]' "$log"; then
  fail "all tests were skipped: CUDA finds no device. See what nvidia-smi says."
fi
