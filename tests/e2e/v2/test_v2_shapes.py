"""Targets and drafts of other shapes, and quantised ones, on Model Runner V2: plain V2's tokens."""

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
    """The tiny pair, both models quantised."""
    pair = build_tiny_pair(folder / "whole")
    return [quantised(of, folder / name, form) for name, of in (("target", pair.target), ("draft", pair.draft))]


# Layers that read the KV cache of earlier ones, a mixture of experts, attention within chunks, and 8-bit matrices.
BUILD = {"Gemma4": test_shared_kv.build, "Mixtral": test_experts.build, "Llama4": test_experts.build}
BUILD["int8"] = build_quantised


@pytest.mark.parametrize("family", BUILD)
def test_equals_plain_v2(tmp_path, random_prompts, family):
    """Greedy and seeded, alone and four in one batch."""
    target, draft = BUILD[family](tmp_path, family)
    prompts, params = random_prompts(5, 20, 80), [GREEDY, SEEDED, GREEDY, SEEDED, GREEDY]
    found = []
    for gsd in (None, {"method": "gsd", "model": str(draft), "num_speculative_tokens": 6, "max_depth": 3}):
        with contextlib.closing(V2Engine(target, gsd)) as engine:
            found.append([run(engine, prompts[:1], params[:1]), run(engine, prompts[1:], params[1:])])
            counts = engine.metrics()
    assert found[1] == found[0]
    assert counts["gsd_nodes_accepted_native"] > 0 and counts["gsd_kv_rows_moved"] > 0
