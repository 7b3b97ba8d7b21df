"""The memory of a step's drafting at 1024 requests, 131072 tokens of vocabulary and as many of text: bounded."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from memory_meter import MemoryMeter

from vllm_gsd.config import GSDConfig
from vllm_gsd.engine.draft import model as draft_model_module
from vllm_gsd.engine.draft.limits import draft_kv_slots
from vllm_gsd.engine.draft.model import LOGIT_BYTES, MAX_LOGITS_BYTES, DraftModel
from vllm_gsd.engine.v2 import device_drafting
from vllm_gsd.engine.v2.device_drafting import MAX_BYTES, DeviceDrafting, KnownBatch
from vllm_gsd.engine.v2.device_step import empty_trees
from vllm_gsd.ops.flatten.api import NUM_SOURCES
from vllm_gsd.ops.growth import api as graph_growth
from vllm_gsd.ops.ngram import api as graph_ngram
from vllm_gsd.ops.ngram.api import MATCH_BYTES, longest_matches
from vllm_gsd.ops.topk.api import _topk_softmax_selecting
from vllm_gsd.planner.calibration import Calibration

META = torch.device("meta")
REQUESTS, VOCAB, LENGTH, TOKENS, HIDDEN = 1024, 1 << 17, 1 << 17, 16384, 64
CONFIG = GSDConfig(method="gsd", model="draft")


def draft_model():
    """A draft whose forward is an embedding of nothing: hidden states, and logits of them."""
    model = DraftModel.__new__(DraftModel)
    model.head = None
    model.model_config = SimpleNamespace(get_vocab_size=lambda: VOCAB)
    model.run_rows = lambda tokens, *rest: torch.empty((len(tokens), HIDDEN), dtype=torch.bfloat16, device=META)
    weight = torch.empty((HIDDEN, VOCAB), dtype=torch.bfloat16, device=META)
    model.model = SimpleNamespace(compute_logits=lambda hidden: hidden @ weight)
    return model


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch):
    """What is a kernel there takes no memory but its result's; without Triton the same takes thousands of operators."""
    monkeypatch.setattr(draft_model_module, "topk_softmax", _topk_softmax_selecting)
    monkeypatch.setattr(graph_growth, "_merge_reference", lambda *_: None)
    monkeypatch.setattr(graph_ngram, "_graft_reference", lambda *_: None)
    monkeypatch.setattr(
        device_drafting,
        "flatten_graphs",
        lambda graphs, num_places, *_: empty_trees(len(graphs.size), num_places, META),
    )


@pytest.fixture
def drafting():
    config = CONFIG
    capacity = 1 + min(2048, config.num_speculative_tokens * config.top_k * (config.max_depth + 1))
    stats = SimpleNamespace(counts={"draft_rows": 0, "draft_forwards": 0})
    drafter = SimpleNamespace(
        model=draft_model(), features=None, max_positions=LENGTH, max_rows=TOKENS, max_slots=draft_kv_slots(config),
        stats=stats,
    )  # fmt: skip
    states = SimpleNamespace(
        max_num_reqs=REQUESTS,
        all_token_ids=SimpleNamespace(gpu=torch.empty((REQUESTS, LENGTH), dtype=torch.int32, device=META)),
        total_len=SimpleNamespace(gpu=torch.empty(REQUESTS, dtype=torch.int32, device=META)),
    )
    return DeviceDrafting(config, drafter, states, capacity, config.num_speculative_tokens, META)


def known(count, longest=LENGTH, most_new=1 + CONFIG.num_speculative_tokens):
    return KnownBatch(
        slots=np.arange(count),
        wanted=np.ones(count, np.bool_),
        draft_length=np.zeros(count, np.int64),
        capacity=np.full(count, longest, np.int64),
        end=np.full(count, longest, np.int64),
        trust=np.ones((count, NUM_SOURCES), np.float32),
        factor=Calibration().factor,
        most_new=most_new,
        longest=longest,
    )


def peak_of(function, *arguments) -> int:
    with MemoryMeter() as meter:
        function(*arguments)
    return meter.peak


def propose(drafting, batch):
    count = len(batch.slots)
    slots = torch.empty(count, dtype=torch.int64, device=META)
    return drafting.propose(batch, slots, torch.empty((count, 64), dtype=torch.int32, device=META), 16)


def test_the_meter_counts():
    def work():
        kept = torch.empty(1000, device=META)
        for _ in range(3):
            kept = kept + 1
        kept.add_(1)
        return kept.view(10, 100)

    assert peak_of(work) == 8000


def test_a_full_step_is_bounded(drafting):
    """One pass, and the draft's logits; forwards of the draft are over no more rows than the target's largest."""
    rows = []
    run_rows = drafting.drafter.model.run_rows
    drafting.drafter.model.run_rows = lambda tokens, *rest: rows.append(len(tokens)) or run_rows(tokens, *rest)
    peak = peak_of(propose, drafting, known(REQUESTS))
    assert max(rows) <= TOKENS
    outputs = REQUESTS * CONFIG.num_speculative_tokens * 64
    assert peak <= MAX_BYTES + MAX_LOGITS_BYTES + outputs


@pytest.mark.parametrize("longest", [256, 4096, LENGTH])
@pytest.mark.parametrize("nodes", [4, 16, 64])
def test_a_request_takes_what_is_said(drafting, monkeypatch, longest, nodes):
    """So that as many go through at once as fit."""
    config = drafting.config = CONFIG.model_copy(update={"num_speculative_tokens": nodes})
    drafting.num_places = nodes
    drafting.capacity = 1 + min(2048, nodes * config.top_k * (config.max_depth + 1))
    drafting.drafter.max_slots = draft_kv_slots(config)
    monkeypatch.setattr(device_drafting, "MAX_BYTES", 1 << 50)
    drafting.drafter.max_rows = 1 << 40
    drafting.drafter.model.most_probable = lambda hidden, k: (
        torch.empty((len(hidden), k), device=META),
        torch.empty((len(hidden), k), dtype=torch.int64, device=META),
    )
    count = 64
    peak = peak_of(propose, drafting, known(count, longest, 1 + nodes))
    hidden = 2 * 2 * count * (1 + nodes) * HIDDEN
    said = drafting.bytes_per_request(longest)
    assert 0.2 * said < (peak - hidden) / count <= said


def test_texts_are_matched_in_few_bytes_a_token():
    texts = torch.empty((8, LENGTH), dtype=torch.int32, device=META)
    length = torch.empty(8, dtype=torch.int64, device=META)
    assert peak_of(longest_matches, texts, length, 2, 8) <= (MATCH_BYTES - 4) * texts.numel() + 4096


def test_logits_are_computed_in_parts():
    hidden = torch.empty((TOKENS, HIDDEN), dtype=torch.bfloat16, device=META)
    assert TOKENS * VOCAB * LOGIT_BYTES > 20 * MAX_LOGITS_BYTES
    assert peak_of(draft_model().most_probable, hidden, 8) <= MAX_LOGITS_BYTES + (1 << 22)
