"""The LM head of frequent and recent tokens."""

import numpy as np
import pytest
import torch

from vllm_gsd.runtime.trimmed_head import TrimmedHead

FREQUENT = np.array([1, 4, 9])


@pytest.fixture
def whole():
    torch.manual_seed(0)
    return torch.randn(50, 8)


def make(whole, recent: int) -> TrimmedHead:
    return TrimmedHead(lambda ids: whole[ids], len(whole), FREQUENT, whole.device, recent)


def logits_by_token(head, hidden):
    logits = head.hide(head(hidden))
    return {int(token): logits[:, column] for column, token in enumerate(head.ids) if not logits[0, column].isinf()}


def test_recent_tokens_are_computed_besides_the_frequent_ones(whole):
    head, hidden = make(whole, 3), torch.randn(2, 8)
    expected = hidden @ whole.T
    seen = [[], [4, 7, 1, 7], [20, 9], [30], [31, 7]]
    kept = [set(), {7}, {7, 20}, {7, 20, 30}, {20, 30, 31}]  # who was there already does not come again
    for tokens, recent in zip(seen, kept, strict=True):
        head.see(np.array(tokens, np.int32))
        found = logits_by_token(head, hidden)
        assert found.keys() == {1, 4, 9} | recent
        for token, logits in found.items():
            torch.testing.assert_close(logits, expected[:, token])
    head.see(np.array([7]))  # who left may come again
    assert logits_by_token(head, hidden).keys() == {1, 4, 9, 30, 31, 7}


def test_more_than_there_is_room_for(whole):
    head, hidden = make(whole, 4), torch.randn(1, 8)
    for _ in range(3):
        head.see(np.arange(50))
        assert len(logits_by_token(head, hidden)) == 7
    head.see(np.array([10, 11]))
    assert {10, 11} < logits_by_token(head, hidden).keys()
    assert len(logits_by_token(head, hidden)) == 7
