"""Lets the contract tests import each other, and provides the sources of the next vLLM version."""

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

FETCH = Path(__file__).parents[2] / "scripts" / "fetch_vllm_sources"


NO_NETWORK = 3  # exit status of FETCH


@pytest.fixture(scope="module", autouse=True)
def parse_once():
    """Caches parsed modules, because consecutive tests mostly read the same module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ast, "parse", functools.lru_cache(8)(ast.parse))
        yield


@pytest.fixture(scope="session")
def next_sources() -> Path:
    """The ``vllm`` folder of the next version's sources, or the folder that ``VLLM_SOURCES`` names.

    The sources are downloaded once. Without a network, the tests that need them are skipped. Any other failure is an
    error.
    """
    if named := os.environ.get("VLLM_SOURCES"):
        return Path(named)
    fetched = subprocess.run([sys.executable, FETCH], capture_output=True, text=True)
    if fetched.returncode == NO_NETWORK:
        pytest.skip(fetched.stderr.splitlines()[-1])
    assert fetched.returncode == 0, fetched.stderr
    return Path(fetched.stdout.strip())
