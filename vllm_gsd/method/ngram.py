"""Hypotheses from texts: what followed the request's last tokens when they occurred before, in its own or in others."""

import numpy as np

from vllm_gsd.method.constants import MATCH_PROB, MAX_MATCH, NONE, ORIGIN_AGREED, ORIGIN_DRAFT, ORIGIN_NGRAM
from vllm_gsd.method.graph import GraphBatch, add_child, beyond, children, find_child

_ONE = np.float32(1.0)


def match_prob(matched: int) -> np.float32:
    """Chance that a token is right that was copied from behind ``matched`` tokens that agree."""
    return np.float32(MATCH_PROB[min(MAX_MATCH, matched)])


def longest_matches(text: np.ndarray, min_match: int, most: int) -> list[tuple[int, int]]:
    """Find the earlier occurrences of a text's longest suffixes.

    Args:
        text: int [n >= 1], tokens of the request.
        min_match: shortest suffix that counts, at least 1; most: occurrences wanted.

    Returns:
        where the continuation of each of the best occurrences begins and how many tokens matched before it. Longer
        matches come first, later ones first among equals.
    """
    last = text[-1]
    starts = 1 + np.flatnonzero(text[:-1] == last)[::-1]
    found = [(int(start), common_suffix(text[:start], text)) for start in starts]
    return sorted((match for match in found if match[1] >= min_match), key=lambda match: -match[1])[:most]


def common_suffix(one: np.ndarray, other: np.ndarray) -> int:
    """How many last tokens two texts share, MAX_MATCH at most."""
    compared = min(MAX_MATCH, len(one), len(other))
    differ = np.flatnonzero(one[::-1][:compared] != other[::-1][:compared])
    return int(differ[0]) if len(differ) else compared


def graft_ngrams(
    graphs: GraphBatch, row: int, text: np.ndarray, max_matches: int, max_depth: int, min_match: int
) -> int:
    """Insert continuations of earlier occurrences of the text's suffix into a graph.

    Args:
        graphs, row: GraphBatch and the graph in it.
        text: int [n], the request's committed tokens, the last of which is the graph's root.
        max_matches: most occurrences to use (the out-degree of the root they can cause).
        max_depth: most tokens copied from each.
        min_match: shortest suffix that counts as an occurrence.

    Returns:
        int, hypotheses inserted.
    """
    matches = longest_matches(text, min_match, max_matches)
    for start, matched in matches:
        node = 0
        for step, token in enumerate(text[start : start + max_depth]):
            prob = match_prob(matched + step)
            node = insert_copy(graphs, row, node, token, prob, prob * left_by_copies(graphs, row, node), ORIGIN_NGRAM)
            if node == NONE:
                break
    return len(matches)


def graft_all_ngrams(
    graphs: GraphBatch,
    token_ids: np.ndarray,
    lines: np.ndarray,
    length: np.ndarray,
    chosen: np.ndarray,
    max_matches: int,
    max_depth: np.ndarray,
    min_match: int,
) -> None:
    """``graft_ngrams`` for a batch.

    Args:
        token_ids, lines, length: as of ``reset_all``.
        chosen: bool [num_graphs], graphs to graft to; max_depth: int [num_graphs].
    """
    for row in np.flatnonzero(chosen):
        text = token_ids[lines[row], : length[row]]
        graft_ngrams(graphs, row, text, max_matches, max_depth[row], min_match)


def graft_tree(
    graphs: GraphBatch,
    row: int,
    tokens: np.ndarray,
    parents: np.ndarray,
    shares: np.ndarray,
    matched: int,
    origin: int,
) -> None:
    """Insert what a suffix tree knows to have followed the text; nodes that exist already are shared, not repeated.

    Args:
        graphs, row: GraphBatch and the graph in it.
        tokens, parents: int64 / int32 [n], token of each node and place of its parent in the list, NONE for children of
            the root; parents come first.
        shares: float32 [n], of the occurrences of the suffix, how many went on along the node's whole path.
        matched: tokens that matched; a continuation is as sure as an n-gram's of the own text.
        origin: ORIGIN_* of the nodes.
    """
    nodes: list[int] = []
    for token, parent, share in zip(tokens, parents, shares, strict=True):
        above, before = (0, _ONE) if parent == NONE else (nodes[parent], shares[parent])
        if above == NONE:  # the graph was full
            nodes.append(NONE)
            continue
        prob = match_prob(matched + graphs.depth[row, above]) * share / before
        nodes.append(insert_copy(graphs, row, above, token, prob, prob, origin))


def insert_copy(
    graphs: GraphBatch, row: int, parent: int, token: int, prob: np.float32, alone: np.float32, origin: int
) -> int:
    """A text suggests ``token`` below ``parent``: agree with the child that carries it, or add one.

    Args:
        prob: chance that the text is right; alone: that of a child that no other source proposed.

    Returns:
        the node whose children come next, NONE when the graph is full.
    """
    child = find_child(graphs, row, parent, token)
    if child != NONE:
        agree(graphs, row, child, prob)
    else:
        child = add_child(graphs, row, parent, token, alone, origin)
    return NONE if child == NONE else beyond(graphs, row, child)


def agree(graphs: GraphBatch, row: int, node: int, prob: np.float32) -> None:
    """A text suggests, with that chance, a node that is there already.

    If the draft model has proposed it, the two are taken for independent: it is wrong only where both are. (Survival,
    which growing needed, stays as it was.)
    """
    if graphs.origin[row, node] == ORIGIN_DRAFT:
        before = graphs.prob[row, node]
        graphs.prob[row, node] = before + prob * (_ONE - before)
        graphs.origin[row, node] = ORIGIN_AGREED


def left_by_copies(graphs: GraphBatch, row: int, parent: int) -> np.float32:
    """Chance that the surest child copied from a text leaves to others."""
    copies = (child for child in children(graphs, row, parent) if graphs.origin[row, child] != ORIGIN_DRAFT)
    return min((_ONE - graphs.prob[row, child] for child in copies), default=_ONE)
