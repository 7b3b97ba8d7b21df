"""In bfloat16 the models' matrices lie packed for our own kernel, and the answers are plain vLLM's up to rounding."""

import pytest
import torch
from engine_process import model_runner

from vllm_gsd.ops.linear import packs

ENGINE = {"dtype": "bfloat16"}
GREEDY = {"temperature": 0, "max_tokens": 40, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True}
# How far two computations of a log-probability in bfloat16 may lie apart in this model, whose logits reach 20.
ROUNDING = 0.5

pytestmark = pytest.mark.skipif(
    not packs(torch.empty(16, 2, dtype=torch.bfloat16)) or torch.cpu._is_amx_tile_supported(),
    reason="this processor's products are upstream's",
)


def layers_by_kind(llm) -> dict[str, set[bool]]:
    """By model and class of its layers with weights of their own kind for CPUs: whether they are packed."""
    runner = model_runner(llm)
    found: dict[str, set[bool]] = {}
    for name, model in (("target", runner.model), ("draft", runner.drafter.drafter.model.model)):
        for module in model.modules():
            if hasattr(module, "cpu_linear"):
                ours = "vllm_gsd" in module.cpu_linear.__module__
                found.setdefault(f"{name} {type(module).__name__}", set()).add(ours)
    return found


def test_all_layers_are_packed(gsd):
    found = gsd.call(layers_by_kind)
    for name in ("target", "draft"):
        layers = ("QKVParallelLinear", "MergedColumnParallelLinear", "RowParallelLinear")
        assert all(found[f"{name} {layer}"] == {True} for layer in layers)
    assert found["target ParallelLMHead"] == {True}


def test_other_types_are_upstreams(start_engine):
    found = start_engine({}).call(layers_by_kind)  # float32
    assert found and all(packed == {False} for packed in found.values())


def test_answers(plain, gsd, random_prompts):
    """Log-probabilities are plain vLLM's; so are texts, until two tokens are as good as one another."""
    prompts = random_prompts(24, 5, 200)
    for theirs, ours in zip(plain.generate(prompts, GREEDY), gsd.generate(prompts, GREEDY), strict=True):
        for expected, got in zip(theirs.prompt_logprobs[1:], ours.prompt_logprobs[1:], strict=True):
            assert all(abs(got[token] - expected[token]) < ROUNDING for token in got.keys() & expected.keys())
        expected, got = theirs.completions[0], ours.completions[0]
        same = next((i for i, (a, b) in enumerate(zip(expected.tokens, got.tokens)) if a != b), None)  # noqa: B905
        if same is not None:
            first, second = sorted(expected.logprobs[same].values(), reverse=True)[:2]
            assert first - second < ROUNDING
        for a, b in list(zip(expected.logprobs, got.logprobs, strict=True))[:same]:
            assert all(abs(a[token] - b[token]) < ROUNDING for token in a.keys() & b.keys())
