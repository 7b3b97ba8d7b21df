"""Lattices of drafted blocks, compared with brute force: the N most probable of all paths must be laid out.

Further tests cover the choice of candidates from larger pools, the draft's greedy chain, pruning, and full graphs.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_graph import has_cycle, path_tokens, read_graph

from vllm_gsd.method.constants import NONE
from vllm_gsd.method.flatten import flatten
from vllm_gsd.method.graph import new_graphs, reset
from vllm_gsd.method.lattice import add_lattices, choose_candidates

ONE = np.float32(1)
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))


def random_block(random, depth, k, tied=False):
    """Tokens and conditional probabilities of a random block; some candidates are missing."""
    tokens = np.stack([random.permutation(9)[:k] for _ in range(depth)])
    tokens[random.random(tokens.shape) < 0.05] = -1
    scores = random.choice([0.0, 1.0], (depth, k, k)) if tied else 2.0 * random.standard_normal((depth, k, k))
    weights = np.exp(scores)
    probs = weights / (weights.sum(-1, keepdims=True) + random.random((depth, k, 1)))
    return tokens, probs.astype(np.float32)


def all_paths(tokens, probs):
    """The survival of every path of a block, by its tokens."""
    depth, k = tokens.shape
    survivals = {}
    for length in range(1, depth + 1):
        for places in itertools.product(range(k), repeat=length):
            path, survival, before = [], ONE, 0
            for level, place in enumerate(places):
                path.append(int(tokens[level, place]))
                survival = survival * probs[level, before, place]
                before = place
            if min(path) >= 0:
                survivals[tuple(path)] = survival
    return survivals


def lattice(tokens, probs, num_nodes, capacity=512, max_depth=9, theta_sib=0.0, theta_prob=0.0):
    graphs = new_graphs(1, capacity)
    reset(graphs, 0, np.array([7]))
    limits = np.array([num_nodes], np.int32), np.array([max_depth], np.int32), theta_sib, theta_prob
    return graphs, add_lattices(graphs, np.ones(1, np.bool_), tokens[None], probs[None], *limits)


def laid_out(graphs, num_nodes, max_depth=9):
    trees = flatten(graphs, np.array([num_nodes], np.int32), np.array([max_depth], np.int32))
    return {tuple(path_tokens(trees, 0, i)): trees.survival[0, i] for i in range(1, 1 + trees.size[0])}


@given(SHAPES, st.integers(1, 40), st.booleans())
@settings(derandomize=True, deadline=None, max_examples=150)
def test_the_best_paths_of_all_are_laid_out(shape, num_nodes, tied):
    depth, k, seed = shape
    tokens, probs = random_block(np.random.default_rng(seed), depth, k, tied)
    graphs, (added, merged, _) = lattice(tokens, probs, num_nodes)
    known, got = all_paths(tokens, probs), laid_out(graphs, num_nodes)
    assert all(known[path] == survival for path, survival in got.items())
    best = sorted(known.values(), reverse=True)[:num_nodes]
    if tied:  # with ties, nodes may be missing, but only the worst ones
        assert sorted(got.values(), reverse=True) == best[: len(got)]
    else:
        assert sorted(got.values(), reverse=True) == best
    assert added == graphs.size[0] - 1 and merged == (graphs.merged[0, : graphs.size[0]] != NONE).sum()
    assert not has_cycle(read_graph(graphs, 0))


@given(SHAPES)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_a_candidate_is_one_node(shape):
    depth, k, seed = shape
    tokens, probs = random_block(np.random.default_rng(seed), depth, k)
    graphs, (_, _, pruned) = lattice(tokens, probs, 10_000, capacity=2_000)
    assert pruned == 0
    natives = [node for node in read_graph(graphs, 0)[1:] if node.merged is None]
    places = {(int(graphs.depth[0, node.index]), node.token) for node in natives}
    assert len(places) == len(natives)
    assert laid_out(graphs, 10_000).keys() == all_paths(tokens, probs).keys()


def test_limits():
    tokens, probs = random_block(np.random.default_rng(3), 4, 3)
    tokens = np.abs(tokens)
    assert max(map(len, laid_out(lattice(tokens, probs, 500, max_depth=2)[0], 500))) == 2
    graphs, _ = lattice(tokens, probs, 500, theta_prob=0.1)
    for node in read_graph(graphs, 0)[1:]:
        parent = node.parent
        assert parent.parent is None or parent.survival >= np.float32(0.1)
    graphs, (added, _, pruned) = lattice(tokens, probs, 500, theta_sib=0.9)
    assert added + pruned <= 3 + 3 * 9 and pruned > 0
    for node in read_graph(graphs, 0)[1:]:
        siblings = max(child.prob for child in node.parent.children)
        assert node.prob >= np.float32(0.9) * siblings
    graphs, (added, _, pruned) = lattice(tokens, probs, 500, capacity=6)
    assert added == 5 and graphs.size[0] == 6 and pruned > 0


@given(SHAPES, st.integers(0, 4))
@settings(derandomize=True, deadline=None, max_examples=80)
def test_choice_of_candidates(shape, more):
    depth, k, seed = shape
    pool = k + more
    scores = np.random.default_rng(seed).standard_normal((depth, pool, pool)).astype(np.float32)
    log_probs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))

    def after(level, places):
        return log_probs[level, [0] if places is None else places]

    places, probs = choose_candidates(after, depth, k)
    chain, before, paths = [], 0, {(): (np.float32(0), 0)}
    for level in range(depth):
        before = int(log_probs[level, before].argmax())
        chain.append(before)
        paths = {
            (*path, place): (total + log_probs[level, last, place], place)
            for path, (total, last) in paths.items()
            for place in range(pool)
        }
        best = [max(total for total, last in paths.values() if last == place) for place in range(pool)]
        # The other candidates are the most probable ones that the kept candidates can reach.
        assert len(set(places[level])) == k
        dropped = set(range(pool)) - set(places[level])
        if k > 1 and dropped:
            assert min(best[place] for place in places[level, 1:]) >= max(best[place] for place in dropped)
        paths = {path: (total, last) for path, (total, last) in paths.items() if last in places[level]}
        for above in range(k):
            given_above = log_probs[level, 0 if level == 0 else places[level - 1, above]]
            np.testing.assert_allclose(probs[level, above], np.exp(given_above[places[level]]), rtol=1e-6)
    assert places[:, 0].tolist() == chain


@given(SHAPES)
@settings(derandomize=True, deadline=None, max_examples=40)
def test_without_merging_the_lattice_is_a_tree(shape):
    """Every candidate keeps only the edge of the best path to it, and that path's survival."""
    depth, k, seed = shape
    scores = np.random.default_rng(seed).standard_normal((depth, k + 2, k + 2)).astype(np.float32)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))

    def after(level, places):
        return scores[level, [0] if places is None else places]

    def native(merge):
        graphs, (_, joined, _) = lattice(*choose_candidates(after, depth, k, merge), 500)
        nodes = [node for node in range(1, graphs.size[0]) if graphs.merged[0, node] == NONE]
        return joined, {(graphs.depth[0, node], graphs.token[0, node]): graphs.survival[0, node] for node in nodes}

    (joined, merged), (none, tree) = native(True), native(False)
    assert none == 0 and joined == (depth - 1) * k * (k - 1)
    assert tree.keys() == merged.keys()
    for key, survival in tree.items():
        np.testing.assert_allclose(survival, merged[key], rtol=1e-5)


def test_marginals_make_a_lattice_of_their_best_tokens():
    """Without edge scores, all rows of a depth are equal."""
    marginals = np.log(np.array([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3]], np.float32))
    places, probs = choose_candidates(lambda level, _: marginals[level : level + 1], 2, 2)
    assert places.tolist() == [[0, 2], [1, 2]]
    np.testing.assert_allclose(probs[1], [[0.6, 0.3]] * 2, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, 0.0])
def test_a_probability_that_is_none_adds_no_edge(bad):
    tokens, probs = np.array([[1, 2], [3, 4]]), np.full((2, 2, 2), 0.4, np.float32)
    probs[0, :, 1] = bad
    paths = laid_out(lattice(tokens, probs, 16)[0], 16)
    assert paths.keys() == {(1,), (1, 3), (1, 4)}
