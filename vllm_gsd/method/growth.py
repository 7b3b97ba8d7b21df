"""Level-wise growth: turn a draft model's candidates into nodes, choose which nodes to expand next.

Pruning (paper section 3.3): a sibling far below its best sibling is dropped (``theta_sib``), a node that
is unlikely to be reached is not expanded (``theta_prob``). Two bounds of our own keep the work O(nodes)
without changing the result: a node below the ``num_nodes`` best so far can't be verified, since
survival only falls along a path, so it is dropped; nor is a node expanded that is itself below them.
"""

from typing import NamedTuple

import numpy as np

from vllm_gsd.method.compiled import compiled, compiled_helper
from vllm_gsd.method.graph import NONE, ORIGIN_DRAFT, add_child, find_child
from vllm_gsd.method.merge import merge_target


class GrowthCounts(NamedTuple):
    """What a growth call did, summed over the batch."""

    added: int  # candidates that became nodes, merged edges included
    merged: int  # candidates that became merged edges
    pruned: int  # candidates dropped


@compiled_helper
def survival_floor(graphs, row, num_nodes):
    """Survival of the ``num_nodes``-th best node of a graph (0 while there are fewer)."""
    count = graphs.size[row] - 1
    if count < num_nodes:
        return np.float32(0.0)
    return np.sort(graphs.survival[row, 1 : count + 1])[count - num_nodes]


@compiled
def _add_candidates(graphs, frontier, frontier_len, tokens, probs, num_nodes, theta_sib, merge_ngram):
    added, merged, pruned = 0, 0, 0
    num_candidates = tokens.shape[1]
    line = 0
    for row in range(len(frontier_len)):
        floor = survival_floor(graphs, row, num_nodes[row])
        for place in range(frontier_len[row]):
            parent = frontier[row, place]
            best = probs[line, 0]
            for k in range(num_candidates):
                token, prob = tokens[line, k], probs[line, k]
                if token < 0:
                    continue
                if prob < theta_sib * best or graphs.survival[row, parent] * prob <= floor:
                    pruned += 1
                    continue
                if find_child(graphs, row, parent, token) != NONE:
                    continue  # another source put it there already
                target = merge_target(graphs, row, parent, token, merge_ngram[row])
                node = add_child(graphs, row, parent, token, prob, ORIGIN_DRAFT)
                if node == NONE:
                    pruned += 1
                    continue
                added += 1
                if target != NONE:
                    graphs.merged[row, node] = target
                    merged += 1
            line += 1
    return added, merged, pruned


def add_candidates(graphs, frontier, frontier_len, tokens, probs, num_nodes, theta_sib, merge_ngram) -> GrowthCounts:
    """Add the draft model's candidates below the frontier nodes.

    Args:
        graphs: GraphBatch of ``num_graphs`` graphs.
        frontier: int32 [num_graphs, width], nodes that were just drafted from.
        frontier_len: int32 [num_graphs], how many of them are in use.
        tokens: int64 [sum(frontier_len), k], candidates of each frontier node, best first; negative: none.
        probs: float32, same shape, conditional probabilities.
        num_nodes: int32 [num_graphs], node budget of each request.
        theta_sib: a candidate below ``theta_sib`` x its best sibling is dropped.
        merge_ngram: tokens that must agree for two nodes to be one; 0 turns merging off. One for all graphs, or
            int32 [num_graphs].
    """
    if not isinstance(merge_ngram, np.ndarray):
        merge_ngram = np.full(len(frontier_len), merge_ngram, np.int32)
    counts = _add_candidates(
        graphs, frontier, frontier_len, tokens, probs, num_nodes, np.float32(theta_sib), merge_ngram
    )
    return GrowthCounts(*counts)


@compiled
def next_frontier(graphs, first_new, num_nodes, room, theta_prob, frontier, frontier_len):
    """Choose the nodes to draft from next, best survival first, and write them to ``frontier``.

    Args:
        graphs: GraphBatch.
        first_new: int32 [num_graphs], nodes before this index were considered in an earlier level.
        num_nodes: int32 [num_graphs], node budget of each request.
        room: int32 [num_graphs], draft KV slots still free for each request.
        theta_prob: survival below which a node is not expanded.
        frontier, frontier_len: outputs, int32 [num_graphs, width] and [num_graphs].
    """
    for row in range(len(first_new)):
        floor = survival_floor(graphs, row, num_nodes[row])
        limit = min(room[row], frontier.shape[1])
        count = 0
        for node in range(first_new[row], graphs.size[row]):
            survival = graphs.survival[row, node]
            if graphs.merged[row, node] != NONE or survival < theta_prob or survival < floor:
                continue
            # Insert in order of survival, keeping the best ``limit``.
            place = min(count, limit)
            while place > 0 and graphs.survival[row, frontier[row, place - 1]] < survival:
                if place < limit:
                    frontier[row, place] = frontier[row, place - 1]
                place -= 1
            if place < limit:
                frontier[row, place] = node
                count = min(count + 1, limit)
        frontier_len[row] = count
