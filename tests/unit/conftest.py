"""Shared fixtures; lets the unit tests import ``walk_world`` and the kernels' ``references``."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "kernels")]


@pytest.fixture(scope="module")
def sampler():
    """vLLM's own sampler."""
    from vllm.v1.sample.sampler import Sampler

    return Sampler()


@pytest.fixture(scope="module")
def one_thread():
    """Use one thread: with eight logits, most of the time would be spent waiting for a second one."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target with random weights, for the tests of ``vllm-gsd distill``."""
    from distill_world import write_target  # loads PyTorch, which other tests do without

    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def work(target, tmp_path_factory):
    """A work folder of ``vllm-gsd distill`` with answers of the target and their states."""
    from distill_world import write_answers

    return write_answers(tmp_path_factory.mktemp("work"), target)
