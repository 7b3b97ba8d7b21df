"""Drafting in parts, as memory demands in large batches: what drafting at once gives."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_gsd.config import GSDConfig
from vllm_gsd.engine.draft import model as draft_model
from vllm_gsd.engine.draft.limits import draft_kv_slots
from vllm_gsd.engine.draft.model import LOGIT_BYTES, DraftModel
from vllm_gsd.engine.v2 import device_drafting
from vllm_gsd.engine.v2.device_drafting import DeviceDrafting, KnownBatch
from vllm_gsd.ops.flatten.api import NUM_SOURCES
from vllm_gsd.planner.calibration import Calibration

CPU = torch.device("cpu")
VOCAB, LENGTH = 40, 64
LENGTHS = np.array([30, 7, 41, 12, 1])


def toy_model():
    """A draft whose next token depends on the one before alone."""
    generator = torch.Generator().manual_seed(0)
    weight = 3 * torch.randn((VOCAB, VOCAB), generator=generator)
    model = DraftModel.__new__(DraftModel)
    model.head = None
    model.model_config = SimpleNamespace(get_vocab_size=lambda: VOCAB)
    model.run_rows = lambda tokens, *rest: torch.nn.functional.one_hot(tokens.long(), VOCAB).float()
    model.model = SimpleNamespace(compute_logits=lambda hidden: hidden @ weight)
    return model


@pytest.fixture
def drafting():
    config = GSDConfig(method="gsd", model="draft", num_speculative_tokens=6, max_depth=3, top_k=3)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(0, 8, (len(LENGTHS), LENGTH), generator=generator, dtype=torch.int32)
    drafter = SimpleNamespace(
        model=toy_model(), features=None, max_positions=LENGTH, max_rows=1000, max_slots=draft_kv_slots(config),
        stats=SimpleNamespace(counts={"draft_rows": 0, "draft_forwards": 0}),
    )  # fmt: skip
    states = SimpleNamespace(
        max_num_reqs=len(LENGTHS),
        all_token_ids=SimpleNamespace(gpu=texts),
        total_len=SimpleNamespace(gpu=torch.from_numpy(LENGTHS).int()),
    )
    return DeviceDrafting(config, drafter, states, 60, config.num_speculative_tokens, CPU)


def propose(drafting, longest=LENGTH):
    count = len(LENGTHS)
    known = KnownBatch(
        slots=np.arange(count),
        wanted=np.array([True, True, True, False, True]),
        draft_length=LENGTHS - np.array([1, 3, 2, 1, 1]),
        capacity=np.full(count, LENGTH),
        end=np.array([LENGTH, LENGTH, 44, LENGTH, LENGTH]),
        trust=np.linspace(0.5, 1.5, count * NUM_SOURCES, dtype=np.float32).reshape(count, NUM_SOURCES),
        factor=Calibration().factor,
        most_new=3,
        longest=longest,
    )
    drafting.reset()
    return drafting.propose(known, torch.arange(count), torch.zeros((count, 4), dtype=torch.int32), 16)


@pytest.mark.parametrize("at_once", [1, 2])
def test_in_parts_as_at_once(drafting, monkeypatch, at_once):
    whole, counts, length = propose(drafting), drafting.counts.clone(), drafting.draft_length.clone()
    assert whole.size.tolist() == [6, 6, 2, 0, 6] or whole.size.sum() > 12
    monkeypatch.setattr(device_drafting, "MAX_BYTES", at_once * drafting.bytes_per_request(LENGTH))
    assert drafting.most_requests(LENGTH, 3) == at_once
    parts = propose(drafting)
    for name, of in whole._asdict().items():
        assert torch.equal(getattr(parts, name), of), name
    assert torch.equal(drafting.counts, counts) and torch.equal(drafting.draft_length, length)


def test_rows_of_a_pass_are_no_more_than_a_batch_of_tokens(drafting):
    whole = propose(drafting)
    drafting.drafter.max_rows = 13
    assert drafting.most_requests(LENGTH, 3) == 2 and drafting.most_requests(LENGTH, 12) == 1
    assert all(map(torch.equal, propose(drafting), whole))


def test_texts_are_read_as_far_as_they_may_go(drafting):
    whole = propose(drafting)
    assert all(map(torch.equal, propose(drafting, longest=int(LENGTHS.max())), whole))


def test_logits_in_parts(monkeypatch):
    hidden = torch.eye(VOCAB)[:7]
    whole = toy_model().most_probable(hidden, 4)
    monkeypatch.setattr(draft_model, "MAX_LOGITS_BYTES", 3 * LOGIT_BYTES * VOCAB)
    assert all(map(torch.equal, toy_model().most_probable(hidden, 4), whole))
