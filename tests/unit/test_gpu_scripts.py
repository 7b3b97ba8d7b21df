"""The scripts for GPU machines, as far as they go without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]


def script(name, *arguments, **environment):
    return subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / name, *arguments],
        capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )  # fmt: skip


def test_gpu_check_says_what_is_missing():
    done = script("gpu_check")
    assert done.returncode == 2
    sentence = done.stderr.strip()
    assert sentence.startswith("gpu_check: ") and sentence.endswith(".") and "\n" not in sentence
    assert "no GPU was found" in sentence
    assert not done.stdout
