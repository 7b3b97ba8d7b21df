"""Rows of hidden states: equal to PyTorch's own indexing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_gsd.ops import HAVE_EXTENSION
from vllm_gsd.ops.state_rows import api
from vllm_gsd.ops.state_rows.api import move_rows, read_rows, write_rows

compiled = pytest.mark.skipif(not HAVE_EXTENSION, reason="no compiled kernels here")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def states(count, size, dtype=torch.float32):
    return torch.randn(count, size).to(dtype)


def in_pytorch(op, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "use_kernel", lambda tensor: False)
        return op(*arguments)


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 9),
    size=st.integers(0, 20),
    rows=st.integers(0, 12),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_like_the_references(count, size, rows, dtype, seed):
    torch.manual_seed(seed)
    given = states(count, size, dtype)
    index, cleared = torch.randint(count, (rows,)), torch.rand(rows) < 0.3
    assert torch.equal(read_rows(given, index), in_pytorch(read_rows, given, index))
    assert torch.equal(read_rows(given, index, cleared), in_pytorch(read_rows, given, index, cleared))
    rows = min(rows, count)
    places = torch.where(torch.rand(rows) < 0.3, -1, torch.randperm(count)[:rows])
    values = states(rows, 2 * size, dtype)[:, ::2]
    sources = torch.where(torch.rand(rows) < 0.3, -1, torch.randint(count, (rows,)))
    for op, arguments in ((write_rows, (places, values)), (move_rows, (sources, places))):
        # The last row is nobody's.
        one, other = torch.cat([given, given[:1]]), torch.cat([given, given[:1]])
        op(one, *arguments)
        in_pytorch(op, other, *arguments)
        assert torch.equal(one[:-1], other[:-1])


@compiled
@pytest.mark.parametrize(
    ("function", "arguments", "error", "says"),
    [
        (read_rows, (torch.tensor([4]),), IndexError, "row 4 of states that have 4"),
        (read_rows, (torch.tensor([1], dtype=torch.int32),), ValueError, "rows must be a contiguous int64"),
        (read_rows, (torch.tensor([1, 2]), torch.tensor([True])), ValueError, "cleared must be"),
        (write_rows, (torch.tensor([4]), torch.zeros(1, 3)), IndexError, "row 4 of states that have 4"),
        (write_rows, (torch.tensor([1]), torch.zeros(1, 2)), ValueError, r"values must be Float \[rows, 3\]"),
        (write_rows, (torch.tensor([1]), torch.zeros(1, 3).half()), ValueError, "values must be Float"),
        (write_rows, (torch.tensor([1]), torch.zeros(2, 3)), ValueError, r"rows must be a contiguous int64 \[2\]"),
        (move_rows, (torch.tensor([1]), torch.tensor([4])), IndexError, "row 4 of states that have 4"),
        (move_rows, (torch.tensor([1, 2]), torch.tensor([3])), ValueError, "rows must be"),
    ],
)
def test_refuses(function, arguments, error, says):
    with pytest.raises(error, match=says):
        function(torch.zeros(4, 3), *arguments)


@compiled
def test_rows_must_lie_in_one_piece():
    with pytest.raises(ValueError, match="each row contiguous"):
        read_rows(torch.zeros(4, 6)[:, ::2], torch.tensor([1]))
