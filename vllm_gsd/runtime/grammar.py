"""Structured output on graphs: which nodes a grammar allows, and its token masks along their paths.

Runs in the scheduler's process, where vLLM keeps the grammars. A path is judged by vLLM's own manager, so that
every backend and the reasoning rules (no constraint before reasoning has ended) work as without a graph.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from vllm_gsd.core.graph import NONE
from vllm_gsd.upstream import structured

# Where a grammar allows more tokens than that, no look is taken at how many of them go furthest.
MOST_ALLOWED = 256
# So many choices are worth verifying unasked.
MOST_CHOICES = 4

Path = tuple[int, ...]  # tokens from below the root to a node


class ProposedTree(NamedTuple):
    """A flattened graph, best node first, with more nodes than will be verified."""

    tokens: list[int]
    parents: list[int]  # places in the list, NONE for children of the root
    budget: int  # most nodes to verify, but for those that the grammar forces
    max_depth: int = 0  # of nodes that the grammar adds
    room: int = 0  # most nodes to verify, forced ones among them


class KeptTree(NamedTuple):
    """The nodes of a ``ProposedTree`` that its grammar allows, and others it suggests."""

    places: list[int]  # in the proposed list, NONE for what the grammar suggests
    paths: list[list[int]]  # tokens from below the root to each of them

    @property
    def tokens(self) -> list[int]:
        """The last token of each path."""
        return [path[-1] for path in self.paths]


class JudgedTree(NamedTuple):
    """The scheduled rows of a request, each with what its grammar thinks of it."""

    tokens: list[int]  # of all rows below the root, zeros where there is no node
    paths: list[list[int] | None]  # tokens from below the root to each of them, None for what the grammar forbids


class GrammarTokens:
    """Says what a grammar leaves to choose after a path, where that is little.

    After ``{"`` an object's first key comes, whatever the draft thinks: such nodes need no draft.

    Args:
        manager: vLLM's ``StructuredOutputManager``.
    """

    def __init__(self, manager):
        self.manager = manager
        self.bitmask = None
        self.texts: list[str] = []

    def after(self, request, path: list[int]) -> list[int]:
        """Tokens that may follow, without those that only begin another of them; none if they are many."""
        grammar = request.structured_output_request.grammar
        grammar_start, constraint_start = self.manager._get_constraint_bounds(request, path)
        if constraint_start > len(path):
            return []
        if self.bitmask is None:
            self.bitmask = self.manager.backend.allocate_token_bitmask(1)
            tokenizer = self.manager.tokenizer
            self.texts = [text or "" for text in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
        advance = path[grammar_start:]
        if advance:
            grammar.accept_tokens(request.request_id, advance)
        ended = grammar.is_terminated()
        if not ended:
            grammar.fill_bitmask(self.bitmask, 0)
        if advance:
            grammar.rollback(len(advance))
        if ended:
            return []
        mask = self.bitmask[0].numpy()
        if int(np.bitwise_count(mask.view(np.uint32)).sum()) > MOST_ALLOWED:
            return []
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        # In the order of their texts, what begins with a text comes right after it.
        ordered = sorted((self.texts[token], int(token)) for token in allowed if token < len(self.texts))
        following = [text for text, _ in ordered[1:]] + [""]
        furthest = [
            token for (text, token), after in zip(ordered, following, strict=True) if not after.startswith(text)
        ]
        return furthest if len(furthest) <= MOST_CHOICES else []


def allowed_nodes(
    manager, request, tree: ProposedTree, choices: Callable[[Any, list[int]], list[int]] | None = None
) -> KeptTree:
    """Drop what the grammar of ``request`` forbids, with everything below it; valid nodes move up.

    What the grammar leaves no choice about is added at once, few choices where budget is left.

    Args:
        manager: vLLM's ``StructuredOutputManager``.
        choices: ``GrammarTokens.after``; None to add nothing.
    """
    nodes = _Nodes(request, tree, choices)
    nodes.add_forced(())
    paths: dict[int, Path] = {NONE: ()}
    for place, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent not in paths:
            continue
        path = (*paths[parent], token)
        if path in nodes.places:
            nodes.places[path] = place
        elif not nodes.full and len(manager.validate_tokens(request, list(path))) == len(path):
            nodes.places[path] = place
            nodes.add_forced(path)
        else:
            continue
        paths[place] = path
    nodes.add_choices()
    return KeptTree(list(nodes.places.values()), [list(path) for path in nodes.places])


class _Nodes:
    """The nodes kept so far, by their paths, and what the grammar can add to them."""

    def __init__(self, request, tree: ProposedTree, choices):
        self.request, self.tree, self.choices = request, tree, choices
        self.places: dict[Path, int] = {}
        self.forced = 0
        self.asked: dict[Path, list[int]] = {}

    @property
    def most(self) -> int:
        """Nodes there may be."""
        return max(self.tree.budget, self.tree.room)

    @property
    def full(self) -> bool:
        """Whether there is budget left for a node that may be wrong; forced ones are sure to pay."""
        beyond = max(0, self.forced - (self.most - self.tree.budget))
        return len(self.places) - self.forced + beyond >= self.tree.budget

    def choices_after(self, path: Path) -> list[int]:
        if self.choices is None or len(path) >= self.tree.max_depth:
            return []
        if path not in self.asked:
            self.asked[path] = self.choices(self.request, list(path))
        return self.asked[path]

    def add_forced(self, path: Path) -> None:
        while len(self.places) < self.most and len(tokens := self.choices_after(path)) == 1:
            path = (*path, tokens[0])
            if path not in self.places:
                self.places[path] = NONE
                self.forced += 1

    def add_choices(self) -> None:
        paths: list[Path] = [(), *self.places]
        for path in paths:
            if self.full:
                break
            for token in self.choices_after(path):
                child = (*path, token)
                if not self.full and child not in self.places:
                    self.places[child] = NONE
                    paths.append(child)


def judged_tree(manager, request, tokens: list[int], parents: list[int]) -> JudgedTree:
    """Say which of a graph's nodes the grammar of ``request`` allows.

    Args:
        tokens: of the request's rows; more than there are nodes, or fewer where the scheduler cut the list.
        parents: places of the nodes' parents, NONE for children of the root.
    """
    paths: dict[int, list[int] | None] = {NONE: []}
    for place, (token, parent) in enumerate(zip(tokens, parents, strict=False)):
        above = paths[parent]
        path = None if above is None else [*above, token]
        allowed = path is not None and len(manager.validate_tokens(request, path)) == len(path)
        paths[place] = path if allowed else None
    return JudgedTree(tokens, [paths.get(place) for place in range(len(tokens))])


def tree_fits(tree, tokens: list[int]) -> bool:
    """Whether the scheduled tokens are those of a ``KeptTree`` or ``JudgedTree``, None for none."""
    return tree is not None and tree.tokens[: len(tokens)] == tokens


def tree_bitmask(manager, requests, request_ids: list[str], scheduled: dict[str, list[int]], kept) -> np.ndarray:
    """Token masks of the root and of every scheduled node of the given requests, in the order of their rows.

    Args:
        scheduled: draft tokens scheduled for each request.
        kept: ``{request: KeptTree or JudgedTree}``. Where it doesn't fit what is scheduled, only the root is
            constrained: no walk leaves it then, nor does one enter a node that is forbidden.

    Returns:
        int32 [rows, vocabulary / 32].
    """
    structured.reserve_masks(manager)
    row = 0
    for request_id in request_ids:
        first = row
        request = requests[request_id]
        grammar = request.structured_output_request.grammar
        tokens = scheduled.get(request_id, [])
        tree = kept.get(request_id)
        paths = tree.paths if tree_fits(tree, tokens) else []
        for path in [[], *paths[: len(tokens)], *[None] * (len(tokens) - len(paths))]:
            if path is None:
                structured.allow_all(manager, row)
                row += 1
                continue
            grammar_start, constraint_start = manager._get_constraint_bounds(request, path)
            advance = path[grammar_start:]
            if advance:
                grammar.accept_tokens(request_id, advance)
            structured.fill_mask(manager, request, row, constraint_start <= len(path))
            if advance:
                grammar.rollback(len(advance))
            row += 1
        row = structured.next_request_row(manager, first, row)
    return structured.masks(manager, row).numpy()
