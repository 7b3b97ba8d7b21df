"""Hypotheses from texts: what followed the request's last tokens when they occurred before, in its own or in others."""

import numpy as np

from vllm_gsd.method.compiled import compiled
from vllm_gsd.method.graph import NONE, ORIGIN_NGRAM, add_child, agree, find_child, insert_path

# Longest suffix of the text that is compared; beyond it a match is as sure as it gets.
MAX_MATCH = 16
# Chance that a copied token is right, by the number of tokens that matched before it: measured on answers of
# SmolLM2-135M (docs/experiments, 2026-11-22-07). Only the ranking of hypotheses depends on it, never what is accepted.
# The last one is that of all longer matches together.
MATCH_PROB = np.array(
    [
        *(0.0, 0.2, 0.5, 0.58, 0.67, 0.74, 0.78, 0.81, 0.84),
        *(0.87, 0.88, 0.89, 0.9, 0.91, 0.92, 0.93, 0.97),
    ],
    np.float32,
)


@compiled
def longest_matches(text, length, min_match, starts, matched):
    """Find the earlier occurrences of the text's longest suffixes.

    Args:
        text: int64 [>= length], tokens of the request.
        length: tokens in use.
        min_match: shortest suffix that counts.
        starts, matched: outputs, int32 [k]: where the continuation of the j-th best occurrence begins and how many
            tokens matched before it. Longer matches first, later ones first among equals.

    Returns:
        int, occurrences found (at most k).
    """
    count = 0
    limit = len(starts)
    last = text[length - 1]
    for end in range(length - 2, -1, -1):
        if text[end] != last:
            continue
        size = 1
        while size < MAX_MATCH and end - size >= 0 and text[end - size] == text[length - 1 - size]:
            size += 1
        if size < min_match or (count == limit and matched[count - 1] >= size):
            continue
        place = min(count, limit - 1)
        while place > 0 and matched[place - 1] < size:
            starts[place], matched[place] = starts[place - 1], matched[place - 1]
            place -= 1
        starts[place], matched[place] = end + 1, size
        count = min(count + 1, limit)
        if count == limit and matched[count - 1] == MAX_MATCH:
            break
    return count


@compiled
def graft_ngrams(graphs, row, text, length, max_matches, max_depth, min_match):
    """Insert continuations of earlier occurrences of the text's suffix into a graph.

    Args:
        graphs, row: GraphBatch and the graph in it.
        text: int64 [>= length], the request's committed tokens; ``text[length - 1]`` is the graph's root.
        max_matches: most occurrences to use (the out-degree of the root they can cause).
        max_depth: most tokens copied from each.
        min_match: shortest suffix that counts as an occurrence.

    Returns:
        int, hypotheses inserted.
    """
    starts = np.empty(max_matches, np.int32)
    matched = np.zeros(max_matches, np.int32)
    count = longest_matches(text, length, min_match, starts, matched)
    for j in range(count):
        depth = min(max_depth, length - starts[j])
        probs = np.empty(depth, np.float32)
        for i in range(depth):
            probs[i] = MATCH_PROB[min(MAX_MATCH, matched[j] + i)]
        insert_path(graphs, row, text[starts[j] : starts[j] + depth], probs, ORIGIN_NGRAM)
    return count


@compiled
def graft_all_ngrams(graphs, token_ids, lines, length, chosen, max_matches, max_depth, min_match):
    """``graft_ngrams`` for a batch.

    Args:
        token_ids, lines, length: as of ``reset_all``.
        chosen: bool [num_graphs], graphs to graft to; max_depth: int64 [num_graphs].
    """
    for row in np.flatnonzero(chosen):
        graft_ngrams(graphs, row, token_ids[lines[row]], length[row], max_matches, max_depth[row], min_match)


@compiled
def graft_tree(graphs, row, tokens, parents, shares, matched, origin):
    """Insert what a suffix tree knows to have followed the text; nodes that exist already are shared, not repeated.

    Args:
        graphs, row: GraphBatch and the graph in it.
        tokens, parents: int64 / int32 [n], token of each node and place of its parent in the list, NONE for children of
            the root; parents come first.
        shares: float32 [n], of the occurrences of the suffix, how many went on along the node's whole path.
        matched: tokens that matched; a continuation is as sure as an n-gram's of the own text.
        origin: ORIGIN_* of the nodes.
    """
    nodes = np.full(len(tokens), NONE, np.int32)
    for i in range(len(tokens)):
        above, before = 0, np.float32(1.0)
        if parents[i] != NONE:
            above, before = nodes[parents[i]], shares[parents[i]]
        if above == NONE:
            continue  # the graph was full
        sure = MATCH_PROB[min(MAX_MATCH, matched + graphs.depth[row, above])]
        prob = sure * shares[i] / before
        child = find_child(graphs, row, above, tokens[i])
        if child == NONE:
            child = add_child(graphs, row, above, tokens[i], prob, origin)
        else:
            agree(graphs, row, child, prob)
        if child != NONE:
            nodes[i] = child if graphs.merged[row, child] == NONE else graphs.merged[row, child]


__all__ = ["MAX_MATCH", "NONE", "graft_all_ngrams", "graft_ngrams", "graft_tree", "longest_matches"]
