"""The rows of a step on the device: equal to the host's specification."""

import pytest
import torch
from references.lay_out import lay_out_rows_reference
from tree_batches import tree_batch

from vllm_gsd.ops.lay_out.api import lay_out_rows


@pytest.mark.parametrize("places", [1, 16, 70])
@pytest.mark.parametrize("seed", range(10))
def test_lay_out(device, seed, places):
    batch = tree_batch(seed, device, places)
    found = []
    for function in (lay_out_rows, lay_out_rows_reference):
        positions = torch.arange(100, 103 + batch.num_rows, device=device)
        mask = torch.full((batch.num_rows + 2, places // 64 + 1), 7, device=device)
        prefix_lens = torch.full((len(batch.slots) + 1,), 9, dtype=torch.int32, device=device)
        trees = function(*batch, positions, mask, prefix_lens)
        found.append([*trees, positions, mask, prefix_lens])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_lay_out_refuses(device):
    batch = tree_batch(1, device)
    positions = torch.zeros(batch.num_rows, dtype=torch.int64, device=device)
    mask = torch.zeros((batch.num_rows, 1), dtype=torch.int64, device=device)
    prefix_lens = torch.zeros(len(batch.slots), dtype=torch.int32, device=device)
    for changed, message in (
        ({"slots": batch.slots.int()}, "slots is int32"),
        ({"valid": batch.valid.long()}, "valid is int64"),
        ({"starts": batch.starts[:1]}, "starts has 1 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            lay_out_rows(*batch._replace(**changed), positions, mask, prefix_lens)
