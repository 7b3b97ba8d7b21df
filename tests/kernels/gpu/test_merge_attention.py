"""Merging attention over disjoint keys."""

import pytest
import torch
from references.merge import merge_attention_reference

from vllm_gsd.ops.attention.merge import merge_attention


@pytest.mark.parametrize("parts", [1, 2, 5, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_merge(device, parts, dtype):
    torch.manual_seed(parts)
    values = torch.randn(parts, 4, 3, 40, device=device)
    logs = 3 * torch.randn(parts, 4, 3, device=device)
    logs[0, 1], values[0, 1] = -torch.inf, torch.nan  # a part without keys
    logs[:, 2] = -torch.inf  # a row without any
    logs[0, 3, 0] = torch.inf  # a part without keys, as from FlashAttention 2
    output, exact = torch.full((4, 3, 40), 7.0, dtype=dtype, device=device), torch.empty(4, 3, 40, device=device)
    lse, exact_lse = torch.empty(4, 3, device=device), torch.empty(4, 3, device=device)
    merge_attention(output, values, logs, lse)
    merge_attention_reference(exact, values, logs, exact_lse)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(output.float(), exact, rtol=1.01 * unit + 1e-6, atol=1e-6)
    torch.testing.assert_close(lse, exact_lse)
    assert (output[2] == 0).all() and (lse[2] == -torch.inf).all()


def test_end_row(device):
    values, logs = torch.ones(2, 4, 1, 16, device=device), torch.zeros(2, 4, 1, device=device)
    for op in (merge_attention, merge_attention_reference):
        output = torch.full((4, 1, 16), 7.0, device=device)
        op(output, values, logs, end_row=torch.tensor([3], device=device))
        assert output[:, 0, 0].tolist() == [1, 1, 1, 7]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 1, 16), (2, 4, 1, 8), (2, 4, 1)), "must be"),
        (((4, 1, 16), (2, 4, 1, 16), (2, 4, 2)), "must be"),
        (((4, 16), (2, 4, 1, 16), (2, 4, 1)), "output has shape"),
    ],
)
def test_refuses(device, shapes, message):
    with pytest.raises(ValueError, match=message):
        merge_attention(*(torch.zeros(shape, device=device) for shape in shapes))
