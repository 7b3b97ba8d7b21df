"""Lattices: token graphs from drafts that predict a whole block of tokens in one forward (DFlash, DFlash2, DSpark).

Such a draft gives each depth its own candidates. The probability of a candidate depends on the candidate at the depth
before and on nothing else. So a candidate is one node, whatever path leads to it: the draft's distribution is itself a
merged token graph (Gong et al. 2024, section 3), and merging loses nothing. The best edge into a candidate is its
native node; the others are merged edges, each with its own probability.
"""

from collections.abc import Callable

import numpy as np

from vllm_gsd.method.constants import NONE, ORIGIN_DRAFT
from vllm_gsd.method.graph import GraphBatch, add_child
from vllm_gsd.method.growth import survival_floor


def choose_candidates(
    log_probs: Callable[[int, np.ndarray | None], np.ndarray], depth: int, k: int, merge: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the k candidates of each depth for one request.

    The first candidate is the most probable one after the first candidate before it, so the first candidates are the
    chain that the draft proposes greedily. The others are those that the most probable path reaches (Viterbi 1967).

    Args:
        log_probs: called with a depth from 0 and the places chosen at the depth before, int64 [k], or None at depth 0.
            Returns the log-probability of every token of the depth's pool after each of them, float32
            [k or 1, pool >= k]. Each row of probabilities adds up to at most 1.
        depth: number of depths, at least 1.
        k: candidates of a depth, at least 1.
        merge: whether several paths may lead to a candidate. Without, all edges into it but the most probable path's
            get probability 0, and the lattice is a tree.

    Returns:
        the candidates' places in the pool, int64 [depth, k], and their conditional probabilities, float32
        [depth, k, k]: entry (d, p, c) is that of candidate c of depth d after candidate p of depth d - 1. At depth 0
        all p hold the same.
    """
    places, probs = np.empty((depth, k), np.int64), np.empty((depth, k, k), np.float32)
    best = np.zeros(1, np.float32)  # log-probability of the best path to each candidate of the depth before
    for level in range(depth):
        given = log_probs(level, None if level == 0 else places[level - 1])
        places[level], probs[level], best = best_paths(given, best, k, merge)
    return places, probs


def best_paths(
    log_probs: np.ndarray, best: np.ndarray, k: int, merge: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Choose the k candidates of one depth.

    Args:
        log_probs: float32 [k or 1, pool >= k], as ``choose_candidates`` asks for them; 1 row if all are the same.
        best: float32 [k], log-probability of the best path to each candidate of the depth before; [1] for the root.

    Returns:
        the candidates' places in the pool, int64 [k], their conditional probabilities, float32 [k, k], and the
        log-probabilities of the best paths to them, float32 [k].
    """
    paths = (best[:, None] + log_probs).max(axis=0)
    order = paths.copy()
    order[log_probs[0].argmax()] = np.inf
    chosen = np.argsort(-order, kind="stable")[:k]
    edges = log_probs[:, chosen]
    probs = np.broadcast_to(np.exp(edges), (k, k))
    if not merge and len(best) > 1:
        probs = probs * (np.arange(k)[:, None] == (best[:, None] + edges).argmax(axis=0))
    return chosen, probs, paths[chosen]


def add_lattices(
    graphs: GraphBatch,
    drafted: np.ndarray,
    tokens: np.ndarray,
    probs: np.ndarray,
    num_nodes: np.ndarray,
    max_depth: np.ndarray,
    theta_sib: float,
    theta_prob: float | np.float32,
) -> tuple[int, int, int]:
    """Add the candidates of drafted blocks to graphs that hold only their roots.

    Pruning is that of level-wise growth (``growth``); the survival of a candidate is that of the best path to it.

    Args:
        drafted: bool [num_graphs], the graphs with a block.
        tokens: int64 [sum(drafted), depth, k], the candidates of each depth, different ones; negative for none.
        probs: float32 [sum(drafted), depth, k, k], as ``choose_candidates`` gives them.
        num_nodes: int32 [num_graphs], node budget of each request, at least 1.
        max_depth: int32 [num_graphs], greatest depth of a node.
        theta_sib: an edge below ``theta_sib`` times its best sibling is dropped.
        theta_prob: survival below which a candidate has no children.

    Returns:
        edges added (including merged edges), those of them that are merged edges, and edges dropped.
    """
    counts = np.zeros(3, np.int64)
    for line, row in enumerate(np.flatnonzero(drafted)):
        above = np.zeros(1, np.int64)  # node of each candidate of the depth before, NONE for none
        for depth in range(min(tokens.shape[1], max_depth[row])):
            level = tokens[line, depth]
            floor = survival_floor(graphs, row, num_nodes[row])
            parents = [
                (place, node)
                for place, node in enumerate(above.tolist())
                if node != NONE and graphs.survival[row, node] >= max(floor, np.float32(theta_prob))
            ]
            edges, dropped = _edges(graphs, row, parents, level, probs[line, depth], floor, theta_sib)
            above, added, merged, full = _add_edges(graphs, row, edges, level)
            counts += added, merged, dropped + full
    return int(counts[0]), int(counts[1]), int(counts[2])


Edge = tuple[int, int, np.float32]  # parent node, candidate, conditional probability


def _edges(
    graphs: GraphBatch,
    row: int,
    parents: list[tuple[int, int]],
    tokens: np.ndarray,
    probs: np.ndarray,
    floor: np.float32,
    theta_sib: float,
) -> tuple[list[Edge], int]:
    """The edges below the parents, pairs of place and node, that pruning leaves, and the number that it drops."""
    edges: list[Edge] = []
    dropped = 0
    candidates = np.flatnonzero(tokens >= 0)
    for place, parent in parents:
        weakest = np.float32(theta_sib) * np.fmax.reduce(probs[place, candidates], initial=np.float32(0.0))
        for candidate in candidates:
            prob = probs[place, candidate]
            if prob >= weakest and graphs.survival[row, parent] * prob > floor:
                edges.append((int(parent), int(candidate), prob))
            else:
                dropped += 1
    return edges, dropped


def _add_edges(graphs: GraphBatch, row: int, edges: list[Edge], tokens: np.ndarray) -> tuple[np.ndarray, int, int, int]:
    """Add edges as nodes: first the best edge into each candidate, then merged edges to these.

    Returns:
        the node of each candidate, int64 [k], NONE for none; edges added; merged edges; edges for which the graph has
        no room.
    """
    best: dict[int, Edge] = {}
    for edge in edges:
        parent, candidate, prob = edge
        known = best.get(candidate)
        if known is None or graphs.survival[row, parent] * prob > graphs.survival[row, known[0]] * known[2]:
            best[candidate] = edge
    nodes = np.full(len(tokens), NONE, np.int64)
    added = merged = 0
    for candidate in sorted(best):
        parent, _, prob = best[candidate]
        nodes[candidate] = add_child(graphs, row, parent, tokens[candidate], prob, ORIGIN_DRAFT)
        added += nodes[candidate] != NONE
    for edge in edges:
        parent, candidate, prob = edge
        if edge == best[candidate] or nodes[candidate] == NONE:
            continue
        node = add_child(graphs, row, parent, tokens[candidate], prob, ORIGIN_DRAFT)
        if node != NONE:
            graphs.merged[row, node] = nodes[candidate]
            added, merged = added + 1, merged + 1
    return nodes, added, merged, len(edges) - added
