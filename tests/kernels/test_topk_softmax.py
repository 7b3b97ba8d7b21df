"""Rows of logits: softmax with top k, and argmax along walks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_gsd.method.verify import follow
from vllm_gsd.ops import HAVE_EXTENSION
from vllm_gsd.ops.topk.api import argmax_of_walks, argmax_of_walks_reference, topk_softmax, topk_softmax_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 49152), (3, 5000), (40, 4097), (2, 1), (7, 13), (1, 4096), (5, 8192)]


def argmax_rows(logits, op=argmax_of_walks):
    """Of every row: each is a tree of its own."""
    count = len(logits)
    parents, starts = torch.full((count,), -1, dtype=torch.int32), torch.arange(count + 1, dtype=torch.int32)
    return op(logits, torch.zeros(count, dtype=torch.int64), parents, starts)


def check(logits, k):
    probs, ids = topk_softmax(logits, k)
    expected, expected_ids = topk_softmax_reference(logits.double(), k)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(probs.double(), expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("k", [1, 4, 13, 256])
def test_topk_softmax(isa, shape, k, dtype):
    check((4 * torch.randn(shape)).to(dtype), min(k, shape[1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_argmax(isa, shape, dtype):
    logits = torch.randn(shape).to(dtype)
    highest = logits.float().max(dim=1, keepdim=True).values
    first = [int((row == high).nonzero()[0]) for row, high in zip(logits.float(), highest, strict=True)]
    assert argmax_rows(logits).tolist() == first


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 9000),
    values=st.integers(1, 4),
    k=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_ties_go_to_the_lower_id(rows, width, values, k, dtype, seed):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randint(values, (rows, width), generator=random).to(dtype)
    check(logits, min(k, width))
    assert torch.equal(argmax_rows(logits), topk_softmax_reference(logits, 1)[1].squeeze(1))


def test_masked_vocabulary(isa):
    """A grammar leaves three tokens; the rest is -inf."""
    logits = torch.full((2, 9000), -torch.inf)
    logits[0, [5, 4500, 8999]] = torch.tensor([1.0, 3.0, 2.0])
    logits[1, 8000:] = 0.5
    check(logits, 5)
    probs, ids = topk_softmax(logits, 5)
    assert ids[0].tolist() == [4500, 8999, 5, 0, 1] and probs[0, 3:].tolist() == [0, 0]
    assert argmax_rows(logits).tolist() == [4500, 8000]


def test_extreme_logits(isa):
    logits = torch.zeros(3, 5000)
    logits[0, 17], logits[1, 4999], logits[2] = 1e30, 300.0, -3e38
    check(logits, 3)


@pytest.mark.parametrize("op", [topk_softmax, topk_softmax_reference])
def test_row_of_minus_infinity_has_no_softmax(op):
    probs, ids = op(torch.full((1, 5000), -torch.inf), 3)
    assert probs.tolist() == [[0, 0, 0]] and ids.tolist() == [[0, 1, 2]]


NAN_PLACES = [[0], [2], [700], [4095], [4096], [8998], [8999], [5, 6000], range(9000)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("places", NAN_PLACES, ids=str)
@pytest.mark.parametrize("op", [topk_softmax, topk_softmax_reference])
def test_rows_with_nan_have_no_probabilities(isa, op, places, dtype):
    """Nor do those with +inf, and no other row minds."""
    logits = (4 * torch.randn(5, 9000)).to(dtype)
    healthy, _ = op(logits, 8)
    logits[1, list(places)], logits[3, list(places)] = torch.nan, torch.inf
    masked = logits.clone()
    masked[1] = torch.where(masked[1].isnan(), torch.nan, -torch.inf)
    for given_logits in (logits, masked):
        probs, ids = op(given_logits, 8)
        assert probs[1::2].count_nonzero() == 0
        assert ((ids >= 0) & (ids < 9000)).all()
        assert torch.equal(probs[::2], healthy[::2]) and (healthy[:, 0] > 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("places", NAN_PLACES, ids=str)
@pytest.mark.parametrize("op", [argmax_of_walks, argmax_of_walks_reference])
def test_argmax_with_nan_is_torchs(isa, op, places, dtype):
    """And so vLLM's, whose CPU kernel agrees (``tests/contract/test_upstream.py``)."""
    logits = torch.randn(3, 9000).to(dtype)
    logits[1, list(places)] = torch.nan
    logits[2] = torch.where(logits[1].isnan(), torch.nan, -torch.inf)
    assert argmax_rows(logits, op).tolist() == logits.argmax(1).tolist()


def test_same_result_with_any_number_of_threads(threads):
    logits = 3 * torch.randn(3, 49152)
    results = []
    for count in (1, 2, 3, 8):
        threads(count)
        results.append(topk_softmax(logits, 8))
    for probs, ids in results[1:]:
        assert torch.equal(probs, results[0][0]) and torch.equal(ids, results[0][1])


def test_strided_rows_and_no_rows():
    logits = torch.randn(6, 5000)
    for view in (logits[::2], logits[:, 100:4700], logits[:, ::2], logits.T[:40].T):
        check(view, 4)
        assert torch.equal(argmax_rows(view), view.argmax(1))
    probs, ids = topk_softmax(logits[:0], 4)
    assert probs.shape == ids.shape == (0, 4)
    assert argmax_rows(logits[:0]).shape == (0,)


def test_more_than_the_kernel_keeps():
    check(torch.randn(2, 5000), 1000)


@pytest.mark.parametrize("op", [topk_softmax, topk_softmax_reference])
@pytest.mark.parametrize(("shape", "k"), [((2, 5), 0), ((2, 5), 6), ((5,), 1), ((2, 0), 1), ((1, 2, 3), 1)], ids=str)
def test_refuses(op, shape, k):
    with pytest.raises(ValueError, match="must be"):
        op(torch.zeros(shape), k)


def test_refuses_integers():
    for call in (
        lambda logits: topk_softmax(logits, 1),
        lambda logits: topk_softmax_reference(logits, 1),
        argmax_rows,
        lambda logits: argmax_rows(logits, argmax_of_walks_reference),
    ):
        with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
            call(torch.zeros(2, 5, dtype=torch.int64))


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 9), max_size=5),
    width=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_walks_end_where_all_rows_would_lead_them(sizes, width, dtype, seed):
    """With so few tokens that walks go far; children come after their parents, and some rows are nobody's (-2)."""
    random = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    parents = np.concatenate([[], *([-1, *random.integers(-2, np.arange(1, size))] for size in sizes)]).astype(np.int32)
    tokens = random.integers(0, width, len(parents))
    logits = torch.from_numpy(random.standard_normal((len(parents), width))).to(dtype)
    walks = []
    for op in (argmax_of_walks, argmax_of_walks_reference):
        best = op(logits, *map(torch.from_numpy, (tokens, parents, starts))).numpy()
        places, path = np.zeros(len(sizes), np.int32), np.full((len(sizes), 9), -1, np.int32)
        walks.append((follow(tokens, parents, starts, best, places, path), places.tolist(), path.tolist()))
    assert walks[0] == walks[1]


@pytest.mark.skipif(not HAVE_EXTENSION, reason="no compiled kernels here")
@pytest.mark.parametrize("starts", [[0, 2, 2], [0, 4], [1, 0], [-1, 2]], ids=str)
def test_walks_stay_within_their_rows(starts):
    tokens, parents = torch.zeros(3, dtype=torch.int64), torch.full((3,), -1, dtype=torch.int32)
    with pytest.raises(ValueError, match="starts must rise"):
        argmax_of_walks(torch.zeros(3, 5), tokens, parents, torch.tensor(starts, dtype=torch.int32))
    with pytest.raises(ValueError, match="tokens and parents"):
        argmax_of_walks(torch.zeros(2, 5), tokens, parents, torch.tensor([0, 2], dtype=torch.int32))
