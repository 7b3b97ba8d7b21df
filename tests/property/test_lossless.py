"""Exact enumeration shows that a verification step changes neither the target's distribution nor its greedy text.

Targets are random (float64, 3 to 5 tokens, some of them impossible). Graphs with merged edges are grown by the
specification from a random draft, some also with copied n-grams. Every outcome of a step is enumerated with its
probability; nothing is sampled. Up to 1e-12, one step followed by plain sampling, two steps in a row, and every cut of
the flattened list give the target's own distribution of sequences. Greedy steps give the greedy text. Two controls show
that the check notices wrong verification.
"""

import functools
import itertools

import numpy as np
import pytest
from reference_graph import Limits, grow, path_tokens, random_draft

from vllm_gsd.method.flatten import flatten
from vllm_gsd.method.lay_out import ancestor_masks
from vllm_gsd.method.ngram import graft_ngrams
from vllm_gsd.method.verify import step_into

EXACT = 1e-12
SEEDS = range(48)


# --- the target -------------------------------------------------------------------------------------


def random_target(seed: int, vocab: int, zeros: float):
    """A float64 distribution of the next token for each text. About a share ``zeros`` of tokens has probability 0."""

    @functools.cache
    def conditional(text: tuple[int, ...]) -> np.ndarray:
        random = np.random.default_rng([seed, 1, *text])
        weights = random.gamma(0.7, size=vocab)
        weights[(random.random(vocab) < zeros) & (weights < weights.max())] = 0.0
        return weights / weights.sum()

    return conditional


def sequences(target, context, length, starts):
    """The distribution of the first ``length`` tokens after ``context``: ``starts``, then plain sampling."""
    result: dict[tuple[int, ...], float] = {}

    def extend(text, prob):
        if len(text) >= length:
            result[text[:length]] = result.get(text[:length], 0.0) + prob
            return
        for token, chance in enumerate(target(context + text)):
            if chance > 0:
                extend((*text, token), prob * chance)

    for text, prob in starts.items():
        extend(text, prob)
    return result


def plain(target, context, length):
    return sequences(target, context, length, {(): 1.0})


def distance(left, right):
    return max(abs(left.get(text, 0.0) - right.get(text, 0.0)) for text in left.keys() | right.keys())


# --- a step -----------------------------------------------------------------------------------------


class Case:
    """A random target, draft and context, and limits of growth."""

    def __init__(self, seed: int, max_vocab: int = 5, max_depth: int = 3):
        random = np.random.default_rng([seed, 2])
        self.vocab = int(random.integers(3, max_vocab + 1))
        self.target = random_target(seed, self.vocab, zeros=random.choice([0.0, 0.3]))
        # A draft with a short memory repeats itself, so that n-grams recur.
        memory = int(random.integers(1, 3)) if seed % 2 else None
        self.draft = random_draft(seed, self.vocab, float(random.uniform(0.5, 2.0)), memory)
        self.context = tuple(random.integers(0, self.vocab, size=random.integers(1, 8)).tolist())
        self.ngrams = seed % 3 == 0
        self.limits = Limits(
            num_nodes=int(random.integers(4, 14)),
            max_depth=int(random.integers(2, max_depth + 1)),
            top_k=int(random.integers(2, min(4, self.vocab + 1))),
            theta_prob=float(random.choice([0.0, 0.1])),
            theta_sib=float(random.choice([0.0, 0.3])),
            merge_ngram=int(random.integers(1, 3)),
        )

    def propose(self, context):
        """The flattened list and the graph for a context."""
        graphs = grow(self.draft, [context], self.limits)
        if self.ngrams:
            graft_ngrams(graphs, 0, np.array(context, np.int32), 3, self.limits.max_depth, 1)
        num_nodes = np.array([self.limits.num_nodes], np.int32)
        trees = flatten(graphs, num_nodes, np.array([self.limits.max_depth], np.int32))
        return trees, graphs


class Rows:
    """The rows that a step verifies: the root, then the flattened list or its first ``cut`` nodes."""

    def __init__(self, trees, context, cut=None):
        rows = 1 + (int(trees.size[0]) if cut is None else cut)
        self.context = context
        self.token, self.parent = trees.token[0, :rows], trees.parent[0, :rows]
        assert self.token[0] == context[-1]
        self.starts = np.array([0, rows], np.int32)
        self.masks = np.zeros((rows, 1), np.int64)
        ancestor_masks(self.parent, self.starts, self.masks)

    def seen_from(self, place):
        """The tokens that the target sees at a place: the committed text and the rows that its mask allows."""
        bits = int(self.masks[place, 0])
        return self.context[:-1] + tuple(int(t) for j, t in enumerate(self.token) if bits >> j & 1)

    def step(self, place, token):
        """The place to which ``step_into`` moves, or None if the walk ends."""
        places, active = np.array([place], np.int32), np.array([True])
        step_into(self.token, self.parent, self.starts, places, np.array([token], np.int64), active)
        return int(places[0]) if active[0] else None


def outcomes(rows, conditional):
    """The probability of each text that a verification step can emit.

    Args:
        rows: the rows to verify.
        conditional: gives the distribution from which a place samples.
    """
    result: dict[tuple[int, ...], float] = {}

    def walk(place, emitted, prob):
        for token, chance in enumerate(conditional(place)):
            if chance == 0:
                continue
            following = rows.step(place, token)
            text = (*emitted, token)
            if following is not None:
                walk(following, text, prob * chance)
            else:
                assert text not in result
                result[text] = prob * chance

    walk(0, (), 1.0)
    return result


def step_outcomes(case, context, cut=None):
    rows = Rows(case.propose(context)[0], context, cut)
    return outcomes(rows, lambda place: case.target(rows.seen_from(place)))


# --- sampling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_one_step_then_plain_sampling(seed):
    case = Case(seed)
    length = case.limits.max_depth + 2
    emitted = step_outcomes(case, case.context)
    assert abs(sum(emitted.values()) - 1) < EXACT
    assert max(map(len, emitted)) <= case.limits.max_depth + 1
    expected = plain(case.target, case.context, length)
    assert distance(sequences(case.target, case.context, length, emitted), expected) < EXACT


@pytest.mark.parametrize("seed", SEEDS)
def test_two_steps(seed):
    case = Case(seed, max_vocab=3)
    length = min(7, 2 * (case.limits.max_depth + 1))
    emitted: dict[tuple[int, ...], float] = {}
    for first, prob in step_outcomes(case, case.context).items():
        for second, chance in step_outcomes(case, case.context + first).items():
            emitted[first + second] = emitted.get(first + second, 0.0) + prob * chance
    assert min(map(len, emitted)) >= 2
    expected = plain(case.target, case.context, length)
    assert distance(sequences(case.target, case.context, length, emitted), expected) < EXACT


@pytest.mark.parametrize("seed", SEEDS)
def test_every_cut_of_the_list(seed):
    case = Case(seed, max_vocab=4)
    length = case.limits.max_depth + 1
    expected = plain(case.target, case.context, length)
    size = int(case.propose(case.context)[0].size[0])
    assert size > 0
    for cut in range(size + 1):
        emitted = step_outcomes(case, case.context, cut)
        assert distance(sequences(case.target, case.context, length, emitted), expected) < EXACT


# --- greedy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_text(seed):
    case = Case(seed)
    length = 12

    def best(text):
        return int(np.argmax(case.target(text)))

    expected = case.context
    while len(expected) < len(case.context) + length:
        expected = (*expected, best(expected))

    text = case.context
    while len(text) < len(expected):
        rows, place, emitted = Rows(case.propose(text)[0], text), 0, ()
        while place is not None:
            token = best(rows.seen_from(place))
            emitted = (*emitted, token)
            place = rows.step(place, token)
        text += emitted
    assert text[: len(expected)] == expected


# --- controls for the cases and the check -----------------------------------------------------------


def test_the_cases_have_merged_edges_and_accept_across_them():
    with_merge = accepted = accepted_across = 0
    for seed in SEEDS:
        case = Case(seed)
        trees, _ = case.propose(case.context)
        paths = {tuple(path_tokens(trees, 0, place)): place for place in range(1, 1 + trees.size[0])}
        across = {path for path, place in paths.items() if trees.via_merge[0, place]}
        with_merge += bool(across)
        prefixes = {text[:end] for text in step_outcomes(case, case.context) for end in range(1, len(text))}
        accepted += bool(prefixes & paths.keys())
        accepted_across += bool(prefixes & across)
    assert accepted >= len(SEEDS) * 3 // 4
    assert with_merge >= len(SEEDS) // 2
    assert accepted_across >= len(SEEDS) // 3


def test_control_a_shared_node_verified_once_is_not_lossless():
    # With one row per node, the target would see the path on which the node was drafted.
    worst = 0.0
    for seed in SEEDS:
        case = Case(seed)
        trees, graphs = case.propose(case.context)
        rows = Rows(trees, case.context)

        def seen_once(place, case=case, trees=trees, graphs=graphs):
            path, node = (), int(trees.node[0, place])
            while node != 0:
                path = (int(graphs.token[0, node]), *path)
                node = int(graphs.parent[0, node])
            return case.target(case.context + path)

        length = case.limits.max_depth + 2
        emitted = sequences(case.target, case.context, length, outcomes(rows, seen_once))
        worst = max(worst, distance(emitted, plain(case.target, case.context, length)))
    assert worst > 1e-3


def test_control_keeping_the_drafts_favourite_is_not_lossless():
    # This faulty rule accepts a child without sampling from the target.
    worst = 0.0
    for seed in SEEDS:
        case = Case(seed)
        rows = Rows(case.propose(case.context)[0], case.context)
        favourite = (int(rows.token[1]),)
        length = 3
        emitted = sequences(case.target, case.context, length, {favourite: 1.0})
        worst = max(worst, distance(emitted, plain(case.target, case.context, length)))
    assert worst > 0.1


def test_enumeration_itself():
    # Without a graph, a step is one plain sample, and the probabilities of all sequences sum to 1.
    case = Case(0)
    emitted = step_outcomes(case, case.context, cut=0)
    chances = case.target(case.context)
    assert emitted == {(token,): chance for token, chance in enumerate(chances) if chance > 0}
    total = plain(case.target, case.context, 3)
    assert abs(sum(total.values()) - 1) < EXACT
    assert set(total) <= set(itertools.product(range(case.vocab), repeat=3))
