"""Targets that read images, with M-RoPE (Qwen3-VL), windows or shared KV (Gemma 3 and 4): tokens equal plain vLLM's."""

import contextlib

import pytest
from engine_process import Engine, draft_every_level, run
from tiny_images import FAMILIES, OPTIONS, build, with_pictures, without_torchvision

SAMPLING = [{"temperature": 0, "max_tokens": 30}, {"temperature": 0.8, "seed": 5, "max_tokens": 30}]


def answers(engine, prompts):
    """Tokens of every prompt, greedy and seeded, four at a time, and of the first three also one at a time."""
    parts = [[prompt] for prompt in prompts[:3]] + [prompts[i : i + 4] for i in range(0, len(prompts), 4)]
    return [run(engine, part, {**params, "ignore_eos": True}) for params in SAMPLING for part in parts]


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_plain_vllm(tmp_path, family, random_prompts):
    """Batches mix prompts with no, one and two images. After its first use, a prompt is in the prefix cache."""
    target, draft = build(tmp_path, family)
    texts, seeds = random_prompts(5, 40, 90), [[1], [], [2, 3], [1, 1], [4]]
    prompts = [with_pictures(family, text, own) for text, own in zip(texts, seeds, strict=True)]
    results = []
    for config in (None, {"method": "gsd", "model": str(draft), "num_speculative_tokens": 16}):
        setup = [draft_every_level] if config else []
        with contextlib.closing(Engine(target, config, setup, [without_torchvision], **OPTIONS)) as engine:
            results.append(answers(engine, prompts))
            counts = engine.metrics()
    assert results[1] == results[0]
    assert counts["gsd_nodes_accepted_native"] > counts["gsd_target_steps"] / 20
    assert counts["gsd_kv_rows_moved"] > 20
    assert counts["prefix_cache_hits"] > 0 and counts["mm_cache_hits"] > 0
