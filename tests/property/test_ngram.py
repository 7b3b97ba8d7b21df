"""N-gram hypotheses, compared with a naive search.

- ``longest_matches`` finds the same occurrences in the same order as a search that compares every suffix.
- ``graft_ngrams`` adds exactly the texts that followed these occurrences; common beginnings share nodes.
- In a graph that was already grown, also with merged edges, no node is moved or repeated, and every continuation is a
  path of the graph. Drafted nodes that a copy repeats only become more probable.
- A full graph takes what fits and stays sound.
"""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference_graph import Limits, grow, has_cycle, random_draft, read_graph, unrolled

from vllm_gsd.method.constants import MATCH_PROB, MAX_MATCH, ORIGIN_AGREED, ORIGIN_DRAFT, ORIGIN_NGRAM
from vllm_gsd.method.graph import add_child, new_graphs, reset
from vllm_gsd.method.ngram import graft_all_ngrams, graft_ngrams, longest_matches, match_prob

SETTINGS = settings(derandomize=True, deadline=None, max_examples=200)

# Texts with few different tokens or repeated phrases, so that there is something to find.
RANDOM = st.lists(st.integers(0, 3), min_size=1, max_size=30)
REPEATED = st.builds(
    lambda phrase, times, noise: (phrase * times + noise + phrase)[-40:],
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.integers(1, 5),
    st.lists(st.integers(0, 5), max_size=3),
)
TEXT = RANDOM | REPEATED
MIN_MATCH = st.integers(1, 4)


def naive_matches(text, count, min_match):
    """Matches as (start of the continuation, matched tokens): longest first, then latest first."""
    matches = []
    for start in range(1, len(text)):
        before, size = text[:start], 0
        while size < min(start, MAX_MATCH) and before[-size - 1] == text[-size - 1]:
            size += 1
        if size >= max(1, min_match):
            matches.append((start, size))
    return sorted(matches, key=lambda match: (-match[1], -match[0]))[:count]


@SETTINGS
@given(TEXT, st.integers(1, 5), MIN_MATCH)
@example([1] * 30, 3, 2)
@example([1, 2] * 12, 5, 1)
@example([7], 2, 1)
def test_longest_matches(text, count, min_match):
    assert longest_matches(np.array(text, np.int32), min_match, count) == naive_matches(text, count, min_match)


def continuations(text, count, max_depth, min_match):
    """The copied tokens and their probabilities, for each hypothesis."""
    for start, size in naive_matches(text, count, min_match):
        copied = tuple(text[start : start + max_depth])
        yield copied, [match_prob(size + i) for i in range(len(copied))]


@SETTINGS
@given(TEXT, st.integers(1, 4), st.integers(1, 6), MIN_MATCH)
def test_grafts_are_what_followed(text, count, max_depth, min_match):
    graphs = new_graphs(1, 64)
    reset(graphs, 0, np.array(text, np.int64))
    used = graft_ngrams(graphs, 0, np.array(text, np.int32), count, max_depth, min_match)
    hypotheses = list(continuations(text, count, max_depth, min_match))
    assert used == len(hypotheses)

    expected: dict[tuple[int, ...], np.float32] = {}
    for copied, probs in hypotheses:
        for end in range(1, len(copied) + 1):
            if copied[:end] in expected:  # the longest match determines the probability
                continue
            siblings = [prob for path, prob in expected.items() if len(path) == end and path[:-1] == copied[: end - 1]]
            surest = max(siblings, default=np.float32(0))
            expected[copied[:end]] = probs[end - 1] * (np.float32(1) - surest)
    nodes = read_graph(graphs, 0)
    # Hypotheses share the nodes of common beginnings.
    assert len(nodes) - 1 == len(expected)
    assert {node.path: node.prob for node in nodes[1:]} == expected
    assert set(graphs.origin[0, 1 : len(nodes)].tolist()) <= {ORIGIN_NGRAM}
    for node in nodes:
        assert graphs.survival[0, node.index] == node.survival
    # Put simply, every path occurs in the text after an earlier occurrence of its last token.
    for node in nodes[1:]:
        ngram = [text[-1], *node.path]
        assert any(text[i : i + len(ngram)] == ngram for i in range(len(text)))


@SETTINGS
@given(TEXT, st.integers(0, 10**6), st.integers(0, 2), st.integers(1, 6))
def test_grafts_on_a_grown_graph(text, seed, merge_ngram, max_depth):
    limit = Limits(12, 4, 2, 0.0, 0.0, merge_ngram)
    graphs = grow(random_draft(seed, 4, 1.0, 2), [tuple(text)], limit)
    before = read_graph(graphs, 0)
    graft_ngrams(graphs, 0, np.array(text, np.int32), 3, max_depth, 1)
    after = read_graph(graphs, 0)

    def facts(node):
        return node.path, node.merged.path if node.merged else None

    assert [facts(node) for node in after[: len(before)]] == [facts(node) for node in before]
    for old, new in zip(before, after, strict=False):  # a copy only raises the probability of a drafted node
        agreed = graphs.origin[0, old.index] == ORIGIN_AGREED
        assert old.prob < new.prob <= 1 or old.prob == 1 if agreed else new.prob == old.prob
    assert set(graphs.origin[0, 1 : len(before)].tolist()) <= {ORIGIN_DRAFT, ORIGIN_AGREED}
    assert set(graphs.origin[0, len(before) : len(after)].tolist()) <= {ORIGIN_NGRAM}
    for node in after:
        tokens = [child.token for child in node.children]
        assert len(set(tokens)) == len(tokens)
        assert node.merged is None or not node.children  # the children of a merged edge are its target's
    assert not has_cycle(after)
    paths = {place.tokens for place in unrolled(after[0], max_depth)}
    for copied, _ in continuations(text, 3, max_depth, 1):
        assert copied in paths


@SETTINGS
@given(TEXT, st.integers(1, 8))
def test_grafts_on_a_full_graph(text, capacity):
    graphs = new_graphs(1, capacity)
    reset(graphs, 0, np.array(text, np.int64))
    graft_ngrams(graphs, 0, np.array(text, np.int32), 4, 6, 1)
    nodes = read_graph(graphs, 0)
    assert len(nodes) <= capacity
    wanted = {c[:end] for c, _ in continuations(text, 4, 6, 1) for end in range(1, len(c) + 1)}
    assert {node.path for node in nodes[1:]} <= wanted
    assert len(nodes) == min(capacity, 1 + len(wanted))


def test_grafts_go_through_merged_edges():
    # "1" continues as "2", whose child is 3, so the start of the copied text 1 3 4 is already in the graph.
    graphs = new_graphs(1, 16)
    text = [9, 1, 3, 4, 9]
    reset(graphs, 0, np.array(text, np.int64))
    two = add_child(graphs, 0, 0, 2, np.float32(0.5), ORIGIN_DRAFT)
    add_child(graphs, 0, two, 3, np.float32(0.5), ORIGIN_DRAFT)
    edge = add_child(graphs, 0, 0, 1, np.float32(0.5), ORIGIN_DRAFT)
    graphs.merged[0, edge] = two
    assert graft_ngrams(graphs, 0, np.array(text, np.int32), 4, 3, 1) == 1
    nodes = read_graph(graphs, 0)
    assert [node.path for node in nodes[4:]] == [(2, 3, 4)]
    assert (1, 3, 4) in {place.tokens for place in unrolled(nodes[0], 3)}
    # Draft and copy agree on 1 and 3: such a node is wrong only if both are wrong.
    assert graphs.origin[0, : len(nodes)].tolist()[1:] == [ORIGIN_DRAFT, ORIGIN_AGREED, ORIGIN_AGREED, ORIGIN_NGRAM]
    assert [node.prob for node in nodes[2:4]] == pytest.approx([1 - 0.5 * (1 - MATCH_PROB[i]) for i in (2, 1)])


@pytest.mark.parametrize("length", [1, 2, 5])
def test_only_the_text_in_use_is_read(length):
    # Tokens beyond ``length`` belong to an earlier request and must not be found or copied.
    text = [3, 3, 1, 3, 3, 1, 3, 3, 1]
    graphs = new_graphs(1, 64)
    reset(graphs, 0, np.array(text[:length], np.int64))
    rows, used = np.array([text], np.int32), np.array([length])
    graft_all_ngrams(graphs, rows, np.zeros(1, np.int64), used, used > 0, 4, np.array([6]), 1)
    expected = {c[:end] for c, _ in continuations(text[:length], 4, 6, 1) for end in range(1, len(c) + 1)}
    assert {node.path for node in read_graph(graphs, 0)[1:]} == expected
