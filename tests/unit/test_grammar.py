"""Grammars along graphs, with a toy grammar in place of a backend's."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from toy_grammar import Manager, ToyGrammar, toy_request

from vllm_gsd.core.graph import NONE
from vllm_gsd.runtime.grammar import ProposedTree, allowed_nodes, tree_bitmask


def test_forbidden_nodes_go_with_all_below_them_and_others_move_up():
    tree = ProposedTree([1, 5, 3, 2, 6, 4], [NONE, NONE, 1, NONE, 3, 0], budget=3)
    kept = allowed_nodes(Manager(), toy_request(), tree)
    assert kept.places == [0, 3, 4]  # 5 is forbidden, 3 hangs below it; 4 is one too many
    assert kept.paths == [[1], [2], [2, 6]]
    assert kept.tokens == [1, 2, 6]


def test_nothing_comes_after_the_end():
    tree = ProposedTree([2, 5, 12, 1], [NONE, 0, 1, 2], budget=8)
    assert allowed_nodes(Manager(), toy_request(), tree).paths == [[2], [2, 5], [2, 5, 12]]


random_trees = st.lists(st.tuples(st.integers(0, 12), st.integers(-1, 30)), max_size=24).map(
    lambda nodes: ([t for t, _ in nodes], [min(p, i - 1) for i, (_, p) in enumerate(nodes)])
)


@given(random_trees, st.integers(0, 9), st.sampled_from([None, 7]))
def test_kept_nodes_are_the_best_allowed_ones_and_masks_follow_their_paths(tree, budget, reasoning_end):
    tokens, parents = tree
    manager, request = Manager(reasoning_end), toy_request()
    kept = allowed_nodes(manager, request, ProposedTree(tokens, parents, budget))
    grammar = request.structured_output_request.grammar
    assert grammar.text == [0]

    def path_to(place):
        return [] if place == NONE else [*path_to(parents[place]), tokens[place]]

    def allowed(path):
        if reasoning_end is not None:
            path = path[path.index(reasoning_end) + 1 :] if reasoning_end in path else []
        return ToyGrammar().validate_tokens(path) == path

    expected = [place for place in range(len(tokens)) if allowed(path_to(place))][:budget]
    assert kept.places == expected
    assert kept.paths == [path_to(place) for place in expected]

    masks = tree_bitmask(manager, {"r": request}, ["r"], {"r": kept.tokens}, {"r": kept})
    assert grammar.text == [0]
    assert masks.shape == (1 + len(expected), 1)
    for mask, path in zip(masks[:, 0].tolist(), [[], *kept.paths], strict=True):
        if reasoning_end is not None and reasoning_end not in path:
            assert mask == -1
            continue
        state = ToyGrammar()
        state.accept_tokens("r", path[path.index(reasoning_end) + 1 :] if reasoning_end is not None else path)
        assert mask == (-1 if state.is_terminated() else sum(1 << token for token in state.next_tokens()))


def test_a_list_that_is_not_ours_constrains_its_root_only():
    manager, request = Manager(), toy_request()
    kept = allowed_nodes(manager, request, ProposedTree([1], [NONE], 4))
    root = (1 << 1) | (1 << 2)
    masks = tree_bitmask(manager, {"r": request}, ["r"], {"r": [9, 9]}, {"r": kept})
    np.testing.assert_array_equal(masks[:, 0], [root, -1, -1])
    masks = tree_bitmask(manager, {"r": request}, ["r"], {}, {})
    np.testing.assert_array_equal(masks[:, 0], [root])
