"""Flattened lists, their masks and the walk over them, compared with recursion over the graph.

The tests use random acyclic graphs with arbitrary merged edges and probabilities, also equal ones, 0 and 1. A list is a
tree in topological order within its limits on nodes and depth. It is sorted by probability, contains all ancestors, and
siblings differ. Its paths are the N most probable paths of the graph. A batch gives the same as each graph alone.
``ancestor_masks`` (also with several words), ``is_chain`` and ``step_into`` equal their references.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_graph import Node, can_reach, has_cycle, path_tokens, read_graph, unrolled

from vllm_gsd.method.constants import NONE, ORIGIN_DRAFT, ORIGIN_ROOT
from vllm_gsd.method.flatten import flatten
from vllm_gsd.method.graph import add_child, new_graphs, reset
from vllm_gsd.method.lay_out import ancestor_masks
from vllm_gsd.method.verify import is_chain, step_into

FEW = settings(derandomize=True, deadline=None, max_examples=60)
MANY = settings(derandomize=True, deadline=None, max_examples=150)

# --- random graphs ----------------------------------------------------------------------------------

TIED = st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0])
ANY = st.floats(0.0, 1.0, width=32)
CHOICE = st.integers(0, 63)


def steps(probs):
    """Steps that build a graph: (node to extend, token, probability, node to merge with)."""
    one = st.tuples(CHOICE, st.integers(0, 4), probs, st.none() | st.none() | CHOICE)
    return st.lists(one, max_size=16)


def request(probs):
    """A graph and its limits on nodes and depth."""
    return st.tuples(steps(probs), st.integers(0, 24), st.integers(0, 5))


BATCHES = st.lists(request(TIED) | request(ANY), min_size=1, max_size=4)


def build(batch):
    graphs = new_graphs(len(batch), 24)
    for row, (todo, _, _) in enumerate(batch):
        reset(graphs, row, np.array([7], np.int64))
        natives = [0]
        for choice, token, prob, merge in todo:
            parent = natives[choice % len(natives)]
            nodes = read_graph(graphs, row)
            if any(child.token == token for child in nodes[parent].children):
                continue
            targets = [n for n in natives[1:] if not can_reach(nodes[n], nodes[parent])]
            index = add_child(graphs, row, parent, token, np.float32(prob), ORIGIN_DRAFT)
            if merge is not None and targets:
                graphs.merged[row, index] = targets[merge % len(targets)]
            else:
                natives.append(index)
        assert not has_cycle(read_graph(graphs, row))
    num_nodes = np.array([nodes for _, nodes, _ in batch], np.int32)
    max_depth = np.array([depth for _, _, depth in batch], np.int32)
    return graphs, num_nodes, max_depth


def flattened(trees, row):
    """Nodes from place 1 on, as (tokens of the path, parent's place, depth, node, via_merge)."""
    root = (trees.token, trees.parent, trees.depth, trees.node, trees.origin, trees.via_merge, trees.survival)
    assert [field[row, 0].item() for field in root] == [7, NONE, 0, 0, ORIGIN_ROOT, False, 1.0]
    assert trees.value[row, 0] == 1.0
    paths: list[tuple[int, ...]] = [()]
    result = []
    for place in range(1, 1 + trees.size[row]):
        parent = int(trees.parent[row, place])
        assert 0 <= parent < place
        paths.append((*paths[parent], int(trees.token[row, place])))
        node, crossed = int(trees.node[row, place]), bool(trees.via_merge[row, place])
        result.append((paths[-1], parent, int(trees.depth[row, place]), node, crossed))
    return result


# --- flatten ----------------------------------------------------------------------------------------


@MANY
@given(BATCHES)
def test_flattened_lists_are_trees_of_graph_paths(batch):
    graphs, num_nodes, max_depth = build(batch)
    trees = flatten(graphs, num_nodes, max_depth)
    for row in range(len(batch)):
        places = flattened(trees, row)  # parents come first
        assert len(places) <= num_nodes[row]
        existing = {p.tokens: p for p in unrolled(read_graph(graphs, row)[0], max_depth[row])}
        for place, (tokens, _, depth, node, crossed) in enumerate(places, 1):
            assert depth == len(tokens) <= max_depth[row]
            assert tokens in existing
            assert node == existing[tokens].node.index
            assert crossed == existing[tokens].via_merge
            assert path_tokens(trees, row, place) == list(tokens)
        chosen = [tokens for tokens, *_ in places]
        assert len(set(chosen)) == len(chosen)  # so siblings have distinct tokens
        assert all(tokens[:-1] in chosen for tokens in chosen if len(tokens) > 1)


@MANY
@given(BATCHES)
def test_flattened_lists_hold_the_most_probable_paths(batch):
    graphs, num_nodes, max_depth = build(batch)
    trees = flatten(graphs, num_nodes, max_depth)
    for row in range(len(batch)):
        existing = unrolled(read_graph(graphs, row)[0], max_depth[row])
        survival = {p.tokens: p.survival for p in existing}
        chosen = [tokens for tokens, *_ in flattened(trees, row)]
        best = sorted(survival.values(), reverse=True)
        # The list has the best paths, sorted. Among equal ones, any may be chosen.
        assert [survival[tokens] for tokens in chosen] == best[: num_nodes[row]]
        if len(set(best)) == len(best):
            ranked = sorted(existing, key=lambda p: -p.survival)
            assert chosen == [p.tokens for p in ranked[: num_nodes[row]]]


@MANY
@given(BATCHES)
def test_a_batch_gives_what_each_graph_gives_alone(batch):
    trees = flatten(*build(batch))
    for row, one in enumerate(batch):
        alone = flatten(*build([one]))
        size = alone.size[0]
        assert trees.size[row] == size
        for field in ("token", "parent", "depth", "node", "origin", "via_merge"):
            together, single = getattr(trees, field), getattr(alone, field)
            assert np.array_equal(together[row, : 1 + size], single[0, : 1 + size])


@FEW
@given(BATCHES)
def test_a_smaller_budget_gives_a_prefix(batch):
    # Fewer nodes give a prefix of the same list, so cutting a list equals flattening with a smaller budget.
    graphs, num_nodes, max_depth = build(batch)
    full = flatten(graphs, num_nodes, max_depth)
    for less in (1, 3):
        smaller = flatten(graphs, np.maximum(num_nodes - less, 0).astype(np.int32), max_depth)
        for row in range(len(batch)):
            assert flattened(smaller, row) == flattened(full, row)[: max(num_nodes[row] - less, 0)]


# --- masks ------------------------------------------------------------------------------------------


def forests(most_rows, most_trees=4):
    """Parents of the rows of some trees. Rows without a parent may be anywhere."""
    parent = st.integers(-1, 10**6)
    tree = st.lists(parent, max_size=most_rows).map(
        lambda raw: [NONE if i == 0 or p < 0 else p % i for i, p in enumerate(raw)]
    )
    return st.lists(tree, max_size=most_trees)


def ancestors_and_self(parents, place):
    return {place} if parents[place] == NONE else {place} | ancestors_and_self(parents, parents[place])


def bits_of(words):
    return {64 * w + bit for w, word in enumerate(words) for bit in range(64) if int(word) >> bit & 1}


def laid_out(trees):
    parent = np.array([p for tree in trees for p in tree], np.int32)
    starts = np.cumsum([0, *map(len, trees)]).astype(np.int32)
    return parent, starts


def check_masks(trees, words):
    parent, starts = laid_out(trees)
    masks = np.full((len(parent), words), -1, np.int64)  # the previous content must not matter
    ancestor_masks(parent, starts, masks)
    for tree, start in zip(trees, starts, strict=False):
        for place in range(len(tree)):
            assert bits_of(masks[start + place]) == ancestors_and_self(tree, place)


@FEW
@given(forests(12), st.integers(1, 2))
def test_masks_are_the_ancestors(trees, words):
    check_masks(trees, words)


@settings(FEW, max_examples=25)
@given(st.integers(60, 192), st.integers(60, 192), st.randoms(use_true_random=False))
def test_masks_of_several_words(left, right, random):
    trees = [[NONE, *(random.randrange(max(0, i - 9), i) for i in range(1, size))] for size in (left, right)]
    check_masks(trees, 3)


@pytest.mark.parametrize("size", [63, 64, 65, 128, 129])
def test_masks_of_chains(size):
    check_masks([list(range(-1, size - 1)), [NONE]], (size + 63) // 64)


@pytest.mark.parametrize(("size", "words"), [(65, 1), (129, 2), (1000, 15)])
def test_masks_with_too_many_rows(size, words):
    trees = [[NONE, 0], list(range(-1, size - 1))]
    parent, starts = laid_out(trees)
    with pytest.raises(ValueError, match="more rows than its attention mask has bits"):
        ancestor_masks(parent, starts, np.zeros((len(parent), words), np.int64))


# --- the walk ---------------------------------------------------------------------------------------


def rooted(tree, random):
    """Make a tree with one root, and tokens that differ between siblings."""
    parents = [NONE, *(max(p, 0) for p in tree[1:])] if tree else [NONE]
    taken: dict[int, set[int]] = {}
    tokens = [random.randrange(5)]
    for parent in parents[1:]:
        used = taken.setdefault(parent, set())
        token = random.choice([t for t in range(len(used) + 3) if t not in used])
        used.add(token)
        tokens.append(token)
    return parents, tokens


@FEW
@given(st.lists(forests(10, 1), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_step_into_moves_to_the_sampled_child(raw, random):
    trees = [rooted(forest[0] if forest else [], random) for forest in raw]
    parent, starts = laid_out([parents for parents, _ in trees])
    token = np.array([t for _, tokens in trees for t in tokens], np.int64)
    children = [{(p, t): place for place, (p, t) in enumerate(zip(*tree, strict=True)) if place} for tree in trees]
    places = [random.randrange(len(parents)) for parents, _ in trees]
    active = [random.random() < 0.8 for _ in trees]
    for _ in range(4):
        sampled = []
        for tree, (_, tokens) in enumerate(trees):
            good = [t for p, t in children[tree] if p == places[tree]]
            # A child's token, or the token of another row of the tree.
            sampled.append(random.choice(good if good and random.random() < 0.7 else [*tokens, 9]))
        got_places, got_active = np.array(places, np.int32), np.array(active)
        step_into(token, parent, starts, got_places, np.array(sampled, np.int64), got_active)
        for tree in range(len(trees)):
            child = children[tree].get((places[tree], sampled[tree])) if active[tree] else None
            active[tree] = child is not None
            places[tree] = places[tree] if child is None else child
        assert got_places.tolist() == places
        assert got_active.tolist() == active


def test_step_into_never_enters_rows_of_no_tree():
    parent = np.array([NONE, -2, -2, NONE, 0], np.int32)
    token = np.array([4, 4, 4, 4, 4], np.int64)
    places, active = np.zeros(2, np.int32), np.ones(2, np.bool_)
    starts = np.array([0, 3, 5], np.int32)
    step_into(token, parent, starts, places, np.array([4, 4]), active)
    assert (places.tolist(), active.tolist()) == ([0, 1], [False, True])


@FEW
@given(forests(12))
def test_is_chain(trees):
    trees = [[NONE, *(max(p, 0) for p in tree[1:])] for tree in trees if tree]
    parent, starts = laid_out(trees)
    for tree, start, end in zip(trees, starts, starts[1:], strict=False):
        assert is_chain(parent, start, end) == all(p == i - 1 for i, p in enumerate(tree))


def test_is_chain_of_rows_that_are_no_tree():
    foreign = np.array([NONE, -2, -2, NONE], np.int32)
    assert not is_chain(foreign, 0, 3)
    assert is_chain(foreign, 3, 4)
    assert not is_chain(foreign, 1, 2)  # does not begin with a root


def test_a_chain_graph_is_verified_as_a_chain():
    # The list of a graph without branches is a chain, which plain causal attention can verify.
    graphs = new_graphs(1, 8)
    reset(graphs, 0, np.array([3], np.int64))
    node = 0
    for token in (5, 1, 5, 2):
        node = add_child(graphs, 0, node, token, np.float32(0.9), ORIGIN_DRAFT)
    trees = flatten(graphs, np.array([8], np.int32), np.array([3], np.int32))
    parent = trees.parent[0, : 1 + trees.size[0]]
    assert trees.token[0, : len(parent)].tolist() == [3, 5, 1, 5]
    assert is_chain(parent, 0, len(parent))
    masks = np.zeros((len(parent), 1), np.int64)
    ancestor_masks(parent, np.array([0, len(parent)], np.int32), masks)
    assert [bits_of(row) for row in masks] == [set(range(i + 1)) for i in range(len(parent))]


def test_reference_notices_a_cycle():
    nodes = [Node(0, 0, np.float32(1), None)]
    nodes.append(Node(1, 1, np.float32(1), nodes[0]))
    nodes.append(Node(2, 1, np.float32(1), nodes[1], merged=nodes[1]))
    nodes[0].children.append(nodes[1])
    nodes[1].children.append(nodes[2])
    assert has_cycle(nodes)
