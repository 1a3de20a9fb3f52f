"""Devices of the tests: the CPU, and a GPU where torch and the library have one."""

import os

# The AMX kernels of torch (oneDNN) end in an illegal instruction on systems that do not allow AMX; bf16 uses them.
os.environ.setdefault("DNNL_MAX_CPU_ISA", "AVX512_CORE_BF16")

import furious  # noqa: E402


def devices():
    found = ["cpu"]
    try:
        import torch
    except ImportError:
        return found
    if torch.cuda.is_available() and furious.cuda_devices() > 0:
        found.append("cuda")
    return found


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", devices())

