"""Targets and drafts of other architectures, and quantised ones, on Model Runner V2: tokens equal plain V2's."""

import contextlib

import pytest
import test_experts
import test_shared_kv
from engine_process import run
from tiny_pair import build_tiny_pair
from tiny_quantised import quantised
from v2_engine import V2Engine

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 0.8, "seed": 5}


def build_quantised(folder, form):
    """The tiny pair with both models quantised."""
    pair = build_tiny_pair(folder / "whole")
    return [quantised(source, folder / name, form) for name, source in (("target", pair.target), ("draft", pair.draft))]


# Layers that read the KV cache of earlier layers, a mixture of experts, attention within chunks, and 8-bit matrices.
BUILD = {"Gemma4": test_shared_kv.build, "Mixtral": test_experts.build, "Llama4": test_experts.build}
BUILD["int8"] = build_quantised


@pytest.mark.parametrize("family", BUILD)
def test_equals_plain_v2(tmp_path, random_prompts, family):
    """Requests are greedy or seeded, alone or in a batch of four."""
    target, draft = BUILD[family](tmp_path, family)
    prompts, params = random_prompts(5, 20, 80), [GREEDY, SEEDED, GREEDY, SEEDED, GREEDY]
    results = []
    for gsd in (None, {"method": "gsd", "model": str(draft), "num_speculative_tokens": 6, "max_depth": 3}):
        with contextlib.closing(V2Engine(target, gsd)) as engine:
            results.append([run(engine, prompts[:1], params[:1]), run(engine, prompts[1:], params[1:])])
            counts = engine.metrics()
    assert results[1] == results[0]
    assert counts["gsd_nodes_accepted_native"] > 0 and counts["gsd_kv_rows_moved"] > 0
