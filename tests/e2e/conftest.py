"""Fixtures of the end-to-end tests."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the helper modules in this folder

from engine_pool import Kept, Pool
from engine_process import Engine, draft_every_level
from text_pair import build_text_pair
from tiny_blocks import BLOCKS, build_tiny_block
from tiny_eagle import build_tiny_eagle
from tiny_eagle3 import build_tiny_eagle3
from tiny_pair import VOCAB_SIZE, build_tiny_pair
from unlike_pair import build_unlike_pair


def pytest_collection_modifyitems(items):
    """Mark all tests in this folder as e2e."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def preforked():
    """A command that starts programs by forking; see ``ForkingServer.command``."""
    return Engine.server.command()


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory):
    """A tiny random target and its draft; see ``tiny_pair.TinyPair``."""
    return build_tiny_pair(tmp_path_factory.mktemp("tiny_pair"))


@pytest.fixture(scope="session")
def tiny_eagle(tiny_pair, tmp_path_factory):
    """An EAGLE draft for the tiny target."""
    return build_tiny_eagle(tiny_pair.target, tmp_path_factory.mktemp("tiny_eagle") / "work", VOCAB_SIZE)


@pytest.fixture(scope="session")
def tiny_eagle3(tiny_pair, random_prompts, tmp_path_factory):
    """Folders of EAGLE-3 heads for the tiny target, one for each of ``tiny_eagle3.HEADS``."""
    # The heads are fitted to some of the prompts of test_eagle.py and v2/test_v2.py.
    prompts = [*random_prompts(12, 5, 150, seed=31)[:4], *random_prompts(4, 5, 20, seed=3)[:2]]
    return build_tiny_eagle3(tiny_pair.target, tmp_path_factory.mktemp("tiny_eagle3"), prompts)


@pytest.fixture(scope="session")
def tiny_blocks(tiny_pair, tmp_path_factory):
    """Folders of block drafts for the tiny target, one for each of ``tiny_blocks.BLOCKS``."""
    folder = tmp_path_factory.mktemp("tiny_blocks")
    return {
        name: build_tiny_block(kind, tiny_pair.target, folder / name, **keys) for name, (kind, keys) in BLOCKS.items()
    }


@pytest.fixture(scope="session")
def wide_block(tmp_path_factory):
    """Folders of a target with a vocabulary of 40,000 tokens and of a DSpark draft for it."""
    folder = tmp_path_factory.mktemp("wide_block")
    target = build_tiny_pair(folder, vocab_size=40_000).target
    return target, build_tiny_block("dspark", target, folder / "block")


@pytest.fixture(scope="session")
def unlike_pair(tiny_pair, tmp_path_factory):
    """The tiny target, and a draft with another head size."""
    return build_unlike_pair(tiny_pair, tmp_path_factory.mktemp("unlike_pair"))


@pytest.fixture(scope="session")
def text_pair(tmp_path_factory):
    """The tiny pair with a tokenizer for real text."""
    return build_text_pair(tmp_path_factory.mktemp("text_pair"))


@pytest.fixture(scope="module")
def engine_pool():
    """The pool of engines that the module's tests share."""
    pool = Pool()
    yield pool
    pool.leave(0)


@pytest.fixture(scope="module")
def start_engine(engine_pool, tiny_pair):
    """Starts engines of the tiny pair: ``start_engine(gsd, setup=(), **options)``.

    ``gsd`` is None for plain vLLM, else a dict of config keys besides method and model. The engine's process calls the
    functions in ``setup`` with the ``LLM``. Calls with equal arguments return the same engine.
    """

    def start(gsd: dict | None = None, setup: tuple = (), **options) -> Kept:
        config = None if gsd is None else {"method": "gsd", "model": str(tiny_pair.draft), **gsd}
        calls = [*setup, draft_every_level] if gsd is not None else [*setup]
        options = {"skip_tokenizer_init": True, **options}
        key = repr((gsd, setup, sorted(options.items())))
        return engine_pool.engine(key, lambda: Engine(tiny_pair.target, config, calls, **options))

    return start


@pytest.fixture(scope="session")
def built_in_pair():
    """The built-in target and draft; the target is converted on first use."""
    from vllm_gsd.tools.models import built_in_pair

    return built_in_pair()


@pytest.fixture(scope="module")
def start_built_in(engine_pool, built_in_pair):
    """Starts an engine of the built-in pair, ``start_built_in(gsd=True)`` or plain, as ``start_engine`` does."""

    def start(gsd: bool, **options) -> Kept:
        config = {"method": "gsd", "model": str(built_in_pair.draft)} if gsd else None
        options = {"max_model_len": 1024, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 29, **options}
        setup = [draft_every_level] if gsd else []
        key = repr(("built-in", gsd, sorted(options.items())))
        return engine_pool.engine(key, lambda: Engine(built_in_pair.target, config, setup, **options))

    return start


@pytest.fixture(scope="session")
def random_prompts():
    """``random_prompts(count, shortest, longest, seed)`` makes prompts of random token ids."""

    def make(count: int, shortest: int = 5, longest: int = 40, seed: int = 0) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]

    return make


@pytest.fixture(scope="module")
def prompts(random_prompts):
    """Eight short prompts."""
    return random_prompts(8)


@pytest.fixture(scope="module")
def plain(request, start_engine):
    """Plain vLLM on the tiny target, with the engine arguments in the module's ``ENGINE``."""
    return start_engine(None, **getattr(request.module, "ENGINE", {}))


@pytest.fixture(scope="module")
def gsd(request, start_engine):
    """The tiny pair with the default gsd config and the module's ``ENGINE`` arguments."""
    return start_engine({}, **getattr(request.module, "ENGINE", {}))
