"""Engines with and without gsd, one after the other in one process, as in a notebook: each attends its own way."""

import contextlib

import pytest
from engine_process import DEFAULTS, Engine, Params, generate, metrics, model_runner

REPEATED = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
COUNTERS = ["gsd_kv_rows_moved", "spec_decode_num_accepted_tokens"]


def in_turn(llm, target, configs, prompts, params, options):
    """What engines of these speculative configs answer; the first of them is ``llm``, each is shut down at its end.

    Args:
        params: of all requests.
        options: further ones of the engines after the first.

    Returns:
        of each engine the tokens of every prompt, the classes of its layers' attention, and its ``COUNTERS``.
    """
    from vllm import LLM

    told = []
    for turn, config in enumerate(configs):
        if turn:
            llm = LLM(model=str(target), speculative_config=config, **{**DEFAULTS, **options})
        if config is not None:
            model_runner(llm).speculation.planner.costs = None  # draft whatever it costs
        tokens = [answer.tokens for answer in generate(llm, prompts, [Params(params)] * len(prompts))]
        layers = model_runner(llm).compilation_config.static_forward_context.values()
        counts = metrics(llm)
        told.append((tokens, {type(layer.impl).__name__ for layer in layers}, [counts.get(name) for name in COUNTERS]))
        llm.llm_engine.engine_core.shutdown()
    return told


@pytest.mark.parametrize("first", ["plain", "gsd"])
@pytest.mark.parametrize("draft", [True, False], ids=["draft", "no draft"])
def test_engines_in_turn(tiny_pair, random_prompts, start_engine, first, draft):
    prompts = [prompt + prompt for prompt in random_prompts(8, 10, 30)]
    expected = [answer.tokens for answer in start_engine(None).generate(prompts, REPEATED)]
    config = {"method": "gsd", "model": str(tiny_pair.draft) if draft else None}
    configs = [None, config, None] if first == "plain" else [config, None, config]
    with contextlib.closing(Engine(tiny_pair.target, configs[0], skip_tokenizer_init=True)) as engine:
        told = engine.call(in_turn, tiny_pair.target, configs, prompts, REPEATED, {"skip_tokenizer_init": True})
    for config, (tokens, attention, (moved, accepted)) in zip(configs, told, strict=True):
        assert attention == {"CPUAttentionBackendImpl" if config is None else "TreeCPUAttentionImpl"}
        assert tokens == expected
        assert config is None or (accepted > 0 and (moved > 0 or not draft))
