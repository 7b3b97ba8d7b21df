"""The most probable tokens in two launches: those of a sorted row, ties by token."""

import pytest
import torch

from vllm_gsd.ops.topk.api import topk_softmax, topk_softmax_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(logits, k):
    probs, ids = topk_softmax(logits, k)
    expected, expected_ids = topk_softmax_reference(logits.double(), k)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(probs.double(), expected, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "k"), [((1, 49152), 8), ((3, 5000), 13), ((2, 1), 1), ((7, 13), 4), ((2, 4097), 1)])
def test_the_best_are_found(device, shape, k, dtype):
    logits = (4 * torch.randn(shape, generator=torch.Generator().manual_seed(k))).to(device, dtype)
    check(logits, k)
    check((logits / 4).round(), k)  # many are equal
    check(logits.T.contiguous().T, k)


def test_masked_and_extreme_logits(device):
    logits = torch.full((5, 9000), -torch.inf, device=device)
    logits[0, [5, 4500, 8999]] = torch.tensor([1.0, 3.0, 2.0], device=device)
    logits[1, 8000:] = 0.5
    logits[2:] = 0.0
    logits[2, 17], logits[3, 4999], logits[4] = 1e30, 300.0, -3e38
    check(logits, 5)
    probs, ids = topk_softmax(logits[:0], 4)
    assert probs.shape == ids.shape == (0, 4)


@pytest.mark.parametrize("places", [[0], [4095], [4096], [5, 6000], range(9000)], ids=str)
def test_rows_with_nan_have_no_probabilities(device, places):
    """Nor do those with +inf or -inf alone, and no other row minds."""
    logits = 4 * torch.randn(6, 9000, generator=torch.Generator().manual_seed(1)).to(device)
    healthy, _ = topk_softmax(logits, 8)
    logits[1, list(places)], logits[3, list(places)], logits[5] = torch.nan, torch.inf, -torch.inf
    masked = logits.clone()
    masked[1] = torch.where(masked[1].isnan(), torch.nan, -torch.inf)
    for given in (logits, masked):
        probs, ids = topk_softmax(given, 8)
        assert probs[1::2].count_nonzero() == 0
        assert ((ids >= 0) & (ids < 9000)).all() and all(len(set(row)) == 8 for row in ids.tolist())
        assert torch.equal(probs[::2], healthy[::2]) and (healthy[:, 0] > 0).all()
