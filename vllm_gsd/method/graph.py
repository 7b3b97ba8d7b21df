"""The token graph: nodes, edges and their probabilities, for a whole batch at once.

Vocabulary (paper section 3; design in the README):

* node 0 of every graph is its *root*, the last committed token of the request;
* a *native* node was proposed by a source (draft model, n-grams, other responses) and may be expanded;
* a *merged edge* says "this token continues as that existing node". It is stored as a node record of its
  own (it has a parent, a token and a probability) whose ``merged`` names the node whose children it shares.
"""

from typing import NamedTuple

import numpy as np

from vllm_gsd.method.compiled import compiled, compiled_helper

# Where a node comes from. Metrics report acceptance by origin.
ORIGIN_ROOT = 0
ORIGIN_DRAFT = 1
ORIGIN_NGRAM = 2
ORIGIN_GRAMMAR = 3
ORIGIN_SHARED = 4
ORIGIN_AGREED = 5  # drafted by the model and copied from a text
NUM_ORIGINS = 6

NONE = -1

# How many committed tokens before the root an n-gram may reach back into.
MAX_CONTEXT = 16


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
    merged: np.ndarray  # int32, node whose children a merged edge shares, else NONE
    first_child: np.ndarray  # int32, head of the list of children, NONE if there are none
    next_sibling: np.ndarray  # int32
    size: np.ndarray  # int32 [num_graphs], nodes in use
    context: np.ndarray  # int64 [num_graphs, MAX_CONTEXT], tokens before the root, nearest first; NONE pads

    @property
    def capacity(self) -> int:
        """Most nodes a graph of this batch can hold."""
        return self.token.shape[1]


def new_graphs(num_graphs: int, capacity: int) -> GraphBatch:
    """Allocate ``num_graphs`` graphs of at most ``capacity`` nodes (root included); call ``reset`` before use."""
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


@compiled
def reset(graphs, row, committed):
    """Make graph ``row`` a lone root.

    Args:
        committed: int [n >= 1], the request's committed tokens (a tail of them suffices); the last is the root.
    """
    graphs.token[row, 0] = committed[-1]
    graphs.parent[row, 0] = NONE
    graphs.depth[row, 0] = 0
    graphs.prob[row, 0] = 1.0
    graphs.survival[row, 0] = 1.0
    graphs.origin[row, 0] = ORIGIN_ROOT
    graphs.merged[row, 0] = NONE
    graphs.first_child[row, 0] = NONE
    graphs.next_sibling[row, 0] = NONE
    graphs.size[row] = 1
    for back in range(MAX_CONTEXT):
        place = len(committed) - 2 - back
        graphs.context[row, back] = committed[place] if place >= 0 else NONE


@compiled
def reset_all(graphs, token_ids, lines, length):
    """Make the graphs of a batch lone roots.

    Args:
        token_ids: int32 [any, most tokens]; lines: int64 [num_graphs], each request's row of it.
        length: int64 [num_graphs], committed tokens of each request.
    """
    for row in range(len(lines)):
        reset(graphs, row, token_ids[lines[row], : length[row]])


@compiled
def add_child(graphs, row, parent, token, prob, origin):
    """Append a node below ``parent``; return its index, or NONE when the graph is full."""
    node = graphs.size[row]
    if node >= graphs.token.shape[1]:
        return NONE
    graphs.size[row] = node + 1
    graphs.token[row, node] = token
    graphs.parent[row, node] = parent
    graphs.depth[row, node] = graphs.depth[row, parent] + 1
    graphs.prob[row, node] = prob
    graphs.survival[row, node] = graphs.survival[row, parent] * prob
    graphs.origin[row, node] = origin
    graphs.merged[row, node] = NONE
    graphs.first_child[row, node] = NONE
    graphs.next_sibling[row, node] = NONE
    last = graphs.first_child[row, parent]
    if last == NONE:
        graphs.first_child[row, parent] = node
    else:
        while graphs.next_sibling[row, last] != NONE:
            last = graphs.next_sibling[row, last]
        graphs.next_sibling[row, last] = node
    return node


@compiled
def find_child(graphs, row, parent, token):
    """The child of ``parent`` that carries ``token``, or NONE."""
    child = graphs.first_child[row, parent]
    while child != NONE and graphs.token[row, child] != token:
        child = graphs.next_sibling[row, child]
    return child


@compiled_helper
def agree(graphs, row, node, prob):
    """A text suggests, with that chance, a node that is there already.

    If the draft model has proposed it, the two are taken for independent: it is wrong only where both are. (Survival,
    which growing needed, stays as it was.)
    """
    if graphs.origin[row, node] == ORIGIN_DRAFT:
        before = graphs.prob[row, node]
        graphs.prob[row, node] = before + prob * (np.float32(1.0) - before)
        graphs.origin[row, node] = ORIGIN_AGREED


@compiled_helper
def left_by_copies(graphs, row, parent):
    """Chance that the surest child copied from a text leaves to others."""
    left = np.float32(1.0)
    child = graphs.first_child[row, parent]
    while child != NONE:
        if graphs.origin[row, child] != ORIGIN_DRAFT:
            left = min(left, np.float32(1.0) - graphs.prob[row, child])
        child = graphs.next_sibling[row, child]
    return left


@compiled_helper
def insert_path(graphs, row, tokens, probs, origin):
    """Add the path ``tokens``, copied from a text, below the root.

    Args:
        tokens, probs: int64 / float32 [n], token and conditional probability of each step where no other copy is known.
    """
    node = 0
    for i in range(len(tokens)):
        child = find_child(graphs, row, node, tokens[i])
        if child == NONE:
            child = add_child(graphs, row, node, tokens[i], probs[i] * left_by_copies(graphs, row, node), origin)
            if child == NONE:
                return
        else:
            agree(graphs, row, child, probs[i])
        # A merged edge continues as the node it points to.
        node = child if graphs.merged[row, child] == NONE else graphs.merged[row, child]
