"""Token graphs of a batch as device tensors: the counterpart of ``method.graph``, for growth without the host.

All functions here and in ``growth.api``, ``ngram`` and ``flatten`` are safe to capture: shapes depend on shapes and
numbers only, nothing is read back, and no branch depends on a tensor's content. Where ``method`` walks lists of
children, they compare all nodes at once. Nodes have the same numbers as in ``method``, so ties break in the same way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_gsd.method.constants import MAX_CONTEXT, NONE, ORIGIN_ROOT
from vllm_gsd.ops.dispatch import check_tensor

WORD = 64  # bits of a word


class DeviceGraphs(NamedTuple):
    """Graphs of a batch; row ``b`` belongs to one request, and C is the capacity.

    Shapes: ``[num_graphs, C + 1]`` unless stated otherwise. Column C is padding: it takes discarded writes. Node
    numbers are int64, the type of indices. All tensors are updated in place.
    """

    token: torch.Tensor  # int64
    parent: torch.Tensor  # int64, NONE for the root and unused nodes
    depth: torch.Tensor  # int64
    prob: torch.Tensor  # float32
    survival: torch.Tensor  # float32
    origin: torch.Tensor  # int64, ORIGIN_*
    merged: torch.Tensor  # int64, target of a merged edge, else NONE
    size: torch.Tensor  # int64 [num_graphs], nodes in use
    context: torch.Tensor  # int64 [num_graphs, MAX_CONTEXT], tokens before the root, nearest first; NONE pads
    # int64 [num_graphs, C + 1, words], bit j of a node's word w is set if a walk down from node 64 * w + j reaches
    # the node. There are no words without merging.
    above: torch.Tensor

    @property
    def capacity(self) -> int:
        """Maximum number of nodes of a graph, including the root."""
        return self.token.shape[1] - 1

    def real(self) -> torch.Tensor:
        """Which columns are nodes, bool ``[num_graphs, C]``."""
        return torch.arange(self.capacity, device=self.size.device) < self.size[:, None]


def start_graphs(texts: torch.Tensor, length: torch.Tensor, capacity: int, merging: bool) -> DeviceGraphs:
    """Create graphs with a root only: the last token of each text, with the tokens before it as context.

    Args:
        texts: int64 or int32 ``[num_graphs, most]``, committed tokens.
        length: int64 ``[num_graphs]``, tokens in use of each text, at least 1.
        capacity: maximum number of nodes of a graph, including the root.
        merging: whether ``add_candidates`` may merge nodes.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or there is no room for a root.
    """
    device, count = length.device, len(length)
    check_tensor("length", length, device, 1, torch.int64)
    check_tensor("texts", texts, device, 2, torch.int64, torch.int32, rows=count)
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}, but must be at least 1")
    shape = (count, capacity + 1)

    def filled(value: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    back = length[:, None] - 1 - torch.arange(1 + MAX_CONTEXT, device=device)
    latest = texts[:count].gather(1, back.clamp(min=0)).long()
    words = -(-capacity // WORD) if merging else 0
    graphs = DeviceGraphs(
        token=filled(0),
        parent=filled(NONE),
        depth=filled(0),
        prob=filled(0.0, torch.float32),
        survival=filled(0.0, torch.float32),
        origin=filled(ORIGIN_ROOT),
        merged=filled(NONE),
        size=torch.ones_like(length),
        context=torch.where(back >= 0, latest, NONE)[:, 1:],
        above=torch.zeros((*shape, words), dtype=torch.int64, device=device),
    )
    graphs.token[:, 0] = latest[:, 0]
    graphs.prob[:, 0] = 1.0
    graphs.survival[:, 0] = 1.0
    graphs.above[:, 0, :1] = 1
    return graphs


def append(
    graphs: DeviceGraphs,
    parent: torch.Tensor,
    token: torch.Tensor,
    prob: torch.Tensor,
    wanted: torch.Tensor,
    origin: int,
) -> torch.Tensor:
    """Add nodes in the given order while there is room; none may be the parent of another.

    Args:
        parent, token: int64 ``[num_graphs, n]``; prob: float32; wanted: bool, which nodes to add.
        origin: the origin of all nodes.

    Returns:
        int64 ``[num_graphs, n]``, the added nodes; C for one that was not added.
    """
    capacity = graphs.capacity
    node = graphs.size[:, None] + wanted.cumsum(1) - 1
    node = torch.where(wanted & (node < capacity), node, capacity)
    graphs.size.copy_((graphs.size + wanted.sum(1)).clamp(max=capacity))
    graphs.token.scatter_(1, node, token)
    graphs.parent.scatter_(1, node, parent)
    graphs.depth.scatter_(1, node, graphs.depth.gather(1, parent) + 1)
    graphs.prob.scatter_(1, node, prob)
    graphs.survival.scatter_(1, node, graphs.survival.gather(1, parent) * prob)
    graphs.origin.scatter_(1, node, torch.full_like(node, origin))
    words = graphs.above.shape[2]
    above = rows_of(graphs.above, parent) | one_bit(node, words)
    graphs.above.scatter_(1, node[:, :, None].expand(-1, -1, words), above)
    return node


def find_child(graphs: DeviceGraphs, parent: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """The child of ``parent`` that carries ``token``, or NONE; all int64 ``[num_graphs, n]``."""
    capacity = graphs.capacity
    is_child = (graphs.parent[:, None, :capacity] == parent[:, :, None]) & (
        graphs.token[:, None, :capacity] == token[:, :, None]
    )
    return torch.where(is_child.any(2), is_child.int().argmax(2), NONE)


def rows_of(values: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
    """The rows ``[num_graphs, n, words]`` of ``values`` ``[num_graphs, C + 1, words]`` at ``node``."""
    return values.gather(1, node[:, :, None].expand(-1, -1, values.shape[2]))


def one_bit(place: torch.Tensor, words: int) -> torch.Tensor:
    """Masks with the bit ``place`` set, int64 ``[*place.shape, words]``; 0 for a place beyond the words."""
    word = torch.arange(words, device=place.device)
    bit = torch.ones_like(place) << (place % WORD)
    return torch.where(word == place[..., None] // WORD, bit[..., None], 0)


def has_bit(masks: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Whether masks int64 ``[num_graphs, n, words]`` have the bit at each graph's ``place`` ``[num_graphs]``, bool."""
    word = masks.gather(2, (place // WORD)[:, None, None].expand(-1, masks.shape[1], 1)).squeeze(2)
    return (word >> (place % WORD)[:, None] & 1).bool()


def bits(masks: torch.Tensor) -> torch.Tensor:
    """All bits of masks int64 ``[..., words]``, bool ``[..., 64 * words]``."""
    return (masks[..., None] >> torch.arange(WORD, device=masks.device) & 1).bool().flatten(-2)
