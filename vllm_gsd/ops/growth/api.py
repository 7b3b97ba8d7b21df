"""Level-wise growth on the device; the results equal those of ``method.growth`` and ``method.draft_level`` on the host.

Frontiers are padded: all graphs have the same number of places, and those after ``frontier_len`` are ignored.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from vllm_gsd.method.constants import MAX_CONTEXT, NONE, ORIGIN_DRAFT
from vllm_gsd.ops.dispatch import check_tensor, use_triton
from vllm_gsd.ops.growth.state import DeviceGraphs, append, bits, has_bit, one_bit, rows_of


class LevelRows(NamedTuple):
    """Rows of a draft forward, ``[num_graphs, width]``; all fields are 0 in rows that are not ``real``."""

    token: torch.Tensor  # int64
    depth: torch.Tensor  # int64
    slot: torch.Tensor  # int64, the node's draft KV slot, counted per request
    mask: torch.Tensor  # int64 [num_graphs, width, words], slots that the row attends, including its own
    real: torch.Tensor  # bool


def survival_floor(graphs: DeviceGraphs, num_nodes: torch.Tensor) -> torch.Tensor:
    """Survival of each graph's ``num_nodes``-th best node, float32 ``[num_graphs]``; 0 if there are fewer nodes.

    Args:
        num_nodes: int64 ``[num_graphs]``, at least 1.
    """
    capacity = graphs.capacity
    survival = graphs.survival[:, :capacity].masked_fill(~graphs.real(), -math.inf)[:, 1:]
    if capacity == 1:
        return survival.new_zeros(len(survival))
    ranked = survival.sort(dim=1, descending=True).values
    last = (num_nodes - 1).clamp(0, capacity - 2)
    return torch.where(graphs.size > num_nodes, ranked.gather(1, last[:, None]).squeeze(1), 0.0)


def add_candidates(
    graphs: DeviceGraphs,
    frontier: torch.Tensor,
    frontier_len: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    num_nodes: torch.Tensor,
    theta_sib: float,
    merge_ngram: torch.Tensor,
    longest_ngram: int,
) -> torch.Tensor:
    """Add the draft model's candidates below the frontier nodes; updates ``graphs``.

    Args:
        frontier: int64 ``[num_graphs, width]``, distinct nodes of each graph, none of them a merged edge.
        frontier_len: int64 ``[num_graphs]``, number of places in use.
        tokens: int64 ``[num_graphs, width, k]``, candidates of each, best first; negative for none.
        probs: float32 ``[num_graphs, width, k]``.
        num_nodes: int64 ``[num_graphs]``, node budgets, at least 1.
        theta_sib: a candidate below ``theta_sib`` times its best sibling is dropped.
        merge_ngram: int64 ``[num_graphs]``, length of the n-grams by which nodes merge; 0 turns merging off.
        longest_ngram: upper bound of ``merge_ngram``; 0 if the graphs were started without ``merging``.

    Returns:
        int64 ``[3]``: candidates added, those of them that became merged edges, and candidates dropped.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    device, count = graphs.size.device, len(graphs.size)
    check_tensor("frontier", frontier, device, 2, torch.int64, rows=count)
    check_tensor("tokens", tokens, device, 3, torch.int64, rows=count)
    check_tensor("probs", probs, device, 3, torch.float32, rows=count)
    if tokens.shape != probs.shape or tokens.shape[:2] != frontier.shape:
        raise ValueError(f"tokens and probs must be [{count}, {frontier.shape[1]}, k] for this frontier")
    if longest_ngram and not graphs.above.shape[2]:
        raise ValueError("longest_ngram is not 0, but the graphs were started without merging")
    num_candidates = tokens.shape[2]
    asked = (torch.arange(frontier.shape[1], device=device) < frontier_len[:, None])[:, :, None] & (tokens >= 0)
    survival = graphs.survival.gather(1, frontier)[:, :, None] * probs
    floor = survival_floor(graphs, num_nodes)[:, None, None]
    weak = (probs < float(np.float32(theta_sib)) * probs[:, :, :1]) | (survival <= floor)
    strong = (asked & ~weak).flatten(1)
    parent = frontier[:, :, None].expand_as(tokens).flatten(1)
    token = tokens.flatten(1)
    known = _is_known(graphs, frontier, tokens).flatten(1)
    # Among candidates with the same token, the first that is not dropped becomes the child.
    same = (tokens[:, :, :, None] == tokens[:, :, None, :]) & strong.view_as(tokens)[:, :, None, :]
    earlier = torch.ones(num_candidates, num_candidates, dtype=torch.bool, device=device).tril(-1)
    again = (same & earlier).any(3).flatten(1)
    node = append(graphs, parent, token, probs.flatten(1), strong & ~known & ~again, ORIGIN_DRAFT)
    added = node < graphs.capacity
    merged = torch.zeros_like(graphs.size)
    if longest_ngram:
        merged = _merge(graphs, parent, node, merge_ngram, longest_ngram)
    # A repeated token does not count as dropped, unless there was no room for its first candidate.
    lost = strong & ~known & _repeats(tokens, strong & ~known & ~again & ~added)
    dropped = (asked & weak).flatten(1) | lost
    return torch.stack([added.sum(), merged.sum(), dropped.sum()])


def _is_known(graphs: DeviceGraphs, frontier: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Whether the frontier node already has a child with the candidate's token, bool of ``tokens``' shape."""
    capacity = graphs.capacity
    below = graphs.parent[:, None, :capacity] == frontier[:, :, None]
    same = graphs.token[:, None, None, :capacity] == tokens[:, :, :, None]
    return (below[:, :, None, :] & same).any(3)


def _repeats(tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Whether one of the ``chosen`` siblings has the candidate's token, bool ``[num_graphs, width * k]``."""
    same = tokens[:, :, :, None] == tokens[:, :, None, :]
    return (same & chosen.view_as(tokens)[:, :, None, :]).any(3).flatten(1)


def _merge(
    graphs: DeviceGraphs, parent: torch.Tensor, node: torch.Tensor, merge_ngram: torch.Tensor, longest: int
) -> torch.Tensor:
    """Turn new nodes into merged edges, one after the other, since each changes what the next may point to.

    Args:
        parent, node: int64 ``[num_graphs, n]``, the nodes added last and their parents; node C for none.

    Returns:
        int64 ``[num_graphs]``, number of nodes that were merged.
    """
    capacity, words = graphs.capacity, graphs.above.shape[2]
    number = torch.arange(capacity, device=node.device)
    # Targets come before the new node, and the root is none.
    candidate = _same_ngrams(graphs, node, merge_ngram, longest)
    candidate &= (number > 0) & (number < node[:, :, None]) & (node < capacity)[:, :, None]
    candidate &= (merge_ngram > 0)[:, None, None]
    before = graphs.merged.clone()
    if use_triton(node, node_by_node=True):
        from vllm_gsd.ops.growth.triton import merge_nodes_kernel, triton

        merge_nodes_kernel[(len(node),)](
            graphs.merged, graphs.above, candidate.view(torch.uint8), parent.contiguous(), node.contiguous(),
            node.shape[1], capacity, WORDS=words, BLOCK=triton.next_power_of_2(capacity), num_warps=4,
        )  # fmt: skip
    else:
        _merge_reference(graphs, candidate, parent, node)
    return (graphs.merged[:, :capacity] != before[:, :capacity]).sum(1)


def _merge_reference(graphs: DeviceGraphs, candidate: torch.Tensor, parent: torch.Tensor, node: torch.Tensor) -> None:
    """``merge_nodes_kernel`` in plain PyTorch.

    Args:
        candidate: bool ``[num_graphs, n, C]``, possible targets of each new node, including those that close a cycle.
    """
    capacity, words = graphs.capacity, graphs.above.shape[2]
    for place in range(node.shape[1]):
        above = rows_of(graphs.above, parent[:, place : place + 1])
        # Refuse targets that reach the parent, which would close a cycle. Take the oldest of the others.
        fits = candidate[:, place] & (graphs.merged[:, :capacity] == NONE) & ~bits(above).squeeze(1)[:, :capacity]
        found, target = fits.any(1), fits.int().argmax(1)
        own = node[:, place : place + 1]
        graphs.merged.scatter_(1, own, torch.where(found, target, NONE)[:, None])
        # The parent and its ancestors now reach everything that the target reaches.
        joined = has_bit(graphs.above, target) & found[:, None]
        graphs.above.bitwise_or_(torch.where(joined[:, :, None], above.expand(-1, 1, words), 0))
    graphs.merged[:, capacity] = NONE  # the padding column


def _same_ngrams(graphs: DeviceGraphs, node: torch.Tensor, length: torch.Tensor, longest: int) -> torch.Tensor:
    """Whether the n-grams that end at two nodes are equal, bool ``[num_graphs, n, C]``.

    An n-gram that is longer than its path continues before the root, in the committed context. Beyond the known
    context, two n-grams are equal only if their paths met before.

    Args:
        node: int64 ``[num_graphs, n]``; length: int64 ``[num_graphs]``, at most ``longest``.
    """
    capacity = graphs.capacity
    # The current end of each node's path: a node, or -1 - i for place i of the context.
    at = torch.arange(capacity + 1, device=node.device).expand_as(graphs.token)
    same = torch.ones((*node.shape, capacity), dtype=torch.bool, device=node.device)
    for step in range(longest):
        before = graphs.context.gather(1, (-1 - at).clamp(0, MAX_CONTEXT - 1))
        before = torch.where((at >= -MAX_CONTEXT) & (before != NONE), before, at)
        symbol = torch.where(at >= 0, graphs.token.gather(1, at.clamp(min=0)), before)
        equal = symbol.gather(1, node)[:, :, None] == symbol[:, None, :capacity]
        same &= equal | (step >= length)[:, None, None]
        at = torch.where(at >= 0, graphs.parent.gather(1, at.clamp(min=0)), at - 1)
    return same


def next_frontier(
    graphs: DeviceGraphs,
    first_new: torch.Tensor,
    num_nodes: torch.Tensor,
    room: torch.Tensor,
    theta_prob: float,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the nodes to draft from next, best survival first.

    Args:
        first_new: int64 ``[num_graphs]``, first node that no earlier level has considered.
        num_nodes: int64 ``[num_graphs]``, node budgets, at least 1.
        room: int64 ``[num_graphs]``, free draft KV slots.
        theta_prob: survival below which a node is not expanded.
        width: number of places of the frontier.

    Returns:
        frontier int64 ``[num_graphs, width]``, 0 in unused places, and number of nodes in it, int64 ``[num_graphs]``.
    """
    capacity = graphs.capacity
    survival = graphs.survival[:, :capacity]
    wanted = graphs.real() & (torch.arange(capacity, device=survival.device) >= first_new[:, None])
    wanted &= graphs.merged[:, :capacity] == NONE
    wanted &= (survival >= float(np.float32(theta_prob))) & (survival >= survival_floor(graphs, num_nodes)[:, None])
    ranked = torch.where(wanted, survival, -math.inf).sort(dim=1, descending=True, stable=True).indices[:, :width]
    ranked = torch.nn.functional.pad(ranked, (0, width - ranked.shape[1]))
    count = torch.minimum(wanted.sum(1), room.clamp(0, width))
    places = torch.arange(width, device=survival.device)
    return torch.where(places < count[:, None], ranked, 0), count


def level_rows(
    graphs: DeviceGraphs, used: torch.Tensor, masks: torch.Tensor, frontier: torch.Tensor, frontier_len: torch.Tensor
) -> LevelRows:
    """Give every frontier node a draft KV slot and build the rows of the draft model's next forward.

    Args:
        used: int64 ``[num_graphs]``, slots allocated so far; updated.
        masks: int64 ``[num_graphs, C + 1, words]``, slots of each node and its ancestors; updated.
        frontier, frontier_len: int64 ``[num_graphs, width]`` and ``[num_graphs]``, without roots.
    """
    places = torch.arange(frontier.shape[1], device=frontier.device)
    real = places < frontier_len[:, None]
    slot = torch.where(real, used[:, None] + places, 0)
    parent = graphs.parent.gather(1, frontier).clamp(min=0)
    # The root's key and value are in the committed text, so its children inherit no slot.
    mask = torch.where((parent == 0)[:, :, None], 0, rows_of(masks, parent)) | one_bit(slot, masks.shape[2])
    mask = torch.where(real[:, :, None], mask, 0)
    node = torch.where(real, frontier, graphs.capacity)
    masks.scatter_(1, node[:, :, None].expand_as(mask), mask)
    used += frontier_len
    return LevelRows(
        torch.where(real, graphs.token.gather(1, frontier), 0),
        torch.where(real, graphs.depth.gather(1, frontier), 0),
        slot,
        mask,
        real,
    )
