"""Published kinds of drafts give plain vLLM's output for hard requests (see ``hard_requests``).

``test_blocks.py`` and ``test_eagle3.py`` test every format, and ``v2/test_v2_drafts.py`` tests Model Runner V2.
"""

import pytest
from engine_process import Engine
from hard_requests import SCARCE, ask, check_counts, hard_prompts
from tiny_eagle3 import HEADS

KINDS = ["dspark", "dflash2", "dflash", "midlayer"]
LENGTH = 16
ENGINE = {"skip_tokenizer_init": False, "block_size": 32, "max_model_len": 128}


@pytest.fixture(scope="module")
def prompts(random_prompts):
    return hard_prompts(random_prompts)


@pytest.fixture(scope="module")
def expected(text_pair, prompts):
    plain = Engine(text_pair.target, None, **ENGINE)
    tokens = ask(plain, prompts, LENGTH)
    plain.close()
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_equals_plain_vllm(text_pair, tiny_blocks, tiny_eagle3, prompts, expected, kind):
    draft = tiny_eagle3 / kind if kind in HEADS else tiny_blocks[kind]
    config = {"method": "gsd", "model": str(draft), "top_k": 4, "budget": 16}
    engine = Engine(text_pair.target, config, **{**ENGINE, **SCARCE})
    assert ask(engine, prompts, LENGTH) == expected
    check_counts(engine.metrics(), levels=kind in HEADS)
    engine.close()
