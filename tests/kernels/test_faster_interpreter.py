"""What ``faster_interpreter`` computes: every bit of what Triton's interpreter does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_triton import REPOSITORY, TRITON, pytestmark

PROGRAM = Path(__file__).with_name("interpreted_operations.py")
__all__ = ["pytestmark"]


def digests(*arguments: str) -> list[str]:
    path = os.pathsep.join(map(str, (REPOSITORY / "tests", TRITON, os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", PROGRAM, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_same_bits():
    expected = digests()
    assert len(expected) > 90
    assert digests("faster") == expected
