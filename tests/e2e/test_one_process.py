"""Engines with and without gsd run one after another in one process, as in a notebook, without affecting each other."""

import contextlib

import pytest
from engine_process import DEFAULTS, Engine, Params, generate, metrics, model_runner

REPEATED = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
COUNTERS = ["gsd_kv_rows_moved", "spec_decode_num_accepted_tokens"]


def in_turn(llm, target, configs, prompts, params, options):
    """Run one engine for each config, one after another. The first engine is ``llm``; each is shut down after use.

    Args:
        params: sampling parameters of all requests.
        options: more arguments for the engines after the first.

    Returns:
        For each engine: the tokens of every prompt, the attention classes of its layers, and its ``COUNTERS``.
    """
    from vllm import LLM

    results = []
    for turn, config in enumerate(configs):
        if turn:
            llm = LLM(model=str(target), speculative_config=config, **{**DEFAULTS, **options})
        if config is not None:
            model_runner(llm).speculation.planner.costs = None  # draft regardless of cost
        tokens = [answer.tokens for answer in generate(llm, prompts, [Params(params)] * len(prompts))]
        layers = model_runner(llm).compilation_config.static_forward_context.values()
        counts = metrics(llm)
        attention = {type(layer.impl).__name__ for layer in layers}
        results.append((tokens, attention, [counts.get(name) for name in COUNTERS]))
        llm.llm_engine.engine_core.shutdown()
    return results


@pytest.mark.parametrize("first", ["plain", "gsd"])
@pytest.mark.parametrize("draft", [True, False], ids=["draft", "no draft"])
def test_engines_in_turn(tiny_pair, random_prompts, start_engine, first, draft):
    prompts = [prompt + prompt for prompt in random_prompts(8, 10, 30)]
    expected = [answer.tokens for answer in start_engine(None).generate(prompts, REPEATED)]
    config = {"method": "gsd", "model": str(tiny_pair.draft) if draft else None}
    configs = [None, config, None] if first == "plain" else [config, None, config]
    with contextlib.closing(Engine(tiny_pair.target, configs[0], skip_tokenizer_init=True)) as engine:
        results = engine.call(in_turn, tiny_pair.target, configs, prompts, REPEATED, {"skip_tokenizer_init": True})
    for config, (tokens, attention, (moved, accepted)) in zip(configs, results, strict=True):
        assert attention == {"CPUAttentionBackendImpl" if config is None else "TreeCPUAttentionImpl"}
        assert tokens == expected
        assert config is None or (accepted > 0 and (moved > 0 or not draft))
