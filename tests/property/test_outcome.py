"""``method.outcome``, and ``follow``, which walks in one call, compared with step-by-step walks over random trees."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_gsd.method.constants import (
    ACCEPTED,
    AGREED,
    GRAMMAR,
    MOVED,
    NATIVE,
    NGRAM,
    NONE,
    NUM_SOURCES,
    SHARED,
    VERIFIED,
)
from vllm_gsd.method.outcome import kv_moves, tally
from vllm_gsd.method.verify import follow, step_into

FOREIGN = -2

# A row after a tree's root: its parent among the rows before it (negative for a row without a node), token and source.
node = st.tuples(st.integers(-1, 8), st.integers(0, 3), st.sampled_from([NONE, NATIVE, NGRAM, SHARED, AGREED]))
batches = st.lists(st.tuples(st.lists(node, max_size=9), st.booleans()), min_size=1, max_size=4)


class Rows:
    """Trees in a row. A row without a node is no row's parent."""

    def __init__(self, batch):
        parents, self.depths, tokens, sources = [], [], [], []
        for rows, _ in batch:
            parents.append([NONE])
            self.depths.append([0])
            for raw, _, _ in rows:
                nodes = [place for place, parent in enumerate(parents[-1]) if parent != FOREIGN]
                parent = FOREIGN if raw < 0 else nodes[raw % len(nodes)]
                parents[-1].append(parent)
                self.depths[-1].append(0 if raw < 0 else self.depths[-1][parent] + 1)
            tokens.append([0, *(token for _, token, _ in rows)])
            sources.append([NONE, *(NONE if raw < 0 else source for raw, _, source in rows)])
        self.parents = parents
        self.starts = np.cumsum([0, *map(len, parents)]).astype(np.int32)
        self.parent = np.array([p for tree in parents for p in tree], np.int32)
        self.depth = np.array([d for tree in self.depths for d in tree], np.int32)
        self.token = np.array([t for tree in tokens for t in tree], np.int64)
        self.source = np.array([s for tree in sources for s in tree], np.int8)

    def path(self, tree, place):
        return [] if place == 0 else [*self.path(tree, self.parents[tree][place]), place]


@settings(deadline=None, max_examples=200)
@given(batches, st.randoms(use_true_random=False))
def test_the_walk_in_one_go_is_the_walk_step_by_step(batch, random):
    rows = Rows(batch)
    sampled = np.array([random.randrange(4) for _ in rows.token], np.int64)
    places, active = np.zeros(len(batch), np.int32), np.ones(len(batch), np.bool_)
    expected = [[] for _ in batch]
    while active.any():
        tokens = sampled[rows.starts[:-1] + places]
        for tree in np.flatnonzero(active):
            expected[tree].append(int(tokens[tree]))
        step_into(rows.token, rows.parent, rows.starts, places, tokens, active)
    ended = np.zeros(len(batch), np.int32)
    path = np.full((len(batch), int(np.diff(rows.starts).max())), -1, np.int32)
    longest = follow(rows.token, rows.parent, rows.starts, sampled, ended, path)
    assert ended.tolist() == places.tolist()
    assert [[token for token in line if token >= 0] for line in path.tolist()] == expected
    assert longest == max(map(len, expected))


@settings(deadline=None, max_examples=200)
@given(batches, st.randoms(use_true_random=False))
def test_what_moves_and_what_is_counted(batch, random):
    rows = Rows(batch)
    places = np.array(
        [random.choice([i for i, p in enumerate(tree) if p != FOREIGN]) for tree in rows.parents], np.int32
    )
    counted = np.array([flag for _, flag in batch])
    paths = [rows.path(tree, int(place)) for tree, place in enumerate(places)]

    first_rows = rows.starts[:-1].astype(np.int64) + 5
    moved = [
        (int(first_rows[tree]) + place, int(first_rows[tree]) + depth)
        for tree, path in enumerate(paths)
        for depth, place in enumerate(path, start=1)
        if place != depth
    ]
    sources, destinations = kv_moves(rows.parent, rows.starts, places, first_rows)
    assert sorted(zip(sources.tolist(), destinations.tolist(), strict=True)) == sorted(moved)

    survival = np.arange(len(rows.parent), dtype=np.float32)
    counts, length, deepest, nodes = tally(rows.parent, rows.starts, places, counted, rows.depth, rows.source, survival)
    chosen = np.flatnonzero(counted)
    assert [length[tree] for tree in chosen] == [len(paths[tree]) for tree in chosen]
    assert [deepest[tree] for tree in chosen] == [max(rows.depths[tree]) for tree in chosen]
    expected, by_source = [], [0] * NUM_SOURCES
    verified = grammar = 0
    for ordinal, tree in enumerate(chosen):
        for place, parent in enumerate(rows.parents[tree]):
            if parent < 0:
                continue
            line, accepted = rows.starts[tree] + place, place in paths[tree]
            verified += 1
            if rows.source[line] == NONE:
                grammar += accepted
            else:
                by_source[rows.source[line]] += accepted
                expected.append((ordinal, rows.source[line], rows.depth[line], survival[line], accepted))
    assert list(zip(*nodes, strict=True)) == expected
    assert (counts[VERIFIED], counts[GRAMMAR]) == (verified, grammar)
    assert counts[MOVED] == sum(place != depth for tree in chosen for depth, place in enumerate(paths[tree], start=1))
    assert counts[ACCEPTED:].tolist() == by_source
