"""Merging of re-occurring n-grams (paper section 3.2): draft a continuation once, use it from several places."""

import numpy as np

from vllm_gsd.method.compiled import compiled_helper
from vllm_gsd.method.graph import NONE


@compiled_helper
def same_ngram(graphs, row, parent, token, node, length):
    """Whether the ``length`` tokens ending in ``token`` below ``parent`` equal those ending at ``node``.

    An n-gram that is longer than its path reaches back over the root into the committed context.
    """
    if graphs.token[row, node] != token:
        return False
    left, right = parent, graphs.parent[row, node]
    left_back, right_back = 0, 0  # how far each side has walked past the root
    for _ in range(length - 1):
        if left == right and left_back == right_back:
            return True  # the paths have met: everything before is the same text
        if left != NONE:
            left_token = graphs.token[row, left]
            left = graphs.parent[row, left]
        else:
            left_token = graphs.context[row, left_back] if left_back < graphs.context.shape[1] else NONE
            left_back += 1
        if right != NONE:
            right_token = graphs.token[row, right]
            right = graphs.parent[row, right]
        else:
            right_token = graphs.context[row, right_back] if right_back < graphs.context.shape[1] else NONE
            right_back += 1
        if left_token != right_token or left_token == NONE:
            return False
    return True


@compiled_helper
def reaches(graphs, row, start, goal):
    """Whether a walk down from ``start``, merged edges included, can arrive at ``goal``."""
    seen = np.zeros(graphs.size[row], np.bool_)
    stack = np.empty(graphs.size[row] + 1, np.int32)
    stack[0] = start
    seen[start] = True
    height = 1
    while height > 0:
        height -= 1
        node = stack[height]
        if node == goal:
            return True
        target = graphs.merged[row, node]
        if target != NONE:
            if not seen[target]:
                seen[target] = True
                stack[height] = target
                height += 1
            continue
        child = graphs.first_child[row, node]
        while child != NONE:
            if not seen[child]:
                seen[child] = True
                stack[height] = child
                height += 1
            child = graphs.next_sibling[row, child]
    return False


@compiled_helper
def merge_target(graphs, row, parent, token, length):
    """The native node that the candidate ``token`` below ``parent`` may continue as, or NONE.

    A node from which ``parent`` can be reached is refused, which keeps the graph acyclic; that covers the
    candidate's own path. The first match in drafting order wins: it is the one drafted furthest.
    """
    if length <= 0:
        return NONE
    for node in range(1, graphs.size[row]):
        if graphs.merged[row, node] != NONE or graphs.parent[row, node] == parent:
            continue
        if same_ngram(graphs, row, parent, token, node, length) and not reaches(graphs, row, node, parent):
            return node
    return NONE
