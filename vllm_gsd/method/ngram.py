"""Hypotheses from texts: what followed earlier occurrences of the request's last tokens, in its text or in others."""

from collections.abc import Sequence

import numpy as np

from vllm_gsd.method.constants import MATCH_PROB, MAX_MATCH, NONE, ORIGIN_AGREED, ORIGIN_DRAFT, ORIGIN_NGRAM
from vllm_gsd.method.graph import GraphBatch, add_child, beyond, children, find_child

_ONE = np.float32(1.0)


def match_prob(matched: int) -> np.float32:
    """Probability that a copied token is right if ``matched`` tokens before it agree."""
    return np.float32(MATCH_PROB[min(MAX_MATCH, matched)])


def longest_matches(text: np.ndarray, min_match: int, most: int) -> list[tuple[int, int]]:
    """Find earlier occurrences of a text's longest suffixes.

    Args:
        text: int [n >= 1], tokens of the request.
        min_match: length of the shortest suffix that counts, at least 1.

    Returns:
        for each of the best occurrences, the start of its continuation and the number of tokens that matched before it.
        Longer matches come first; among equal ones, later occurrences come first.
    """
    last = text[-1]
    starts = 1 + np.flatnonzero(text[:-1] == last)[::-1]
    found = [(int(start), common_suffix(text[:start], text)) for start in starts]
    return sorted((match for match in found if match[1] >= min_match), key=lambda match: -match[1])[:most]


def common_suffix(one: np.ndarray, other: np.ndarray) -> int:
    """Number of last tokens that two texts share, at most MAX_MATCH."""
    compared = min(MAX_MATCH, len(one), len(other))
    differ = np.flatnonzero(one[::-1][:compared] != other[::-1][:compared])
    return int(differ[0]) if len(differ) else compared


def graft_ngrams(
    graphs: GraphBatch, row: int, text: np.ndarray, max_matches: int, max_depth: int, min_match: int
) -> int:
    """Insert continuations of earlier occurrences of the text's suffix into a graph.

    Args:
        text: int [n], the request's committed tokens; the last one is the graph's root.
        max_depth: maximum number of tokens copied from each.
        min_match: length of the shortest suffix that counts.

    Returns:
        number of hypotheses inserted.
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
    """``graft_ngrams`` for the graphs of a batch.

    Args:
        token_ids, lines, length: as for ``reset_all``.
        chosen: bool [num_graphs], graphs to graft onto; max_depth: int [num_graphs].
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
    since: Sequence[int] = (),
) -> None:
    """Insert the continuations that a suffix tree holds; existing nodes are shared.

    Args:
        tokens, parents: int64 and int32 [places], token of each node and place of its parent. Place 0 is the root, with
            any token and the parent NONE; parents come first.
        shares: float32 [places], share of the suffix's occurrences that continue along the node's whole path; 1 for the
            root.
        matched: number of tokens that matched; a continuation is as sure as that of an n-gram in the request's own
            text.
        origin: ORIGIN_* of the nodes.
        since: tokens that the text has got since the look-up, on the device only. What continues the node that they
            lead to is inserted, and nothing if they leave the tree.
    """
    reached = 0
    for token in since:
        found = np.flatnonzero((parents == reached) & (tokens == token))
        if not len(found):
            return
        reached = int(found[0])
    nodes = {reached: 0}
    for place, (token, parent, share) in enumerate(zip(tokens, parents, shares, strict=True)):
        if parent not in nodes:  # elsewhere, or the graph is full
            continue
        above = nodes[parent]
        prob = match_prob(matched + len(since) + graphs.depth[row, above]) * share / shares[parent]
        if (node := insert_copy(graphs, row, above, token, prob, prob, origin)) != NONE:
            nodes[place] = node


def insert_copy(
    graphs: GraphBatch, row: int, parent: int, token: int, prob: np.float32, alone: np.float32, origin: int
) -> int:
    """Insert a text's suggestion of ``token`` below ``parent``: agree with the child that carries it, or add one.

    Args:
        prob: probability that the text is right.
        alone: probability of the child if no other source has proposed it.

    Returns:
        the node whose children come next, or NONE if the graph is full.
    """
    child = find_child(graphs, row, parent, token)
    if child != NONE:
        agree(graphs, row, child, prob)
    else:
        child = add_child(graphs, row, parent, token, alone, origin)
    return NONE if child == NONE else beyond(graphs, row, child)


def agree(graphs: GraphBatch, row: int, node: int, prob: np.float32) -> None:
    """Raise the probability of an existing node that a text suggests too, with probability ``prob``.

    If the draft model proposed the node, both proposals count as independent: the node is wrong only if both are wrong.
    Survival stays unchanged, as only growth uses it.
    """
    if graphs.origin[row, node] == ORIGIN_DRAFT:
        before = graphs.prob[row, node]
        graphs.prob[row, node] = before + prob * (_ONE - before)
        graphs.origin[row, node] = ORIGIN_AGREED


def left_by_copies(graphs: GraphBatch, row: int, parent: int) -> np.float32:
    """Probability that the surest copied child leaves to its siblings."""
    copies = (child for child in children(graphs, row, parent) if graphs.origin[row, child] != ORIGIN_DRAFT)
    return min((_ONE - graphs.prob[row, child] for child in copies), default=_ONE)
