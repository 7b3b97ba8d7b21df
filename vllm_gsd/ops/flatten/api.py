"""Flattening on the device; the results equal those of ``method.flatten``, but a table replaces its heap."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from vllm_gsd.method.constants import (
    AGREED,
    MERGED,
    NATIVE,
    NGRAM,
    NONE,
    NUM_BINS,
    NUM_DEPTHS,
    NUM_SOURCES,
    ORIGIN_AGREED,
    ORIGIN_NGRAM,
    ORIGIN_SHARED,
    SHARED,
)
from vllm_gsd.ops.attention.masks import tree_masks
from vllm_gsd.ops.dispatch import check_tensor, use_triton
from vllm_gsd.ops.growth.state import WORD, DeviceGraphs, one_bit, rows_of


class DeviceTrees(NamedTuple):
    """Flattened graphs of a batch; place 0 is the first node below the root.

    Shapes: ``[num_graphs, num_places]`` unless stated otherwise. Places from ``size`` on hold zeros, and NONE as
    parent.
    """

    token: torch.Tensor  # int64
    parent: torch.Tensor  # int64, place of the parent, NONE for children of the root
    depth: torch.Tensor  # int64, children of the root are 1
    origin: torch.Tensor  # int64, ORIGIN_*
    via_merge: torch.Tensor  # bool, whether the path uses a merged edge
    survival: torch.Tensor  # float32, product of conditional probabilities along the path
    value: torch.Tensor  # float32, calibrated survival, never above the parent's
    size: torch.Tensor  # int64 [num_graphs]


def flatten_graphs(
    graphs: DeviceGraphs,
    num_places: int,
    num_nodes: torch.Tensor,
    max_depth: torch.Tensor,
    factor: torch.Tensor,
    trust: torch.Tensor,
) -> DeviceTrees:
    """Unroll every graph of the batch, best first.

    Args:
        num_places: places of each tree; num_nodes: int64 ``[num_graphs]``, node budgets, at most ``num_places``.
        max_depth: int64 ``[num_graphs]``, maximum depth of a place.
        factor: the factors of ``planner.calibration.Calibration``, float32 ``[sources, NUM_DEPTHS, NUM_BINS]``.
        trust: the result of ``SourceTrust.of``, float32 ``[num_graphs, sources]``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    device, count = graphs.size.device, len(graphs.size)
    check_tensor("num_nodes", num_nodes, device, 1, torch.int64, rows=count)
    check_tensor("max_depth", max_depth, device, 1, torch.int64, rows=count)
    check_tensor("factor", factor, device, 3, torch.float32)
    check_tensor("trust", trust, device, 2, torch.float32, rows=count)
    if factor.shape != (NUM_SOURCES, NUM_DEPTHS, NUM_BINS) or trust.shape[1] != NUM_SOURCES:
        raise ValueError(f"factor and trust must be of {NUM_SOURCES} sources, not {factor.shape} and {trust.shape}")
    if not use_triton(num_nodes, node_by_node=True):
        return _flatten_reference(graphs, num_places, num_nodes, max_depth, factor, trust)
    from vllm_gsd.ops.growth.triton import flatten_kernel, triton

    whole = torch.zeros((count, num_places), dtype=torch.int64, device=device)
    survival = torch.zeros(whole.shape, device=device)
    trees = DeviceTrees(
        token=whole,
        parent=torch.full_like(whole, NONE),
        depth=whole.clone(),
        origin=whole.clone(),
        via_merge=torch.zeros_like(whole, dtype=torch.bool),
        survival=survival,
        value=survival.clone(),
        size=torch.zeros_like(graphs.size),
    )
    flatten_kernel[(count,)](
        *trees, graphs.token, graphs.parent, graphs.prob, graphs.origin, graphs.merged, graphs.size, num_nodes,
        max_depth, factor.contiguous(), trust, trust.stride(0), num_places, graphs.capacity, NGRAM=ORIGIN_NGRAM,
        SHARED=ORIGIN_SHARED, AGREED=ORIGIN_AGREED, NGRAM_KIND=NGRAM, SHARED_KIND=SHARED, AGREED_KIND=AGREED,
        DEPTHS=NUM_DEPTHS,
        PLACES=triton.next_power_of_2(1 + num_places), BLOCK=triton.next_power_of_2(graphs.capacity), num_warps=4,
    )  # fmt: skip
    return trees


def _flatten_reference(
    graphs: DeviceGraphs,
    num_places: int,
    num_nodes: torch.Tensor,
    max_depth: torch.Tensor,
    factor: torch.Tensor,
    trust: torch.Tensor,
) -> DeviceTrees:
    """``flatten_graphs`` in plain PyTorch."""
    device, count, capacity = graphs.size.device, len(graphs.size), graphs.capacity
    # The value of each child by its parent place: row 0 is the root's, row 1 + p is place p's. Rows are in order of
    # expansion and columns in order of creation, so the first maximum is the one that the heap would give.
    worth = torch.full((count, 1 + num_places, capacity), -math.inf, device=device)
    whole, real = torch.zeros((count, 1 + num_places), dtype=torch.int64, device=device), graphs.real()
    token, parent, depth, node = whole.clone(), torch.full_like(whole, NONE), whole.clone(), whole.clone()
    crossed = torch.zeros_like(whole, dtype=torch.bool)
    likely, chance = (torch.ones(whole.shape, device=device) for _ in range(2))
    kind = _sources_of_copies(graphs.origin)
    kind, merged, prob = (values[:, :capacity] for values in (kind, graphs.merged, graphs.prob))
    size = torch.zeros_like(graphs.size)
    going = torch.ones_like(size, dtype=torch.bool)
    for row in range(num_places):
        source = node[:, row : row + 1]
        target = graphs.merged.gather(1, source)
        crossed[:, row : row + 1] |= target != NONE
        children = real & (graphs.parent[:, :capacity] == torch.where(target == NONE, source, target))
        children &= (going & (depth[:, row] < max_depth))[:, None]
        below = likely[:, row : row + 1] * prob
        native = torch.where(crossed[:, row : row + 1] | (merged != NONE), MERGED, NATIVE)
        source_of = torch.where(kind == NONE, native, kind)
        value = trust.gather(1, source_of) * _calibrated(factor, source_of, depth[:, row : row + 1] + 1, below)
        value = torch.minimum(chance[:, row : row + 1], value)
        worth[:, row] = torch.where(children, value, -math.inf)
        best = worth.flatten(1).argmax(1)
        value = worth.flatten(1).gather(1, best[:, None])
        going = (value > -math.inf).squeeze(1) & (row < num_nodes)
        worth.view(count, -1).scatter_(1, best[:, None], -math.inf)
        above, child = (best // capacity)[:, None], (best % capacity)[:, None]
        place, taken = row + 1, going[:, None]
        _put(token, place, graphs.token.gather(1, child), taken)
        _put(parent, place, above - 1, taken)
        _put(depth, place, depth.gather(1, above) + 1, taken)
        _put(node, place, child, taken)
        _put(crossed, place, crossed.gather(1, above), taken)
        _put(likely, place, likely.gather(1, above) * graphs.prob.gather(1, child), taken)
        _put(chance, place, value, taken)
        size += going
    filled = torch.arange(num_places, device=device) < size[:, None]
    node, crossed = node[:, 1:], crossed[:, 1:]
    return DeviceTrees(
        token=token[:, 1:],
        parent=parent[:, 1:],
        depth=depth[:, 1:],
        origin=torch.where(filled, graphs.origin.gather(1, node), 0),
        via_merge=filled & (crossed | (graphs.merged.gather(1, node) != NONE)),
        survival=torch.where(filled, likely[:, 1:], 0.0),
        value=torch.where(filled, chance[:, 1:], 0.0),
        size=size,
    )


def _sources_of_copies(origin: torch.Tensor) -> torch.Tensor:
    """The source of each copied node, int64 ``[num_graphs, C + 1]``; NONE for a drafted one."""
    kind = torch.full_like(origin, NONE)
    for copied, source in ((ORIGIN_NGRAM, NGRAM), (ORIGIN_SHARED, SHARED), (ORIGIN_AGREED, AGREED)):
        kind = torch.where(origin == copied, source, kind)
    return kind


def _put(values: torch.Tensor, column: int, new: torch.Tensor, taken: torch.Tensor) -> None:
    """Write ``new`` ``[num_graphs, 1]`` to a column of the graphs that are ``taken``."""
    values[:, column : column + 1] = torch.where(taken, new, values[:, column : column + 1])


def _calibrated(
    factor: torch.Tensor, source: torch.Tensor, depth: torch.Tensor, survival: torch.Tensor
) -> torch.Tensor:
    """Probability that a node is accepted, as ``method.cells.calibrated``; float32 ``[num_graphs, C]``."""
    cell = sum((survival <= 0.5**halved).long() for halved in range(1, NUM_BINS))
    index = (source * NUM_DEPTHS + depth.clamp(max=NUM_DEPTHS) - 1) * NUM_BINS + cell
    return (survival * factor.flatten()[index]).clamp(max=1.0)


def row_masks(parent: torch.Tensor) -> torch.Tensor:
    """Attention masks of the rows of trees, root first: a row attends itself and its ancestors.

    Args:
        parent: int64 ``[num_trees, num_places]``, of ``DeviceTrees``.

    Returns:
        int64 ``[num_trees, 1 + num_places, words]``; bit j of word w stands for row 64 * w + j, and row 0 is the
        root's. Places from a tree's size on count as children of the root; no other row attends them.
    """
    num_trees, num_places = parent.shape
    words = num_places // WORD + 1
    if use_triton(parent):
        rows = torch.nn.functional.pad(parent + 1, (1, 0), value=NONE).flatten().int()
        starts = torch.arange(num_trees + 1, dtype=torch.int32, device=parent.device) * (1 + num_places)
        masks = tree_masks(rows, starts, torch.zeros_like(starts), num_places, 1 + num_places, words).mask
        return masks.view(num_trees, 1 + num_places, words)
    own = one_bit(torch.arange(1 + num_places, device=parent.device), words)
    masks = own.repeat(num_trees, 1, 1)
    for place in range(num_places):
        masks[:, place + 1] |= rows_of(masks, parent[:, place : place + 1] + 1).squeeze(1)
    return masks
