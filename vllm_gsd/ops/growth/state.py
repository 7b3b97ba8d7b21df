"""Token graphs of a batch as device tensors: the counterpart of ``method.graph`` and ``method.draft_level``.

All tensors are allocated once and updated in place, and ``begin`` resets them. Kernels here and in ``ngram`` and
``flatten`` have one program for each graph, so that shapes depend on the batch's bucket alone and a CUDA graph can hold
them. Nodes have the same numbers as in ``method``, so ties break in the same way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Columns of ``DeviceGraphs.state``.
SIZE, USED, FRONTIER, LENGTH, BASE, DEEPEST, ROOM, MERGES, MAX_DEPTH, NUM_NODES, COPIES, SLOT = range(12)
# Rows of ``DeviceGraphs.nodes``.
TOKEN, PARENT, DEPTH, ORIGIN, MERGED, LINE = range(6)
# What the device counts, in ``DeviceGraphs.counts``.
COUNTS = ("nodes_added", "nodes_merged", "nodes_pruned", "draft_nodes", "draft_rows_invalid")


class DeviceGraphs(NamedTuple):
    """Graphs of a batch; row ``b`` belongs to one request, C is the capacity and N the most verified nodes."""

    # int32 [num_graphs, 6, C]: token, parent, depth, origin, target of a merged edge, and the node's row among its
    # graph's rows in the draft forward that ran it. Parent and target are NONE where there is none.
    nodes: torch.Tensor
    chances: torch.Tensor  # float32 [num_graphs, 2, C]: prob and survival
    # int32 [num_graphs, n, C], the n-gram that ends at the node, backwards. It continues before the root in the text;
    # -i stands for place i before the root if the text has none there. n is 0 without merging.
    grams: torch.Tensor
    # int64 [num_graphs, words, C], bit j of word w is set if a walk down from node 64 * w + j reaches the node. There
    # are no words without merging.
    above: torch.Tensor
    slots: torch.Tensor  # int64 [num_graphs, words, C], draft KV slots of the node and its ancestors below the root
    best: torch.Tensor  # float32 [num_graphs, N], the highest survivals, falling; padded with zeros
    frontier: torch.Tensor  # int32 [num_graphs, N], the nodes that the draft runs next or has just run
    # int32 [num_graphs, 12]: nodes in use, draft KV slots in use, places of the frontier in use, tokens of the text,
    # those of them before the first draft slot, deepest node that the draft runs, most draft slots, whether nodes
    # merge, deepest node to verify, most nodes to verify, most tokens to copy, and the request's slot or NONE.
    state: torch.Tensor
    counts: torch.Tensor  # int64 [5], ``COUNTS`` of all graphs; only added to

    @property
    def capacity(self) -> int:
        """Maximum number of nodes of a graph, including the root."""
        return self.nodes.shape[2]

    @property
    def num_nodes(self) -> int:
        """The most nodes of a graph that are verified."""
        return self.best.shape[1]

    def first(self, count: int) -> DeviceGraphs:
        return self._replace(**{name: field[:count] for name, field in self._asdict().items() if name != "counts"})


class Rows(NamedTuple):
    """Rows of a draft forward, ``width`` for each request. Rows that are not in use hold zeros, and slot -1."""

    token: torch.Tensor  # int32 [num_graphs * width]
    position: torch.Tensor  # int64
    slot: torch.Tensor  # int64, physical KV slot
    mask: torch.Tensor  # int64 [num_graphs * width, words], the KV after the prefix that the row attends
    prefix: torch.Tensor  # int32 [num_graphs], leading tokens that all rows of the request attend
    # int64, what the row's hidden state comes from: of text the KV slot of the token before it, -1 for none; of a node
    # its parent's row in the forward before.
    source: torch.Tensor

    def first(self, count: int, width: int) -> Rows:
        rows = count * width
        return Rows(**{name: field[: count if name == "prefix" else rows] for name, field in self._asdict().items()})


class Known(NamedTuple):
    """What the host knows about a batch before it learns which tokens were accepted."""

    # int32 [num_requests, 5]: slot in vLLM's request states, NONE for padding; 1 to draft, 2 for copies only, 0 for no
    # graph; leading tokens with draft KV, NONE if only the device knows; KV slots in allocated blocks; the request's
    # maximum number of tokens.
    limits: torch.Tensor
    trust: torch.Tensor  # float32 [num_requests, sources], from ``SourceTrust``
    factor: torch.Tensor  # float32 [sources, NUM_DEPTHS, NUM_BINS], from ``Calibration``


def new_graphs(
    count: int, capacity: int, num_nodes: int, merge_ngram: int, max_slots: int, device: torch.device
) -> DeviceGraphs:
    """Allocate graphs; ``begin`` resets them.

    Args:
        capacity: maximum number of nodes of each, including the root.
        num_nodes: most nodes of each that are verified.
        merge_ngram: length of the n-grams by which nodes merge; 0 without merging.

    Raises:
        ValueError: there is no room for a root.
    """
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}, but must be at least 1")

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    words = -(-capacity // 64) if merge_ngram else 0
    return DeviceGraphs(
        nodes=zeros(count, 6, capacity),
        chances=zeros(count, 2, capacity, dtype=torch.float32),
        grams=zeros(count, merge_ngram, capacity),
        above=zeros(count, words, capacity, dtype=torch.int64),
        slots=zeros(count, -(-max_slots // 64), capacity, dtype=torch.int64),
        best=zeros(count, num_nodes, dtype=torch.float32),
        frontier=zeros(count, num_nodes),
        state=zeros(count, 12),
        counts=zeros(len(COUNTS), dtype=torch.int64),
    )


def new_rows(count: int, width: int, words: int, device: torch.device) -> Rows:
    """Allocate ``width`` rows for each of ``count`` requests, with masks of ``words`` words."""
    whole = torch.zeros(count * width, dtype=torch.int64, device=device)
    mask = torch.zeros((count * width, words), dtype=torch.int64, device=device)
    prefix = torch.zeros(count, dtype=torch.int32, device=device)
    return Rows(whole.int(), whole, torch.full_like(whole, -1), mask, prefix, whole.clone())
