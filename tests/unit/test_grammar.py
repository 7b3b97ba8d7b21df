"""Grammars on graphs, with a toy grammar instead of a backend's."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_grammar import Manager, ToyGrammar, toy_request

from vllm_gsd.engine.schedule.grammar import GrammarTokens, ProposedTree, allowed_nodes, judged_tree, tree_bitmask
from vllm_gsd.method.constants import NONE


def test_forbidden_nodes_go_with_all_below_them_and_others_move_up():
    tree = ProposedTree([0, 1, 5, 3, 2, 6, 4], [NONE, 0, 0, 2, 0, 4, 1], budget=3)
    kept = allowed_nodes(Manager(), toy_request(), tree)
    assert kept.places == [0, 1, 4, 5]  # 5 is forbidden, and 3 is its child; 4 exceeds the budget
    assert kept.paths == [[], [1], [2], [2, 6]]
    assert kept.tokens == [0, 1, 2, 6]


def test_nothing_comes_after_the_end():
    tree = ProposedTree([0, 2, 5, 12, 1], [NONE, 0, 1, 2, 3], budget=8)
    assert allowed_nodes(Manager(), toy_request(), tree).paths == [[], [2], [2, 5], [2, 5, 12]]


def distinct_tree(nodes):
    """Tokens and parents of a tree, starting with the root. As in every flattened graph, siblings differ."""
    tree = [(0, NONE)]
    for token, parent in nodes:
        node = (token, min(parent, len(tree) - 1))
        if node not in tree:
            tree.append(node)
    return [token for token, _ in tree], [parent for _, parent in tree]


random_trees = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 31)), max_size=24).map(distinct_tree)


@given(random_trees, st.integers(0, 9), st.sampled_from([None, 7]))
def test_kept_nodes_are_the_best_allowed_ones_and_masks_follow_their_paths(tree, budget, reasoning_end):
    tokens, parents = tree
    manager, request = Manager(reasoning_end), toy_request()
    kept = allowed_nodes(manager, request, ProposedTree(tokens, parents, budget))
    grammar = request.structured_output_request.grammar
    assert grammar.text == [0]

    def path_to(place):
        return [] if place == 0 else [*path_to(parents[place]), tokens[place]]

    def allowed(path):
        if reasoning_end is not None:
            path = path[path.index(reasoning_end) + 1 :] if reasoning_end in path else []
        return ToyGrammar().validate_tokens(path) == path

    nodes = [place for place in range(1, len(tokens)) if allowed(path_to(place))]
    expected = [0, *nodes[:budget]]
    assert kept.places == expected
    assert kept.paths == [path_to(place) for place in expected]

    masks = tree_bitmask(manager, {"r": request}, ["r"], {"r": kept.tokens[1:]}, {"r": kept})
    assert grammar.text == [0]
    assert masks.shape == (len(expected), 1)
    for mask, path in zip(masks[:, 0].tolist(), kept.paths, strict=True):
        if reasoning_end is not None and reasoning_end not in path:
            assert mask == -1
            continue
        state = ToyGrammar()
        state.accept_tokens("r", path[path.index(reasoning_end) + 1 :] if reasoning_end is not None else path)
        assert mask == (-1 if state.is_terminated() else sum(1 << token for token in state.next_tokens()))


def test_a_list_that_is_not_ours_constrains_its_root_only():
    manager, request = Manager(), toy_request()
    kept = allowed_nodes(manager, request, ProposedTree([0, 1], [NONE, 0], 4))
    root = (1 << 1) | (1 << 2)
    masks = tree_bitmask(manager, {"r": request}, ["r"], {"r": [9, 9]}, {"r": kept})
    np.testing.assert_array_equal(masks[:, 0], [root, -1, -1])
    masks = tree_bitmask(manager, {"r": request}, ["r"], {}, {})
    np.testing.assert_array_equal(masks[:, 0], [root])


class Tokenizer(list):
    """A tokenizer given as a list of texts by token."""

    def convert_ids_to_tokens(self, ids):
        return [self[token] for token in ids]


def test_forced_tokens_come_first_and_choices_last():
    # The toy grammar allows two tokens everywhere: 1 and 2 after 0, 3 and 4 after 1, 5 and 6 after 2.
    def choices(request, path):
        return {(): [1], (1,): [3], (2,): [5, 6]}.get(tuple(path), [])

    tree = ProposedTree([0, 2, 1, 4], [NONE, 0, 0, 2], budget=8, max_depth=4)
    kept = allowed_nodes(Manager(), toy_request(), tree, choices)
    assert kept.paths == [[], [1], [1, 3], [2], [1, 4], [2, 5], [2, 6]]
    assert kept.places == [0, 2, NONE, 1, 3, NONE, NONE]
    assert kept.tokens == [0, 1, 3, 2, 4, 5, 6]
    for budget in range(6):
        cut = allowed_nodes(Manager(), toy_request(), tree._replace(budget=budget), choices)
        assert cut.paths == kept.paths[: 1 + budget]
    # Forced tokens do not use up the budget if there is room for them.
    forced = allowed_nodes(Manager(), toy_request(), tree._replace(budget=0, room=8), choices)
    assert forced.paths == [[], [1], [1, 3]]
    more = allowed_nodes(Manager(), toy_request(), tree._replace(budget=2, room=8), choices)
    assert more.paths == [[], [1], [1, 3], [2], [1, 4]]
    tight = allowed_nodes(Manager(), toy_request(), tree._replace(budget=2, room=3), choices)
    assert tight.paths == [[], [1], [1, 3], [2]]
    nothing = allowed_nodes(Manager(), toy_request(), ProposedTree([0], [NONE], 0, max_depth=4, room=1), choices)
    assert nothing.paths == [[], [1]]
    assert nothing.places == [0, NONE]
    shallow = allowed_nodes(Manager(), toy_request(), tree._replace(max_depth=1), choices)
    assert shallow.paths == [[], [1], [2], [1, 4]]


def test_choices_are_the_allowed_tokens_that_go_furthest():
    texts = ["", *"abcdefghijkl", *[None] * 19]
    texts[1:3] = "na", "name"  # the two tokens allowed first; one is a prefix of the other
    manager, request = Manager(), toy_request()
    manager.backend = SimpleNamespace(allocate_token_bitmask=lambda rows: torch.zeros((rows, 1), dtype=torch.int32))
    manager.tokenizer = Tokenizer(texts)
    tokens = GrammarTokens(manager)
    assert tokens.after(request, []) == [2]
    assert tokens.after(request, [2]) == [5, 6]
    assert tokens.after(request, [2, 5, 12]) == []  # the text has ended
    assert request.structured_output_request.grammar.text == [0]
    assert GrammarTokens(manager).after(toy_request(13, 6, 12), []) == []  # too many tokens are allowed
    manager.reasoning_end = 7
    assert tokens.after(request, [1]) == []


def test_nodes_with_rows_are_judged_where_they_are():
    """The root has the children 1 (allowed) and 9 (forbidden), with children 3, 5 (forbidden) and 3.

    The last two rows have no valid node.
    """
    request, manager = toy_request(), Manager()
    tokens, parents = [1, 9, 3, 5, 3, 0, 0], [NONE, 0, 0, 1, 1, 2]
    tree = judged_tree(manager, request, tokens, parents)
    assert tree.paths == [[], [1], None, [1, 3], None, None, None, None]
    assert tree.fits(tokens) and tree.fits(tokens[:2]) and not tree.fits([1, 2])
    masks = tree_bitmask(manager, {"toy": request}, ["toy"], {"toy": tokens[:4]}, {"toy": tree})[:, 0].tolist()
    after = {path: sum(1 << (2 * path + i) % 13 for i in (1, 2)) for path in (0, 1, 3)}
    assert masks == [after[0], after[1], -1, after[3], -1]
    assert request.structured_output_request.grammar.text == [0]


def test_rows_that_were_never_judged_constrain_their_root_only():
    request = toy_request()
    masks = tree_bitmask(Manager(), {"toy": request}, ["toy"], {"toy": [-1, -1]}, {})[:, 0].tolist()
    assert masks == [0b110, -1, -1]
