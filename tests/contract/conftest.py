"""Lets the tests here import one another, and gives them the sources of the vLLM that comes next."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

NEXT_VERSION = "0.33.0"
FETCH = Path(__file__).parents[2] / "scripts" / "fetch_vllm_sources"


@pytest.fixture(scope="session")
def next_sources() -> Path:
    """The ``vllm`` folder of the next version, or of the one that ``VLLM_SOURCES`` names.

    Where it cannot be downloaded its tests are skipped, but fail in CI, which sets ``CI=true``.
    """
    if named := os.environ.get("VLLM_SOURCES"):
        return Path(named)
    fetched = subprocess.run([sys.executable, FETCH, NEXT_VERSION], capture_output=True, text=True)
    if fetched.returncode != 0:
        reason = f"The sources of vLLM {NEXT_VERSION} cannot be had: {fetched.stderr.strip().splitlines()[-1]}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return Path(fetched.stdout.strip())
