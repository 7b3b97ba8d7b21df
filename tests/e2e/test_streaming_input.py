"""Sessions of streaming input: chunks share a request id, but each has its own sampling parameters."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from forking_server import ENVIRONMENT
from patience import SECONDS

pytestmark = pytest.mark.e2e
PROGRAM = Path(__file__).with_name("streaming_run.py")


def run_sessions(pair, command: str, gsd: bool) -> dict:
    """What the program prints for plain vLLM or for gsd. ``command`` is the command that runs Python programs."""
    config = {"method": "gsd", "model": str(pair.draft), "budget": 16} if gsd else None
    done = subprocess.run(
        [command, str(PROGRAM), str(pair.target), json.dumps(config)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=True,
        timeout=2 * SECONDS,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def results(tiny_pair, preforked):
    return [run_sessions(tiny_pair, preforked, gsd) for gsd in (False, True)]


def test_later_chunks_are_drafted_for(results):
    """The first chunk requests too few tokens to draft. The second requests many, and is drafted for."""
    plain, gsd = results
    assert gsd["tokens"] == plain["tokens"]
    assert plain["accepted"] == 0 < gsd["accepted"]


@pytest.mark.parametrize("kind", ["ended", "seeded", "repeating"])
def test_later_chunks_follow_the_text_that_was_emitted(results, kind):
    """A walk may accept tokens behind one that ends an answer. They must not count, nor may draws for them."""
    plain, gsd = results
    assert len(plain[kind]) == 8
    assert gsd[kind] == plain[kind]
