"""Lets the tests in this folder import its helpers, and skips them if Triton is missing."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine_pool import Kept
from forking_server import forking_server
from v2_engine import HAVE_TRITON, OPTIONS, WITHOUT_TRITON, V2Engine, variables_of_programs


def pytest_collection_modifyitems(items):
    if HAVE_TRITON:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=WITHOUT_TRITON))


@pytest.fixture(scope="session")
def preforked_v2(tmp_path_factory):
    """A command that starts programs by forking, as ``preforked`` does, with an interpreted Model Runner V2."""
    with forking_server(tmp_path_factory.mktemp("preforked_v2"), "forking_v2", **variables_of_programs()) as command:
        yield command


@pytest.fixture(scope="module")
def start_v2(engine_pool, tiny_pair):
    """Starts V2 engines of the tiny pair, as ``start_engine`` does."""

    def start(gsd: dict | None = None, **options) -> Kept:
        config = None if gsd is None else {"method": "gsd", "model": str(tiny_pair.draft), **gsd}
        key = repr(("V2", gsd, sorted(options.items())))
        return engine_pool.engine(key, lambda: V2Engine(tiny_pair.target, config, **options))

    return start


@pytest.fixture(scope="session")
def v2_options():
    """Engine arguments of V2 engines, for V1 engines to compare with."""
    return OPTIONS
