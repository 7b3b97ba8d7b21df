"""With our CPU kernels, answers are bit-identical with and without graphs, alone and in any batch."""

import pytest
import torch

from vllm_gsd.cpu.linear import packs

ENGINE = {"dtype": "bfloat16"}
OFF = {"extra_args": {"gsd": False}}
GREEDY = {"temperature": 0, "max_tokens": 40, "logprobs": 3, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 0.8, "top_p": 0.9, "seed": 5}

pytestmark = pytest.mark.skipif(
    not packs(torch.empty(16, 2, dtype=torch.bfloat16)) or torch.cpu._is_amx_tile_supported(),
    reason="on this processor, vLLM's own matrix products are used",
)


def alone(engine, prompts, params):
    return [engine.generate([prompt], params)[0].completions for prompt in prompts]


def together(engine, prompts, params):
    return [answer.completions for answer in engine.generate(prompts, params)]


CASES = {
    "greedy": (GREEDY, {"max_num_batched_tokens": 128}),  # prompts are chunked
    "seeded": (SEEDED, {"max_num_batched_tokens": 128}),
    "compiled": (GREEDY, {"max_num_batched_tokens": 128, "enforce_eager": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_graphs_change_no_bit(start_engine, random_prompts, case):
    """Texts and log-probabilities are equal alone, in a batch, and in a batch where some requests have no graph."""
    params, options = CASES[case]
    engine = start_engine({}, **ENGINE, enable_prefix_caching=False, **options)
    prompts = random_prompts(8, 5, 300)
    expected = alone(engine, prompts, {**params, **OFF})
    drafted = engine.metrics()["spec_decode_num_draft_tokens"]
    assert alone(engine, prompts, params) == expected
    assert together(engine, prompts, params) == expected
    assert together(engine, prompts, {**params, **OFF}) == expected
    assert together(engine, prompts, [{**params, **(OFF if i % 3 == 0 else {})} for i in range(8)]) == expected
    assert engine.metrics()["spec_decode_num_draft_tokens"] > drafted + 100
