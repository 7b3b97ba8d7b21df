"""Random flattened graphs and the rows of a batch that verify them."""

from typing import NamedTuple

import torch
from paged_cases import random_parents

from vllm_gsd.ops.flatten.api import DeviceTrees


class TreeBatch(NamedTuple):
    """Graphs by slot, and the batch that verifies some of them."""

    kept: DeviceTrees
    slots: torch.Tensor  # int64 [num_requests]
    valid: torch.Tensor  # int32 [num_requests]
    starts: torch.Tensor  # int32 [num_requests + 1]
    batch_starts: torch.Tensor  # int32 [num_requests + 1]

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return int(self.batch_starts[-1])


def tree_batch(seed: int, device: torch.device, most: int = 16, vocabulary: int = 3) -> TreeBatch:
    """Some requests with random graphs of up to ``most`` nodes, and few tokens, so that walks go deep."""
    random = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=random)

    count, num_slots = 1 + seed % 5, 8
    shape = (num_slots, 1 + most)
    parent = torch.full(shape, -1)
    depth, size = torch.zeros_like(parent), draw(1 + most, num_slots)
    for slot, nodes in enumerate(size.tolist()):
        for place, above in enumerate(random_parents(1 + nodes, random)[1:], 1):
            parent[slot, place], depth[slot, place] = above, 1 + depth[slot, above]
    real = torch.arange(1 + most) <= size[:, None]
    kept = DeviceTrees(
        token=draw(vocabulary, *shape) * real,
        parent=parent,
        depth=depth,
        origin=draw(3, *shape) * real,
        via_merge=draw(2, *shape).bool() & real,
        survival=torch.rand(shape, generator=random) * real,
        value=torch.rand(shape, generator=random) * real,
        size=size,
    )
    rows = 1 + draw(1 + most, count)
    others = draw(3, count) * 4  # rows of a prompt before those that are verified
    starts, batch_starts = (
        torch.cat([torch.zeros(1, dtype=torch.int64), values.cumsum(0)]) for values in (rows, rows + others)
    )
    moved = [
        torch.randperm(num_slots, generator=random)[:count],
        (draw(5, count) > 0).int(),
        starts.int(),
        batch_starts.int(),
    ]
    return TreeBatch(DeviceTrees(*(values.to(device) for values in kept)), *(values.to(device) for values in moved))
