"""With our CPU kernels, answers are bit-identical with and without graphs, alone and in any batch."""

import contextlib

import pytest
import torch
from adapters import RANK, build_adapter, generate_adapted
from engine_process import Engine, Params, draft_every_level
from test_experts import build as build_experts
from tiny_quantised import quantised

from vllm_gsd.cpu.linear import packs

ENGINE = {"dtype": "bfloat16"}
OFF = {"extra_args": {"gsd": False}}
GREEDY = {"temperature": 0, "max_tokens": 40, "logprobs": 3, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 0.8, "top_p": 0.9, "seed": 5}

pytestmark = pytest.mark.skipif(
    not packs(torch.empty(16, 2, dtype=torch.bfloat16)) or torch.cpu._is_amx_tile_supported(),
    reason="on this processor, vLLM's own matrix products are used",
)


PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
FEATURES = {**PENALTIES, "min_tokens": 9, "logit_bias": {7: 2.0}}
CHUNKED = {"max_num_batched_tokens": 128, "enable_prefix_caching": False}
CASES = {
    "greedy": (GREEDY, CHUNKED),
    "seeded": (SEEDED, CHUNKED),
    "compiled": (GREEDY, {**CHUNKED, "enforce_eager": False}),
    "features": ({**GREEDY, **FEATURES}, CHUNKED),
    "seeded features": ({**SEEDED, **FEATURES, "top_k": 40, "min_p": 0.02}, CHUNKED),
    "cached prompts": (GREEDY, {"max_num_batched_tokens": 128}),
}


def check_bits(engine, generate, prompts, params, least_drafted=100):
    """Texts and log-probabilities are equal alone, in a batch, and in a batch where some requests have no graph.

    ``generate(prompts, params)`` returns the completions of each prompt; its ``params`` are one dict for each.
    """

    def alone(params):
        return [generate([prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]

    count = len(prompts)
    with_graph, off = [params] * count, [{**params, **OFF}] * count
    expected = alone(off)
    drafted = engine.metrics()["spec_decode_num_draft_tokens"]
    assert alone(with_graph) == expected
    assert generate(prompts, with_graph) == expected
    assert generate(prompts, off) == expected
    assert generate(prompts, [off[i] if i % 3 == 0 else with_graph[i] for i in range(count)]) == expected
    assert engine.metrics()["spec_decode_num_draft_tokens"] > drafted + least_drafted


def answers_of(engine):
    return lambda prompts, params: [answer.completions for answer in engine.generate(prompts, params)]


@pytest.mark.parametrize("case", CASES)
def test_graphs_change_no_bit(start_engine, random_prompts, case):
    """Prompts are cut into chunks."""
    params, options = CASES[case]
    engine = start_engine({}, **ENGINE, **options)
    check_bits(engine, answers_of(engine), random_prompts(8, 5, 300), params)


def test_many_requests(start_engine, random_prompts):
    engine = start_engine({}, **ENGINE, **CHUNKED)
    check_bits(engine, answers_of(engine), random_prompts(32, 5, 100), {**GREEDY, "max_tokens": 20})


@pytest.mark.parametrize("compiled", [False, True])
def test_blocks(start_engine, random_prompts, tiny_blocks, compiled):
    """The target of a draft of whole blocks also returns hidden states of its layers."""
    options = {"enforce_eager": not compiled, **CHUNKED}
    engine = start_engine({"model": str(tiny_blocks["dspark"])}, **ENGINE, **options)
    check_bits(engine, answers_of(engine), random_prompts(8, 5, 300), GREEDY)


def test_adapters(start_engine, random_prompts, tiny_pair, tmp_path):
    options = {**CHUNKED, "max_num_seqs": 7}  # LoRA needs room for the rows of as many requests
    engine = start_engine({}, **ENGINE, **options, enable_lora=True, max_loras=3, max_lora_rank=RANK)
    folders = [build_adapter(tmp_path / f"adapter{index}", tiny_pair.target, index) for index in range(2)]
    prompts = random_prompts(9, 5, 200)
    adapters = {tuple(prompt): [None, *folders][index % 3] for index, prompt in enumerate(prompts)}

    def generate(prompts, params):
        chosen = [adapters[tuple(prompt)] for prompt in prompts]
        answers = engine.call(generate_adapted, prompts, [Params(keys) for keys in params], chosen)
        return [answer.completions for answer in answers]

    check_bits(engine, generate, prompts, GREEDY)


@pytest.mark.parametrize("kind", ["Mixtral", "int8"])
def test_other_targets(random_prompts, tiny_pair, tmp_path, kind):
    """Targets whose products vLLM multiplies: mixtures of experts, and int8 weights."""
    if kind == "int8":
        target, draft = (quantised(getattr(tiny_pair, name), tmp_path / name, "int8") for name in ("target", "draft"))
    else:
        target, draft = build_experts(tmp_path, kind)
    config = {"method": "gsd", "model": str(draft)}
    with contextlib.closing(
        Engine(target, config, [draft_every_level], skip_tokenizer_init=True, **ENGINE, **CHUNKED)
    ) as engine:
        check_bits(engine, answers_of(engine), random_prompts(8, 5, 200), GREEDY)
