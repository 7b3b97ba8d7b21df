"""The Triton kernels without a GPU: interpreted. ``test_compiles`` compiles them.

Both in processes of their own, because Triton decides when it is imported which of the two it does, and vLLM and torch
look at a Triton that they can import. On a machine with a GPU, run ``pytest tests/kernels/gpu``.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent / "gpu"
REPOSITORY = FOLDER.parents[2]
DRAFTING = [REPOSITORY / "tests" / of for of in ("kernels/drafting", "e2e/v2", "e2e", "")]
TRITON = Path(sys.prefix) / "triton"  # where scripts/setup puts it, out of everybody else's sight

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run pytest tests/kernels/gpu"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None and not TRITON.is_dir(),
        reason="Triton is not installed; scripts/setup does it",
    ),
]


def run(*command, **environment) -> subprocess.CompletedProcess:
    path = os.pathsep.join(map(str, (REPOSITORY, FOLDER, FOLDER.parent, TRITON, os.environ.get("PYTHONPATH", ""))))
    # One thread: the tensors are tiny, and threads that wait take time from other tests.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_interpreted(file):
    done = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER / file), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_the_draft_phase_interpreted():
    """It needs vLLM, too."""
    path = os.pathsep.join(map(str, (REPOSITORY, *DRAFTING, TRITON, os.environ.get("PYTHONPATH", ""))))
    options = "-q", "-x", "-p", "no:cacheprovider", "-p", "preload_v2"
    done = run("-m", "pytest", *options, str(DRAFTING[0]), TRITON_INTERPRET="1", PYTHONPATH=path)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
