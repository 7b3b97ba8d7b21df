"""Tests of the Triton kernels: on a GPU as they are, else in Triton's interpreter (``TRITON_INTERPRET=1``).

Without either there is nothing to collect here; ``tests/kernels/test_triton.py`` runs them in a process of their own.
They need PyTorch, Triton, NumPy and pytest alone.
"""

import sys
from pathlib import Path

import pytest
import torch

from vllm_gsd.ops.dispatch import interpreted

HERE = Path(__file__).parent
FOLDERS = HERE, HERE.parents[0], HERE.parents[1] / "property", HERE.parents[1]
sys.path[:0] = map(str, FOLDERS)  # for paged_cases, references, reference_graph and faster_interpreter

ON_GPU = torch.cuda.is_available() and not interpreted()
if not ON_GPU and not interpreted():
    collect_ignore_glob = ["test_*.py"]
if interpreted():
    import faster_interpreter

    faster_interpreter.make_faster()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(scope="session")
def large() -> int:
    """What lengths are multiplied with: a GPU takes real ones, the interpreter does not."""
    return 16 if ON_GPU else 1
