"""Reference of ``vllm_gsd.ops.walk``."""

import itertools

import torch

from vllm_gsd.method.constants import NONE
from vllm_gsd.method.verify import child_carrying
from vllm_gsd.ops.walk.api import PADDING, Accepted, check_walk


def accept_walk_reference(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    sampled: torch.Tensor,
    starts: torch.Tensor,
    max_depth: int,
    slots: torch.Tensor | None = None,
) -> Accepted:
    """``accept_walk`` in plain Python."""
    check_walk(tokens, parents, sampled, starts, max_depth, slots, None)
    accepted = Accepted.empty(len(starts) - 1, max_depth, tokens.device, slots is not None)
    for tensor in accepted:
        if tensor is not None:
            tensor.fill_(PADDING)
    accepted.length.zero_()
    bounds = starts.tolist()
    for tree, (first, end) in enumerate(itertools.pairwise(bounds)):
        if first == end:
            continue
        token, parent = tokens[first:end].numpy(force=True), parents[first:end].numpy(force=True)
        drawn = sampled[first:end].tolist()
        place = 0
        for depth in range(max_depth):
            child = child_carrying(token, parent, place, drawn[place])
            if child == NONE:
                break
            accepted.tokens[tree, depth] = drawn[place]
            place = child
            accepted.path[tree, depth] = place
            accepted.length[tree] += 1
            if slots is not None and place != depth + 1:
                assert accepted.src_slots is not None and accepted.dst_slots is not None
                accepted.src_slots[tree, depth] = slots[first + place]
                accepted.dst_slots[tree, depth] = slots[first + depth + 1]
        accepted.tokens[tree, accepted.length[tree]] = drawn[place]
    return accepted
