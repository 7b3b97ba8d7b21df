"""Reference of ``vllm_gsd.ops.walk``."""

import torch

from vllm_gsd.method.constants import NONE
from vllm_gsd.ops.flatten.api import DeviceTrees
from vllm_gsd.ops.walk.api import Accepted, check_walk


def accept_walk_reference(
    trees: DeviceTrees,
    sampled: torch.Tensor,
    starts: torch.Tensor,
    batch_starts: torch.Tensor,
    slot_mapping: torch.Tensor,
    invalid: torch.Tensor | None = None,
    max_steps: int | None = None,
) -> Accepted:
    """``accept_walk`` in plain Python."""
    places = check_walk(trees, sampled, starts, batch_starts, slot_mapping, invalid)
    accepted = Accepted.empty(len(trees.size), places, sampled.device)
    accepted.tokens.zero_()
    accepted.src_slots.fill_(NONE)
    accepted.dst_slots.fill_(NONE)
    for tree, size in enumerate(trees.size.tolist()):
        first, end = starts[tree : tree + 2].tolist()
        root = int(batch_starts[tree + 1]) - (end - first)
        token, parent = trees.token[tree, : 1 + size].tolist(), trees.parent[tree, : 1 + size].tolist()
        path = [0]  # rows within the tree
        while True:
            drawn = int(sampled[first + path[-1]])
            accepted.tokens[tree, len(path) - 1] = drawn
            children = [
                place
                for place in range(1, 1 + size)
                if parent[place] == path[-1] and token[place] == drawn
                if invalid is None or not invalid[first + place]
            ]
            if not children or len(path) - 1 == max_steps:
                break
            path.append(children[0])
            depth = len(path) - 1
            if path[-1] != depth:
                accepted.src_slots[tree, depth - 1] = slot_mapping[root + path[-1]]
                accepted.dst_slots[tree, depth - 1] = slot_mapping[root + depth]
        accepted.count[tree], accepted.last[tree] = len(path), path[-1]
        padded = path + path[-1:] * (places - len(path))
        accepted.rows[tree] = first + torch.tensor(padded)
    return accepted
