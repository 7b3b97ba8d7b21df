"""Which files of tests come first, and the threads of all their processes."""

import gc
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the files of drafts that unit and e2e both write

# What is imported while tests are collected stays until the end, so garbage is looked for afterwards and elsewhere.
gc.disable()

# One thread each, unless a test says otherwise: threads of OpenMP wait for one another on a processor, and with as many
# busy processes as processors that is most of what they would do.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Those that take longest, by the log of a whole run: begun last, they would keep one process busy while others have
# nothing left to do.
LONGEST = (
    "test_v2_parallel",  # before other tests with Ray, whose nodes would leave it little of two cores
    "test_install",
    "test_v2_drafts",
    "test_gpu_path",
    "test_v2",
    "test_triton",
    "test_bench",
    "test_ray_batch",
    "test_distill",
    "test_tensor_parallel",
    "test_compiles",
    "test_v2_windows",
    "test_v2_structured",
    "test_killed",
    "test_structured_output",
    "test_structured_many",
    "test_data_parallel",
    "test_limits",
    "test_lossless_tiny",
    "test_serve",
    "test_serve_features",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """For ``e2e/test_fuzz.py``; ``scripts/fuzz`` gives them."""
    parser.addoption("--examples", type=int, default=200, help="batches that the fuzzer tries")
    parser.addoption("--fuzz-seed", type=int, default=0, help="what the fuzzer draws them from")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """See above."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The rest stays in its order."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))
