"""Structured output on graphs: which nodes a grammar allows, and its token masks along their paths.

Runs in the scheduler's process, where vLLM keeps the grammars. A path is judged by vLLM's own manager, so that
every backend and the reasoning rules (no constraint before reasoning has ended) work as without a graph.
"""

from typing import NamedTuple

import numpy as np

from vllm_gsd.core.graph import NONE

# Attribute of DraftTokenIds: graphs of requests with structured output, ``{request: ProposedTree}``. They don't travel
# in the list of draft tokens, which upstream would take for a chain.
PROPOSED_ATTRIBUTE = "gsd_trees"
# Attribute of SchedulerOutput: places of those graphs that are scheduled, ``{request: list[int]}``.
KEPT_ATTRIBUTE = "gsd_kept"


class ProposedTree(NamedTuple):
    """A flattened graph, best node first, with more nodes than will be verified."""

    tokens: list[int]
    parents: list[int]  # places in the list, NONE for children of the root
    budget: int  # most nodes to verify


class KeptTree(NamedTuple):
    """The nodes of a ``ProposedTree`` that its grammar allows, at most ``budget`` of them."""

    places: list[int]  # in the proposed list
    paths: list[list[int]]  # tokens from below the root to each of them

    @property
    def tokens(self) -> list[int]:
        """The last token of each path."""
        return [path[-1] for path in self.paths]


def allowed_nodes(manager, request, tree: ProposedTree) -> KeptTree:
    """Drop what the grammar of ``request`` forbids, with everything below it; valid nodes move up.

    Args:
        manager: vLLM's ``StructuredOutputManager``.
    """
    paths: dict[int, list[int]] = {NONE: []}
    for place, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if len(paths) > tree.budget:
            break
        if parent not in paths:
            continue
        path = [*paths[parent], token]
        if len(manager.validate_tokens(request, path)) == len(path):
            paths[place] = path
    del paths[NONE]
    return KeptTree(list(paths), list(paths.values()))


def tree_bitmask(manager, requests, request_ids: list[str], scheduled: dict[str, list[int]], kept) -> np.ndarray:
    """Token masks of the root and of every scheduled node of the given requests, in the order of their rows.

    Args:
        scheduled: draft tokens scheduled for each request.
        kept: ``{request: KeptTree}``. Where it doesn't fit what is scheduled, only the root is constrained: no walk
            leaves it then.

    Returns:
        int32 [rows, vocabulary / 32].
    """
    if manager._grammar_bitmask is None:
        config = manager.vllm_config
        rows = config.scheduler_config.max_num_seqs * (1 + config.num_speculative_tokens)
        manager._grammar_bitmask = manager.backend.allocate_token_bitmask(rows)
    row = 0
    for request_id in request_ids:
        request = requests[request_id]
        grammar = request.structured_output_request.grammar
        tokens = scheduled.get(request_id, [])
        tree = kept.get(request_id)
        fits = tree is not None and tree.tokens[: len(tokens)] == tokens
        for path in [[], *(tree.paths[: len(tokens)] if fits else [])]:
            grammar_start, constraint_start = manager._get_constraint_bounds(request, path)
            advance = path[grammar_start:]
            if advance:
                grammar.accept_tokens(request_id, advance)
            manager._fill_bitmasks(((grammar, row, constraint_start <= len(path)),))
            if advance:
                grammar.rollback(len(advance))
            row += 1
        if not fits:
            manager._grammar_bitmask[row : row + len(tokens)] = -1
            row += len(tokens)
    return manager._grammar_bitmask[:row].numpy()
