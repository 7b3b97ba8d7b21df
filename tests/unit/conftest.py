"""Lets the tests here import ``walk_world`` and the kernels' ``references``, and gives them what they share."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "kernels")]


@pytest.fixture(scope="module")
def sampler():
    """VLLM's own."""
    from vllm.v1.sample.sampler import Sampler

    return Sampler()


@pytest.fixture(scope="module")
def one_thread():
    """Eight logits need no second thread, and waiting for it would be most of the time."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
