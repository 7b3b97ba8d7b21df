"""The trimmed LM head, which has only frequent and recent tokens."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from vllm_gsd.cpu.int8_rows import Int8Rows, int8_pays
from vllm_gsd.cpu.packed_weights import packs_weights
from vllm_gsd.engine.draft.trimmed_head import TrimmedHead, _Apart, _Packed, _Together
from vllm_gsd.engine.v2.plan import Phase
from vllm_gsd.engine.v2.speculator import GraphSpeculator, Verified
from vllm_gsd.ops.growth.state import COUNTS

FREQUENT = np.array([1, 4, 9])


@pytest.fixture
def whole():
    torch.manual_seed(0)
    return torch.randn(50, 8)


def make(whole, recent: int) -> TrimmedHead:
    return TrimmedHead(lambda ids: whole[ids], len(whole), FREQUENT, whole.device, recent)


def logits_by_token(head, hidden):
    logits = head.hide(head(hidden))
    tokens = head.tokens_of(torch.arange(logits.shape[1]))
    return {int(token): logits[:, column] for column, token in enumerate(tokens) if not logits[0, column].isinf()}


def test_recent_tokens_are_computed_besides_the_frequent_ones(whole):
    head, hidden = make(whole, 3), torch.randn(2, 8)
    expected = hidden @ whole.T
    seen = [[], [4, 7, 1, 7], [20, 9], [30], [31, 7]]
    kept = [set(), {7}, {7, 20}, {7, 20, 30}, {20, 30, 31}]  # a kept token is not added again
    for tokens, recent in zip(seen, kept, strict=True):
        head.see(np.array(tokens, np.int32))
        by_token = logits_by_token(head, hidden)
        assert by_token.keys() == {1, 4, 9} | recent
        for token, logits in by_token.items():
            torch.testing.assert_close(logits, expected[:, token])
    head.see(np.array([7]))  # a dropped token may be added again
    assert logits_by_token(head, hidden).keys() == {1, 4, 9, 30, 31, 7}


def test_the_last_ones_are_kept(whole):
    head, hidden = make(whole, 2), torch.randn(1, 8)
    head.see(np.array([30, 45, 6, 45, 5]))
    assert logits_by_token(head, hidden).keys() == {1, 4, 9, 45, 5}
    head.see(np.array([30]))  # replaces the oldest one
    assert logits_by_token(head, hidden).keys() == {1, 4, 9, 30, 5}


def test_more_than_there_is_room_for(whole):
    head, hidden = make(whole, 4), torch.randn(1, 8)
    for _ in range(3):
        head.see(np.arange(50))
        assert len(logits_by_token(head, hidden)) == 7
    head.see(np.array([10, 11]))
    assert {10, 11} < logits_by_token(head, hidden).keys()
    assert len(logits_by_token(head, hidden)) == 7


@pytest.mark.skipif(not int8_pays(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="this processor has no fast int8")
def test_int8_rows_are_close_to_exact():
    torch.manual_seed(0)
    weight, x = torch.randn(300, 64), torch.randn(9, 64) * torch.tensor([0.01, 1, 30]).repeat(3)[:, None]
    weight[7] = 0
    exact = x @ weight.T
    for rows in (slice(0, 9), slice(3, 4), slice(0, 0)):
        ours = Int8Rows(weight.bfloat16())(x[rows].bfloat16()).float()
        assert (ours - exact[rows]).norm() <= 0.02 * exact[rows].norm()
    head = TrimmedHead(lambda ids: weight.bfloat16()[ids], 300, np.arange(200), torch.device("cpu"), 4)
    head.columns = _Apart(weight[:200].bfloat16(), 4)
    assert isinstance(head.columns.multiply, Int8Rows)
    head.see(np.array([250]))
    ours = logits_by_token(head, x.bfloat16())
    assert ours.keys() == {*range(200), 250}
    torch.testing.assert_close(ours[250], (x.bfloat16() @ weight.bfloat16()[250]), rtol=0.02, atol=0.02)


def test_other_types_are_multiplied_as_they_are(whole):
    assert not int8_pays(whole)
    assert not isinstance(make(whole, 2).columns.multiply, Int8Rows)


@pytest.mark.parametrize("frequent", [3, 16, 37])
@pytest.mark.skipif(
    not packs_weights(torch.zeros(16, 2, dtype=torch.bfloat16)), reason="vLLM's own products are used here"
)
def test_all_columns_in_one_matrix(frequent):
    """This also holds for numbers of columns that our kernel does not support."""
    torch.manual_seed(0)
    weight, x = torch.randn(300, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    exact = x.double() @ weight.double().T
    head = TrimmedHead(lambda ids: weight[ids], 300, np.arange(frequent), torch.device("cpu"), 4)
    assert isinstance(head.columns, _Together)
    for seen in (250, [251, 252, 2], [253, 254]):
        head.see(np.atleast_1d(seen))
        for token, logits in logits_by_token(head, x).items():
            torch.testing.assert_close(logits.double(), exact[:, token], rtol=2**-7, atol=1e-3)
    assert logits_by_token(head, x).keys() == {*range(frequent), 251, 252, 253, 254}


def test_without_our_kernels():
    """Candidates are computed with vLLM's own product."""
    torch.manual_seed(0)
    weight, x = torch.randn(300, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    head = TrimmedHead(lambda ids: weight[ids], 300, np.arange(32), torch.device("cpu"), 4, kernels=False)
    assert isinstance(head.columns.multiply, _Packed)
    assert not head.columns.multiply.cpu_linear.__module__.startswith("vllm_gsd")
    for token, logits in logits_by_token(head, x).items():
        torch.testing.assert_close(logits, x @ weight[token], rtol=2**-7, atol=2**-5)


def test_on_v2_the_head_sees_the_answers_when_they_reach_the_host():
    """Of three requests, one got no graph, and another one has left its slot since."""
    seen: list[int] = []
    speculator = MagicMock(tenants=np.array([1, 1, 2]))
    speculator.speculation = MagicMock(draft_model=SimpleNamespace(head=SimpleNamespace(see=seen.extend)))
    speculator.speculation.draft_kv.length = {}
    ones, names = np.ones(3, np.int64), ["a", "b", "c"]
    label = Verified(names, np.arange(3), ones, ones, ones.cumsum(), np.array([True, False, True]), 0 * ones, Phase())
    tensors = {
        "sampled": np.array([[5, 6, 0], [7, 8, 9], [3, 4, 0]]),
        "num_sampled": np.array([2, 3, 2]),
        "ends": 0 * ones,
        "draft_length": ones,
        "counts": np.zeros(len(COUNTS), np.int64),
    }
    speculator.late, speculator.requests = SimpleNamespace(take=lambda wait: [(label, tensors)]), dict.fromkeys(names)
    GraphSpeculator.learn(speculator)
    assert seen == [5, 6]
