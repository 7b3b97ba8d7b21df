"""The token graph: nodes, edges and their probabilities, for a whole batch at once.

Vocabulary (Gong et al. 2024, section 3):

* node 0 of every graph is its *root*, the last committed token of the request;
* a *native* node was proposed by a source (draft model, n-grams, other responses) and may be expanded;
* a *merged edge* states that a token continues as an existing node, its target. It is a node record of its own, with a
  parent, a token and a probability. Its ``merged`` names the target, whose children it shares.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vllm_gsd.method.constants import MAX_CONTEXT, NONE, ORIGIN_ROOT


class GraphBatch(NamedTuple):
    """Graphs of a batch as padded arrays; row ``b`` is one request's graph.

    Shapes: ``[num_graphs, capacity]`` unless stated otherwise.
    """

    token: np.ndarray  # int64, vocabulary id
    parent: np.ndarray  # int32, node index, NONE for the root
    depth: np.ndarray  # int32, root is 0
    prob: np.ndarray  # float32, conditional probability given the parent
    survival: np.ndarray  # float32, product of conditional probabilities from the root
    origin: np.ndarray  # int8, ORIGIN_*
    merged: np.ndarray  # int32, target of a merged edge, else NONE
    first_child: np.ndarray  # int32, head of the list of children, or NONE
    next_sibling: np.ndarray  # int32
    size: np.ndarray  # int32 [num_graphs], nodes in use
    context: np.ndarray  # int64 [num_graphs, MAX_CONTEXT], tokens before the root, nearest first; NONE pads

    @property
    def capacity(self) -> int:
        """Maximum number of nodes of a graph, including the root."""
        return self.token.shape[1]


def new_graphs(num_graphs: int, capacity: int) -> GraphBatch:
    """Allocate ``num_graphs`` graphs of at most ``capacity`` nodes, including the root; call ``reset`` before use."""
    shape = (num_graphs, capacity)
    return GraphBatch(
        token=np.zeros(shape, np.int64),
        parent=np.full(shape, NONE, np.int32),
        depth=np.zeros(shape, np.int32),
        prob=np.zeros(shape, np.float32),
        survival=np.zeros(shape, np.float32),
        origin=np.zeros(shape, np.int8),
        merged=np.full(shape, NONE, np.int32),
        first_child=np.full(shape, NONE, np.int32),
        next_sibling=np.full(shape, NONE, np.int32),
        size=np.zeros(num_graphs, np.int32),
        context=np.full((num_graphs, MAX_CONTEXT), NONE, np.int64),
    )


def reset(graphs: GraphBatch, row: int, committed: np.ndarray) -> None:
    """Reset graph ``row`` to its root, the last of ``committed``: the request's tokens or their tail, int [n >= 1]."""
    _write(graphs, row, 0, committed[-1], NONE, 0, 1.0, 1.0, ORIGIN_ROOT)
    graphs.size[row] = 1
    before = committed[-2::-1][:MAX_CONTEXT]
    graphs.context[row] = NONE
    graphs.context[row, : len(before)] = before


def reset_all(graphs: GraphBatch, token_ids: np.ndarray, lines: np.ndarray, length: np.ndarray) -> None:
    """Reset all graphs of a batch to their roots.

    Args:
        token_ids: int32 [rows, max_tokens]; lines: int64 [num_graphs], each request's row in it.
        length: int64 [num_graphs], number of committed tokens of each request.
    """
    for row, line in enumerate(lines):
        reset(graphs, row, token_ids[line, : length[row]])


def add_child(graphs: GraphBatch, row: int, parent: int, token: int, prob: np.floating, origin: int) -> int:
    """Append a node below ``parent``; return its index, or NONE if the graph is full."""
    node = int(graphs.size[row])
    if node >= graphs.capacity:
        return NONE
    siblings = list(children(graphs, row, parent))
    survival = graphs.survival[row, parent] * prob
    _write(graphs, row, node, token, parent, graphs.depth[row, parent] + 1, prob, survival, origin)
    graphs.size[row] = node + 1
    if siblings:
        graphs.next_sibling[row, siblings[-1]] = node
    else:
        graphs.first_child[row, parent] = node
    return node


def _write(graphs: GraphBatch, row: int, node: int, *values: float | np.floating) -> None:
    """Write a native node without children, given its fields from token to origin in the order of ``GraphBatch``."""
    for field, value in zip(graphs, (*values, NONE, NONE, NONE), strict=False):  # merged, and the links to other nodes
        field[row, node] = value


def children(graphs: GraphBatch, row: int, node: int) -> Iterator[int]:
    """Yield the children of a node in the order in which they were added."""
    child = int(graphs.first_child[row, node])
    while child != NONE:
        yield child
        child = int(graphs.next_sibling[row, child])


def find_child(graphs: GraphBatch, row: int, parent: int, token: int) -> int:
    """The child of ``parent`` that carries ``token``, or NONE."""
    return next((child for child in children(graphs, row, parent) if graphs.token[row, child] == token), NONE)


def beyond(graphs: GraphBatch, row: int, node: int) -> int:
    """The node whose children follow ``node``: the target of a merged edge, else ``node`` itself."""
    merged = int(graphs.merged[row, node])
    return node if merged == NONE else merged
