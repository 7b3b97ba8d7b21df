"""Level-wise growth: turn the draft model's candidates into nodes, and choose the nodes to expand next.

Pruning follows Gong et al. 2024, section 3.3: a candidate far below its best sibling is dropped (``theta_sib``), and a
node that is unlikely to be reached is not expanded (``theta_prob``). Two bounds of our own keep the work O(nodes):
candidates below the ``num_nodes`` best are dropped, and such nodes are not expanded. Without merging and calibration
this changes no result, because survival only falls along a path, so such a node cannot be verified. With them it may:
a merged edge can be a better path to a node, and calibration can rank it higher.
"""

import numpy as np

from vllm_gsd.method.constants import NONE, ORIGIN_DRAFT
from vllm_gsd.method.graph import GraphBatch, add_child, find_child
from vllm_gsd.method.merge import merge_target


def survival_floor(graphs: GraphBatch, row: int, num_nodes: int) -> np.float32:
    """Survival of a graph's ``num_nodes``-th best node; 0 if there are fewer nodes."""
    falling = np.sort(graphs.survival[row, 1 : graphs.size[row]])[::-1]
    return falling[num_nodes - 1] if num_nodes <= len(falling) else np.float32(0.0)


def add_candidates(
    graphs: GraphBatch,
    frontier: np.ndarray,
    frontier_len: np.ndarray,
    tokens: np.ndarray,
    probs: np.ndarray,
    num_nodes: np.ndarray,
    theta_sib: float,
    merge_ngram: np.ndarray,
) -> tuple[int, int, int]:
    """Add the draft model's candidates below the frontier nodes.

    Args:
        frontier: int32 [num_graphs, width], nodes that the draft model has just run.
        frontier_len: int32 [num_graphs], number of nodes in each frontier.
        tokens: int64 [sum(frontier_len), k], candidates of each frontier node, best first; negative for none.
        probs: float32 [sum(frontier_len), k], their conditional probabilities.
        num_nodes: int32 [num_graphs], node budget of each request, at least 1.
        theta_sib: a candidate below ``theta_sib`` times its best sibling is dropped.
        merge_ngram: int32 [num_graphs], length of the n-grams by which nodes merge; 0 turns merging off.

    Returns:
        candidates added (including merged edges), those of them that became merged edges, and candidates dropped.
    """
    added, merged, pruned = 0, 0, 0
    floor = [survival_floor(graphs, row, num_nodes[row]) for row in range(len(frontier_len))]
    for line, (row, parent) in enumerate(each_node(frontier, frontier_len)):
        weakest = np.float32(theta_sib) * probs[line, 0]
        for token, prob in zip(tokens[line], probs[line], strict=True):
            if token < 0:
                continue
            if prob < weakest or graphs.survival[row, parent] * prob <= floor[row]:
                pruned += 1
                continue
            if find_child(graphs, row, parent, token) != NONE:
                continue  # another source has already added it
            target = merge_target(graphs, row, parent, token, merge_ngram[row])
            node = add_child(graphs, row, parent, token, prob, ORIGIN_DRAFT)
            if node == NONE:
                pruned += 1
                continue
            graphs.merged[row, node] = target
            added += 1
            merged += target != NONE
    return added, merged, pruned


def next_frontier(
    graphs: GraphBatch,
    first_new: np.ndarray,
    num_nodes: np.ndarray,
    room: np.ndarray,
    theta_prob: float | np.float32,
    frontier: np.ndarray,
    frontier_len: np.ndarray,
) -> None:
    """Choose the nodes to expand next, best survival first, and write them to ``frontier``.

    Args:
        first_new: int32 [num_graphs], first node that no earlier level has considered.
        num_nodes: int32 [num_graphs], node budget of each request, at least 1.
        room: int32 [num_graphs], free draft KV slots of each request.
        theta_prob: survival below which a node is not expanded.
        frontier, frontier_len: outputs, int32 [num_graphs, width] and [num_graphs].
    """
    for row, first in enumerate(first_new):
        survival = graphs.survival[row]
        least = max(survival_floor(graphs, row, num_nodes[row]), np.float32(theta_prob))
        new = range(first, graphs.size[row])
        fit = [node for node in new if graphs.merged[row, node] == NONE and survival[node] >= least]
        limit = max(0, min(room[row], frontier.shape[1]))
        best = sorted(fit, key=lambda node: -survival[node])[:limit]
        frontier[row, : len(best)] = best
        frontier_len[row] = len(best)


def each_node(frontier: np.ndarray, frontier_len: np.ndarray) -> list[tuple[int, int]]:
    """Graph and node of each row of a forward over the frontier, graph by graph."""
    counts = enumerate(frontier_len.tolist())
    return [(row, node) for row, count in counts for node in frontier[row, :count].tolist()]
