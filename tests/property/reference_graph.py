"""An oracle for the specification that repeats none of its algorithms: it enumerates all paths of a graph.

Graphs become objects, and recursion finds everything that can be reached and unrolled. The checks use nothing from
``vllm_gsd.method``; only ``grow`` calls it, level by level, as a proposer does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from vllm_gsd.method.constants import NONE
from vllm_gsd.method.flatten import FlatTrees
from vllm_gsd.method.graph import GraphBatch, new_graphs, reset
from vllm_gsd.method.growth import add_candidates, next_frontier

Draft = Callable[[tuple[int, ...]], np.ndarray]

# --- the graph --------------------------------------------------------------------------------------


@dataclass(eq=False)
class Node:
    """A node, or a merged edge if ``merged`` is set."""

    index: int
    token: int
    prob: np.float32
    parent: Node | None
    merged: Node | None = None
    children: list[Node] = field(default_factory=list)

    @property
    def path(self) -> tuple[int, ...]:
        """The tokens after the root on the path on which the node was drafted."""
        return () if self.parent is None else (*self.parent.path, self.token)

    @property
    def survival(self) -> np.float32:
        """The product of the conditional probabilities on the path from the root."""
        return np.float32(1) if self.parent is None else self.parent.survival * self.prob

    @property
    def ancestors(self) -> list[Node]:
        """The nodes on the drafted path, including the node itself and the root."""
        return [self] if self.parent is None else [self, *self.parent.ancestors]

    def leads_to(self) -> list[Node]:
        """The nodes that a walk can reach from here in one step."""
        return self.children if self.merged is None else [self.merged]


def read_graph(graphs: GraphBatch, row: int) -> list[Node]:
    """The nodes of a graph in order of creation. Also checks the lists of children."""
    nodes: list[Node] = []
    for index in range(graphs.size[row]):
        parent = int(graphs.parent[row, index])
        assert parent < index
        assert (parent == NONE) == (index == 0)
        above = None if index == 0 else nodes[parent]
        node = Node(index, int(graphs.token[row, index]), graphs.prob[row, index], above)
        nodes.append(node)
        if above is not None:
            above.children.append(node)
    for node in nodes:
        if (target := int(graphs.merged[row, node.index])) != NONE:
            node.merged = nodes[target]
        listed = []
        child = int(graphs.first_child[row, node.index])
        while child != NONE:
            listed.append(child)
            child = int(graphs.next_sibling[row, child])
        assert listed == [c.index for c in node.children]
    return nodes


def can_reach(start: Node, goal: Node) -> bool:
    """Whether a walk from ``start`` can reach ``goal``."""
    seen: set[int] = set()

    def search(node: Node) -> bool:
        if node is goal:
            return True
        if node.index in seen:
            return False
        seen.add(node.index)
        return any(search(following) for following in node.leads_to())

    return search(start)


def has_cycle(nodes: list[Node]) -> bool:
    """Whether some node can be reached from itself."""
    return any(can_reach(following, node) for node in nodes for following in node.leads_to())


# --- the unrolled graph -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A path of the graph."""

    tokens: tuple[int, ...]
    survival: np.float32
    node: Node
    via_merge: bool


def unrolled(root: Node, max_depth: int) -> list[Place]:
    """All paths of a graph with at most ``max_depth`` tokens, also across merged edges."""
    return list(_below(root, (), np.float32(1), False, max_depth))


def _below(node, tokens, survival, crossed, max_depth) -> Iterator[Place]:
    if len(tokens) == max_depth:
        return
    if node.merged is not None:
        node, crossed = node.merged, True
    for child in node.children:
        text, likelihood = (*tokens, child.token), survival * child.prob
        yield Place(text, likelihood, child, crossed or child.merged is not None)
        yield from _below(child, text, likelihood, crossed, max_depth)


# --- growth -----------------------------------------------------------------------------------------


def path_tokens(trees: FlatTrees, row: int, place: int) -> list[int]:
    """Tokens of the path from the root, exclusive, to ``place``."""
    path: list[int] = []
    while place != 0:
        path.append(int(trees.token[row, place]))
        place = int(trees.parent[row, place])
    return path[::-1]


def random_draft(seed: int, vocab: int, sharpness: float, memory: int | None = None) -> Draft:
    """A random model: float32 probabilities that depend on the text, or only on its last ``memory`` tokens."""

    @functools.cache
    def by_text(text: tuple[int, ...]) -> np.ndarray:
        logits = np.random.default_rng([seed, *text]).normal(size=vocab) * sharpness
        weights = np.exp(logits - logits.max())
        return (weights / weights.sum()).astype(np.float32)

    return lambda text: by_text(text if memory is None else text[-memory:])


def candidates(draft: Draft, text: tuple[int, ...], top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``top_k`` most probable next tokens and their probabilities, best first."""
    probs = draft(text)
    tokens = np.argsort(-probs, kind="stable")[:top_k]
    return tokens.astype(np.int64), probs[tokens]


@dataclass(frozen=True)
class Limits:
    """The options of growth, as in gsd.json."""

    num_nodes: int = 8
    max_depth: int = 3
    top_k: int = 2
    theta_prob: float = 0.0
    theta_sib: float = 0.0
    merge_ngram: int = 0

    @property
    def capacity(self) -> int:
        """Capacity of a graph, computed as the proposer does."""
        return 1 + min(2048, self.num_nodes * self.top_k * (self.max_depth + 1))


def text_of(graphs: GraphBatch, row: int, committed: tuple[int, ...], node: int) -> tuple[int, ...]:
    """The committed text followed by the drafted path to ``node``."""
    path = []
    while node != 0:
        path.append(int(graphs.token[row, node]))
        node = int(graphs.parent[row, node])
    return committed + tuple(path[::-1])


def grow(
    draft: Draft,
    committed: list[tuple[int, ...]],
    limits: list[Limits] | Limits,
    room: int = 10**6,
    capacity: int | None = None,
    on_counts: Callable | None = None,
    on_frontier: Callable | None = None,
) -> GraphBatch:
    """Grow a graph for every committed text with the specification's own functions.

    Args:
        limits: one for all requests, or a list in which only ``num_nodes`` may differ.
        on_counts: called with (graphs, the result of ``add_candidates``) after candidates were added.
        on_frontier: called with (graphs, first_new, frontier, frontier_len) after each choice of a frontier.
    """
    each = limits if isinstance(limits, list) else [limits] * len(committed)
    common = each[0]
    graphs = new_graphs(len(committed), capacity or max(limit.capacity for limit in each))
    for row, text in enumerate(committed):
        reset(graphs, row, np.array(text, np.int64))
    num_nodes = np.array([limit.num_nodes for limit in each], np.int32)
    merge_ngram = np.full(len(committed), common.merge_ngram, np.int32)
    frontier = np.zeros((len(committed), max(limit.num_nodes for limit in each)), np.int32)
    frontier_len = np.ones(len(committed), np.int32)
    used = np.zeros(len(committed), np.int32)
    for level in range(1, common.max_depth + 1):
        first_new = graphs.size.copy()
        rows = [
            candidates(draft, text_of(graphs, row, text, int(node)), common.top_k)
            for row, text in enumerate(committed)
            for node in frontier[row, : frontier_len[row]]
        ]
        if not rows:
            break
        tokens, probs = np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])
        counts = add_candidates(graphs, frontier, frontier_len, tokens, probs, num_nodes, common.theta_sib, merge_ngram)
        if on_counts:
            on_counts(graphs, counts)
        if level == common.max_depth:
            break
        room_now = (room - used).astype(np.int32)
        theta_prob = np.float32(common.theta_prob)
        next_frontier(graphs, first_new, num_nodes, room_now, theta_prob, frontier, frontier_len)
        used += frontier_len
        if on_frontier:
            on_frontier(graphs, first_new, frontier, frontier_len)
    return graphs
