"""Drafting's memory in a step is bounded, with 1024 requests, 131072 tokens per text, and a vocabulary of that size."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from memory_meter import MemoryMeter

from vllm_gsd.config import GSDConfig
from vllm_gsd.engine.draft import block_heads
from vllm_gsd.engine.draft import model as draft_model_module
from vllm_gsd.engine.draft.block_drafter import BlockDrafter
from vllm_gsd.engine.draft.features import Features
from vllm_gsd.engine.draft.level_drafter import LevelDrafter
from vllm_gsd.engine.draft.limits import draft_kv_slots
from vllm_gsd.engine.draft.model import LOGIT_BYTES, MAX_LOGITS_BYTES, DraftModel
from vllm_gsd.engine.v2 import device_drafting
from vllm_gsd.engine.v2.device_drafting import DeviceDrafting, KnownBatch
from vllm_gsd.engine.v2.proposals import empty_trees
from vllm_gsd.ops.flatten.api import NUM_SOURCES
from vllm_gsd.ops.lattice import api as lattice_api
from vllm_gsd.planner.calibration import Calibration

META = torch.device("meta")
REQUESTS, VOCAB, LENGTH, TOKENS, HIDDEN = 1024, 1 << 17, 1 << 17, 16384, 64
CONFIG = GSDConfig(method="gsd", model="draft")


def draft_model():
    """A draft whose forward only allocates hidden states; its logits are one matrix product."""
    model = DraftModel.__new__(DraftModel)
    model.head = None
    model.model_config = SimpleNamespace(get_vocab_size=lambda: VOCAB, get_hidden_size=lambda: HIDDEN)
    model.run_rows = lambda tokens, *rest: torch.empty((len(tokens), HIDDEN), dtype=torch.bfloat16, device=META)
    weight = torch.empty((HIDDEN, VOCAB), dtype=torch.bfloat16, device=META)
    model.model = SimpleNamespace(compute_logits=lambda hidden: hidden @ weight)
    return model


def best_tokens(logits, k):
    """Allocate what the kernels of ``topk_softmax`` allocate."""
    parts = -(-logits.shape[1] // 4096)
    scratch = torch.empty((len(logits), parts, 2 * k + 2), device=META)
    probs = scratch.new_empty((len(logits), k))
    return probs, probs.long()


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch):
    """Replaces kernels of GPUs, which allocate only their buffers."""
    for module in (draft_model_module, block_heads, lattice_api):
        monkeypatch.setattr(module, "topk_softmax", best_tokens)
    for name in ("begin", "grow_level", "graft_ngrams", "flatten_graphs", "add_lattices"):
        monkeypatch.setattr(device_drafting, name, lambda *_: None)
    monkeypatch.setattr(lattice_api, "best_paths", best_paths)


def best_paths(scores, chances, ids, best, merge):
    """Allocate what the kernel of ``best_paths`` returns."""
    count, _, k = ids.shape
    return ids.new_empty((count, k)), best.new_empty((count, k, k)), best.new_empty((count, k))


def drafting(config=CONFIG, requests=REQUESTS, kind="tokens"):
    """The draft phase of a draft that reads tokens, one that also reads hidden states, or a block draft."""
    capacity = 1 + min(2048, config.num_speculative_tokens * config.top_k * (config.max_depth + 1))
    drafter = LevelDrafter.__new__(LevelDrafter)
    drafter.max_slots = draft_kv_slots(config)
    if kind == "blocks":
        drafter = BlockDrafter.__new__(BlockDrafter)
        drafter.config, drafter.mask_token, drafter.causal, drafter.max_slots = config, 2, False, 0
        drafter.predicting, drafter.num_rows = slice(0, None), config.max_depth
    drafter.model, drafter.features, drafter.max_positions, drafter.max_rows = draft_model(), None, LENGTH, TOKENS
    drafter.stats = SimpleNamespace(counts={"draft_rows": 0, "draft_forwards": 0})
    if kind == "blocks":
        drafter.model.kind, drafter.model.model = "dspark", dspark()
    if kind == "hidden states":
        drafter.features = Features(TOKENS, HIDDEN, torch.bfloat16, META)
        run_rows = drafter.model.run_rows
        drafter.model.run_rows = lambda tokens, slots, tree, features: (
            run_rows(tokens)
            if features is not None
            else (
                drafter.model.run_rows(
                    tokens, slots, tree, torch.empty((len(tokens), HIDDEN), dtype=torch.bfloat16, device=META)
                )
            )
        )
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=torch.empty((requests, LENGTH), dtype=torch.int32, device=META)),
        total_len=SimpleNamespace(gpu=torch.empty(requests, dtype=torch.int32, device=META)),
    )
    return DeviceDrafting(
        config, drafter, states, capacity, empty_trees(requests, config.num_speculative_tokens, META), META
    )


def peak_of(function, *arguments) -> int:
    with MemoryMeter() as meter:
        kept = function(*arguments)
    del kept
    return meter.peak


def propose(drafter, count=REQUESTS, levels=None):
    whole = np.full(count, LENGTH, np.int64)
    known = KnownBatch(
        slots=np.arange(count),
        wanted=np.ones(count, np.bool_),
        draft_length=np.zeros(count, np.int64),
        capacity=whole,
        end=whole,
        trust=np.ones((count, NUM_SOURCES), np.float32),
        factor=Calibration().factor,
    )
    drafter.propose(known, torch.empty((count, 1), dtype=torch.int32, device=META), levels)


def test_the_meter_counts():
    def work():
        kept = torch.empty(1000, device=META)
        for _ in range(3):
            kept = kept + 1
        kept.add_(1)
        return kept.view(10, 100)

    assert peak_of(work) == 8000


def test_a_full_step_is_bounded():
    """Memory is dominated by the draft's logits. A draft forward has no more rows than the target's largest."""
    whole, rows = drafting(), []
    run_rows = whole.drafter.model.run_rows
    whole.drafter.model.run_rows = lambda tokens, *rest: rows.append(len(tokens)) or run_rows(tokens, *rest)
    peak = peak_of(propose, whole)
    assert max(rows) <= TOKENS
    outputs = 4 * TOKENS * (2 * HIDDEN + 3 * 4 * CONFIG.top_k)
    assert peak <= 1.1 * MAX_LOGITS_BYTES + outputs


@pytest.mark.parametrize("kind", ["tokens", "hidden states", "blocks"])
def test_no_batch_takes_more_than_the_profile(kind):
    """No batch and no plan takes more memory than the profile, whose peak vLLM reserves.

    ``GraphSpeculator.profile`` drafts for all requests at once, before the store of hidden states is allocated.
    """
    whole = drafting(kind=kind)
    features, whole.drafter.features = whole.drafter.features, None
    propose(whole)  # allocates the buffers that steps share
    reserved = peak_of(propose, whole)
    assert reserved > (1 << 28)
    whole.drafter.features = features
    for count in (1, 2, 31, 256, 700, REQUESTS - 1, REQUESTS):
        for levels in range(whole.num_levels + 1):
            propose(whole, count, levels)
            assert peak_of(propose, whole, count, levels) <= reserved, (count, levels)


@pytest.mark.parametrize(("nodes", "most"), [(4, 40), (16, 300), (64, 300)])
def test_buffers_take_little(nodes, most):
    """Buffers for 1024 requests take at most ``most`` MiB, besides the copy of their texts."""
    config = CONFIG.model_copy(update={"num_speculative_tokens": nodes})
    assert peak_of(drafting, config) - 4 * REQUESTS * (LENGTH + 1) <= most << 20


def test_logits_are_computed_in_parts():
    hidden = torch.empty((TOKENS, HIDDEN), dtype=torch.bfloat16, device=META)
    assert TOKENS * VOCAB * LOGIT_BYTES > 4 * MAX_LOGITS_BYTES
    assert peak_of(draft_model().most_probable, hidden, 8) <= 1.1 * MAX_LOGITS_BYTES


def dspark(rank=64):
    """The interface of vLLM's ``Qwen3DSparkForCausalLM``."""
    weights = [torch.empty(shape, dtype=torch.bfloat16, device=META) for shape in ((HIDDEN, VOCAB), (VOCAB, rank))]
    return SimpleNamespace(
        config=SimpleNamespace(dspark_draft_topk=None),
        model=SimpleNamespace(confidence_head=None),
        compute_draft_logits=lambda hidden: hidden @ weights[0],
        markov_embed=lambda tokens: weights[1][tokens],
        markov_bias=lambda embedded: embedded @ weights[1].T,
        map_draft_to_target=lambda ids: ids,
    )


@pytest.mark.parametrize("k", [1, 8, 32])
def test_blocks_are_scored_in_parts(k):
    """Scores of all tokens after each candidate are computed in parts, to bound memory."""
    drafter, depth = BlockDrafter.__new__(BlockDrafter), 7
    drafter.config = CONFIG.model_copy(update={"top_k": k})
    drafter.model = SimpleNamespace(kind="dspark", model=dspark(), model_config=draft_model().model_config)
    hidden = torch.empty((REQUESTS, depth, HIDDEN), dtype=torch.bfloat16, device=META)
    assert REQUESTS * VOCAB * (depth + k) * LOGIT_BYTES >= 4 * MAX_LOGITS_BYTES
    roots = torch.empty(REQUESTS, dtype=torch.int64, device=META)
    assert peak_of(drafter.candidates, hidden, roots) <= MAX_LOGITS_BYTES
