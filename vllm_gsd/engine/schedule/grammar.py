"""Structured output along token graphs: which nodes a grammar allows, and the token bitmask of each node.

This code runs in the scheduler's process, where vLLM keeps the grammars, and with Model Runner V2 also in the workers
(see ``engine.v2.grammars``). vLLM's own manager checks each path, so every backend and the reasoning rules (no
constraint before reasoning ends) work as they do without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_gsd.method.constants import NONE
from vllm_gsd.upstream import structured

if TYPE_CHECKING:
    import torch
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

# If a grammar allows more tokens than this at a position, it adds no nodes there.
MOST_ALLOWED = 256
# If more than this many allowed tokens remain after removing prefixes of others, the grammar adds no nodes.
MOST_CHOICES = 4

Path = tuple[int, ...]  # tokens from below the root to a node
Choices = Callable[["Request", list[int]], list[int]]


class ProposedTree(NamedTuple):
    """A flattened graph with more nodes than will be verified, for the grammar to choose from. Place 0 is the root."""

    tokens: list[int]
    parents: list[int]  # places; NONE for the root
    budget: int  # maximum number of nodes to verify, not counting forced ones
    max_depth: int = 0  # maximum depth of nodes that the grammar adds
    room: int = 0  # maximum number of nodes to verify, including forced ones

    def left_out(self, chosen: GrammarTree) -> int:
        """How many nodes of the budget the grammar has not chosen or replaced."""
        return max(0, min(1 + self.budget, len(self.tokens)) - len(chosen.places))


class GrammarTree(NamedTuple):
    """The scheduled rows of a request, the root first, with the paths that its grammar allows."""

    tokens: list[int]  # the token of each row; nothing reads that of the root
    paths: list[list[int] | None]  # tokens from below the root to each row; None where the grammar forbids the node
    places: list[int]  # each row's place in the proposed tree; NONE for nodes that the grammar added

    def fits(self, drafts: list[int]) -> bool:
        """Whether scheduled draft tokens are the first nodes of the tree."""
        return self.tokens[1 : 1 + len(drafts)] == drafts


class GrammarTokens:
    """Finds the tokens that a grammar allows after a path, where they are few.

    After ``{"``, for example, only an object's first key is allowed. Such nodes need no draft.
    """

    def __init__(self, manager: StructuredOutputManager):
        self.manager = manager
        self.bitmask: torch.Tensor | None = None
        self.texts: list[str] = []

    def after(self, request: Request, path: list[int]) -> list[int]:
        """The allowed tokens after a path, without those whose text is a prefix of another's; empty if too many."""
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
        # When sorted by text, a text is directly followed by those that it is a prefix of.
        ordered = sorted((self.texts[token], int(token)) for token in allowed if token < len(self.texts))
        following = [text for text, _ in ordered[1:]] + [""]
        furthest = [
            token for (text, token), after in zip(ordered, following, strict=True) if not after.startswith(text)
        ]
        return furthest if len(furthest) <= MOST_CHOICES else []


def allowed_nodes(
    manager: StructuredOutputManager, request: Request, tree: ProposedTree, choices: Choices | None = None
) -> GrammarTree:
    """Choose the nodes to verify: the best nodes that the request's grammar allows, and nodes that it adds.

    A forbidden node is dropped with all its descendants. If the grammar allows a single token after a path, that token
    is forced: its node is added at once. If it allows a few, they are added while budget is left.

    Args:
        choices: ``GrammarTokens.after``; None to add no nodes.
    """
    nodes = _Nodes(request, tree, choices)
    nodes.add_forced(())
    paths: dict[int, Path] = {0: ()}
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
    tokens = [tree.tokens[0], *(path[-1] for path in nodes.places)]
    return GrammarTree(tokens, [[], *map(list, nodes.places)], [0, *nodes.places.values()])


class _Nodes:
    """The nodes chosen so far, by path, and the nodes that the grammar can add to them."""

    def __init__(self, request: Request, tree: ProposedTree, choices: Choices | None):
        self.request, self.tree, self.choices = request, tree, choices
        self.places: dict[Path, int] = {}
        self.forced = 0
        self.asked: dict[Path, list[int]] = {}

    @property
    def most(self) -> int:
        """Maximum number of nodes."""
        return max(self.tree.budget, self.tree.room)

    @property
    def full(self) -> bool:
        """Whether the budget for nodes that may be rejected is used up. Forced nodes are always accepted."""
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


def judged_tree(
    manager: StructuredOutputManager, request: Request, drafts: list[int], parents: list[int]
) -> GrammarTree:
    """Find the nodes that the request's grammar allows, for a tree whose rows are already assigned.

    Args:
        drafts: tokens of the request's rows below the root. There are more than nodes if some rows have no node, and
            fewer if the scheduler cut the list.
        parents: the parent of each place of the tree, NONE for the root.
    """
    tokens = [NONE, *drafts]
    paths: list[list[int] | None] = [None] * len(tokens)
    paths[0] = []
    for place, parent in enumerate(parents[1 : len(tokens)], 1):
        above = paths[parent]
        path = None if above is None else [*above, tokens[place]]
        allowed = path is not None and len(manager.validate_tokens(request, path)) == len(path)
        paths[place] = path if allowed else None
    return GrammarTree(tokens, paths, list(range(len(tokens))))


def tree_bitmask(
    manager: StructuredOutputManager,
    requests: Mapping[str, Request],
    request_ids: Sequence[str],
    scheduled: Mapping[str, list[int]],
    trees: Mapping[str, GrammarTree],
) -> np.ndarray:
    """Token bitmasks of the root and all scheduled nodes of the given requests, in the order of their rows.

    Args:
        requests: the scheduler's requests by id.
        request_ids: requests with structured output.
        scheduled: draft tokens scheduled for each request.
        trees: the tree of each request. If it does not fit the scheduled tokens, only the root is constrained, because
            no walk leaves the root then. Forbidden nodes are not constrained either, because no walk enters them.

    Returns:
        int32 [rows, vocabulary / 32].
    """
    structured.reserve_masks(manager)
    first = 0
    for request_id in request_ids:
        request = requests[request_id]
        grammar = request.structured_output_request.grammar
        drafts = scheduled.get(request_id, [])
        tree = trees.get(request_id)
        paths = [[], *[None] * len(drafts)] if tree is None or not tree.fits(drafts) else tree.paths[: 1 + len(drafts)]
        for row, path in enumerate(paths, first):
            if path is None:
                structured.allow_all(manager, row)
                continue
            grammar_start, constraint_start = manager._get_constraint_bounds(request, path)
            advance = path[grammar_start:]
            if advance:
                grammar.accept_tokens(request_id, advance)
            structured.fill_mask(manager, request, row, constraint_start <= len(path))
            if advance:
                grammar.rollback(len(advance))
        first = structured.next_request_row(manager, first, first + len(paths))
    return structured.masks(manager, first).numpy()
