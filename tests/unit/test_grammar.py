"""Grammars along graphs, with a toy grammar in place of a backend's."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_gsd.core.graph import NONE
from vllm_gsd.runtime.grammar import ProposedTree, allowed_nodes, tree_bitmask

VOCAB = 32


class ToyGrammar:
    """After token t come 2t + 1 and 2t + 2 (modulo 13); 12 ends the text."""

    def __init__(self):
        self.text = [0]

    def next_tokens(self):
        return {(2 * self.text[-1] + 1) % 13, (2 * self.text[-1] + 2) % 13}

    def is_terminated(self):
        return self.text[-1] == 12

    def accept_tokens(self, request_id, tokens):
        for token in tokens:
            assert not self.is_terminated() and token in self.next_tokens()
            self.text.append(token)
        return True

    def rollback(self, count):
        del self.text[len(self.text) - count :]

    def validate_tokens(self, tokens):
        count = len(self.text)
        for token in tokens:
            if self.is_terminated() or token not in self.next_tokens():
                break
            self.text.append(token)
        valid = self.text[count:]
        del self.text[count:]
        return valid

    def fill_bitmask(self, bitmask, row):
        bitmask[row] = sum(1 << token for token in self.next_tokens())


class Manager:
    """As much of vLLM's StructuredOutputManager as is used; ``reasoning`` tokens come before the grammar."""

    def __init__(self, reasoning_end=None):
        self.reasoning_end = reasoning_end
        self._grammar_bitmask = torch.zeros((64, 1), dtype=torch.int32)

    def _get_constraint_bounds(self, request, tokens):
        if self.reasoning_end is None:
            return 0, 0
        start = tokens.index(self.reasoning_end) + 1 if self.reasoning_end in tokens else len(tokens) + 1
        return start, start

    def validate_tokens(self, request, tokens):
        start, _ = self._get_constraint_bounds(request, tokens)
        if start >= len(tokens):
            return tokens
        return tokens[:start] + request.structured_output_request.grammar.validate_tokens(tokens[start:])

    def _fill_bitmasks(self, batch):
        for grammar, row, apply in batch:
            if apply and not grammar.is_terminated():
                grammar.fill_bitmask(self._grammar_bitmask, row)
            else:
                self._grammar_bitmask[row] = -1


def toy_request():
    return SimpleNamespace(structured_output_request=SimpleNamespace(grammar=ToyGrammar()))


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
