"""With our CPU kernels, answers are the same bits with a graph and without, at any batch size and beside any requests."""

import pytest
import torch

from vllm_gsd.cpu.linear import packs

ENGINE = {"dtype": "bfloat16"}
OFF = {"extra_args": {"gsd": False}}
GREEDY = {"temperature": 0, "max_tokens": 40, "logprobs": 3, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 0.8, "top_p": 0.9, "seed": 5}

pytestmark = pytest.mark.skipif(
    not packs(torch.empty(16, 2, dtype=torch.bfloat16)) or torch.cpu._is_amx_tile_supported(),
    reason="this processor's products are upstream's",
)


def alone(engine, prompts, params):
    return [engine.generate([prompt], params)[0].completions for prompt in prompts]


def together(engine, prompts, params):
    return [answer.completions for answer in engine.generate(prompts, params)]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_graphs_change_no_bit(start_engine, random_prompts, compiled, params):
    """Texts and log-probabilities; prompts in several parts, and others beside them, some without graphs."""
    engine = start_engine({}, **ENGINE, enforce_eager=not compiled, max_num_batched_tokens=128)
    prompts = random_prompts(8, 5, 300)
    expected = alone(engine, prompts, {**params, **OFF})
    drafted = engine.metrics()["spec_decode_num_draft_tokens"]
    assert alone(engine, prompts, params) == expected
    assert together(engine, prompts, params) == expected
    assert together(engine, prompts, {**params, **OFF}) == expected
    assert together(engine, prompts, [{**params, **(OFF if i % 3 == 0 else {})} for i in range(8)]) == expected
    assert engine.metrics()["spec_decode_num_draft_tokens"] > drafted + 100
