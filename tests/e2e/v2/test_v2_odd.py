"""Unusual requests and graphs on Model Runner V2, with adapters and after aborts: answers equal plain V2's."""

import pytest
from adapters import RANK, build_adapter, generate_adapted
from engine_probes import generate_and_abort
from engine_process import Params
from request_features import DATE, EBNF, assert_same
from v2_engine import V2Engine

LONGEST = 96
ENGINE = {
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": RANK,
    "block_size": 32,
    "max_model_len": LONGEST,
    "skip_tokenizer_init": False,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 1.0, "seed": 3}
UNPRUNED = {"theta_prob": 0.0, "theta_sib": 0.0}
GRAPHS = {
    "one node": {"num_speculative_tokens": 1, "max_depth": 3, "top_k": 4},
    "deep": {"num_speculative_tokens": 20, "max_depth": 12, "top_k": 7, **UNPRUNED},
}
# Length of the prompt, whether the request has an adapter, and its sampling parameters.
ODD = [
    (1, False, GREEDY),
    (1, True, {**SEEDED, "logprobs": 2}),
    (9, False, {**GREEDY, "max_tokens": 1, "logprobs": 1}),
    (9, True, {**SEEDED, "max_tokens": 1}),
    (9, False, {**SEEDED, "n": 3, "logprobs": 1, "top_k": 30, "top_p": 0.9, "min_p": 0.05}),
    (9, True, {"temperature": 0, "max_tokens": 12, "logprobs": 2, "structured_outputs": DATE}),
    (9, True, {"temperature": 0.9, "seed": 3, "max_tokens": 12, "structured_outputs": {"grammar": EBNF}, "n": 2}),
    (LONGEST - 3, False, {**SEEDED, "presence_penalty": 0.5}),
    (LONGEST - 1, True, GREEDY),
    (9, False, {**GREEDY, "allowed_token_ids": [11]}),
    (9, True, {**SEEDED, "min_tokens": 6, "stop_token_ids": list(range(3, 240, 4))}),
]


@pytest.fixture(scope="module")
def requests(text_pair, random_prompts, tmp_path_factory):
    """Prompts, parameters and adapters, and five more prompts, of which some are aborted."""
    adapter = build_adapter(tmp_path_factory.mktemp("odd") / "adapter1", text_pair.target, 1)
    prompts = [random_prompts(1, length, length, seed=index)[0] for index, (length, _, _) in enumerate(ODD)]
    adapters = [adapter if adapted else None for _, adapted, _ in ODD]
    return prompts, [Params(keys) for _, _, keys in ODD], adapters, random_prompts(5, 5, 20, seed=3)


def answer(engine, requests):
    prompts, params, adapters, others = requests
    left = engine.call(generate_and_abort, others, {**SEEDED, "max_tokens": 12}, [1, 3], 2)
    return engine.call(generate_adapted, prompts, params, adapters) + [one for one in left if one is not None]


@pytest.fixture(scope="module")
def expected(engine_pool, text_pair, requests):
    return answer(engine_pool.engine("plain", lambda: V2Engine(text_pair.target, None, **ENGINE)), requests)


@pytest.mark.parametrize("graph", GRAPHS)
def test_equals_plain_v2(engine_pool, text_pair, requests, expected, graph):
    config = {"method": "gsd", "model": str(text_pair.draft), **GRAPHS[graph]}
    engine = engine_pool.engine(graph, lambda: V2Engine(text_pair.target, config, async_scheduling=True, **ENGINE))
    answers = answer(engine, requests)
    assert len(answers) == len(ODD) + 3
    assert_same(answers, expected, 1e-3)
    counts = engine.metrics()
    assert counts["spec_decode_num_accepted_tokens"] > 0
    assert not any(name.startswith("gsd_fallbacks") for name in counts)
