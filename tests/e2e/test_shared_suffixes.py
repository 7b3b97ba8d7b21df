"""Source "shared": copies from finished responses change no token, and stay within a cache salt and an adapter."""

import pytest
from adapters import RANK, build_adapter, generate_adapted
from engine_process import Params

GREEDY = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}
ENGINE = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK, "block_size": 32}

pytest.importorskip("arctic_inference", reason="arctic-inference was not built by scripts/setup")


@pytest.fixture(scope="module")
def shared(start_engine):
    return start_engine({"model": None, "sources": ["shared"], "budget": 16}, **ENGINE)


def ask(engine, prompts, salt=None, adapter=None):
    """Tokens, and counts of accepted nodes from other responses and from the own text, and of target steps."""
    before = engine.metrics()
    params = [Params(GREEDY)] * len(prompts)
    salted = [{"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})} for ids in prompts]
    answers = engine.call(generate_adapted, salted, params, [adapter] * len(prompts))
    after = engine.metrics()
    names = "gsd_nodes_accepted_shared", "gsd_nodes_accepted_ngram", "gsd_target_steps"
    return [answer.tokens for answer in answers], [after[name] - before.get(name, 0) for name in names]


def test_what_was_answered_before_comes_in_few_steps(shared, plain, prompts):
    expected = [answer.tokens for answer in plain.generate(prompts, GREEDY)]
    first, counts = ask(shared, prompts)
    assert first == expected
    again, (accepted, own, steps) = ask(shared, prompts)
    assert again == expected
    assert own == 0
    assert accepted > 0.5 * sum(map(len, expected))
    assert steps < 0.5 * counts[2]


def test_salts_and_adapters_do_not_see_one_another(shared, plain, random_prompts, tiny_pair, tmp_path):
    adapter = build_adapter(tmp_path / "adapter0", tiny_pair.target, 0)
    prompts = random_prompts(4, seed=7)
    expected = [answer.tokens for answer in plain.generate(prompts, GREEDY)]
    ask(shared, prompts, salt="mine")
    tokens, (theirs, *_) = ask(shared, prompts, salt="yours")
    assert tokens == expected
    tokens, (mine, *_) = ask(shared, prompts, salt="mine")
    assert tokens == expected
    ask(shared, prompts, adapter=adapter)
    _, (adapted, *_) = ask(shared, prompts, adapter=adapter)
    _, (_, _, steps) = ask(shared, random_prompts(4, seed=8), salt="another")
    # Random models repeat themselves a little, so new texts have some hits, but far fewer than repeated requests.
    assert min(mine, adapted) > 0.5 * 4 * 48
    assert theirs == 0
    assert steps >= 0.9 * 4 * 48


def test_beside_the_other_sources(start_engine, plain, prompts):
    every = start_engine({"sources": ["draft", "ngram", "shared"], "budget": 16}, **ENGINE)
    expected = [answer.tokens for answer in plain.generate(prompts, GREEDY)]
    first, (_, _, steps) = ask(every, prompts)
    again, (accepted, _, fewer) = ask(every, prompts)
    assert first == again == expected
    assert accepted > 0
    assert fewer < steps
