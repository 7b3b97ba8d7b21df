"""Fixtures of the kernel tests."""

import sys
from pathlib import Path

import pytest
import torch

from vllm_gsd.ops import HAVE_EXTENSION

sys.path.insert(0, str(Path(__file__).parent))  # for tree_cases


ISAS = ["baseline", "avx2", "avx512", "avx512bf16"]
FASTEST = torch.ops.vllm_gsd.current_isa() if HAVE_EXTENSION else 0  # of this machine


@pytest.fixture(params=ISAS)
def isa(request):
    """Runs the test once with each instruction set that the kernels are compiled for and this machine has."""
    if not HAVE_EXTENSION:
        pytest.skip("the compiled kernels are not built")
    level = ISAS.index(request.param)
    try:
        if torch.ops.vllm_gsd.set_isa_limit(level) != level:
            pytest.skip(f"this machine has no {request.param}")
        yield request.param
    finally:
        torch.ops.vllm_gsd.set_isa_limit(FASTEST)


@pytest.fixture
def up_to_isa():
    """Lets one test use nothing better than an instruction set: ``up_to_isa("avx512")``."""
    yield lambda name: HAVE_EXTENSION and torch.ops.vllm_gsd.set_isa_limit(ISAS.index(name))
    if HAVE_EXTENSION:
        torch.ops.vllm_gsd.set_isa_limit(FASTEST)


@pytest.fixture
def threads():
    """Sets the number of threads for one test: ``threads(1)``."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def upstream():
    """vLLM's ``_custom_ops`` with its CPU kernels loaded; skips where vLLM is missing or built for a GPU."""
    ops = pytest.importorskip("vllm._custom_ops")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM is not built for CPUs")
    current_platform.import_kernels()
    return ops
