"""Flattened token graphs on the host: one request's tree, and the rows of all trees in a step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from vllm_gsd.engine.schedule.grammar import GrammarTree
from vllm_gsd.method.constants import (
    AGREED,
    MERGED,
    NATIVE,
    NGRAM,
    NONE,
    NUM_ORIGINS,
    ORIGIN_AGREED,
    ORIGIN_GRAMMAR,
    ORIGIN_NGRAM,
    ORIGIN_SHARED,
    SHARED,
)
from vllm_gsd.method.flatten import FlatTrees

# Parent of a row that has no node. No walk steps into such a row.
FOREIGN = -2

# The source of a node (NONE for nodes of a grammar), indexed by ``via_merge`` and origin.
SOURCE_OF = np.full((2, NUM_ORIGINS), NATIVE, np.int8)
SOURCE_OF[1] = MERGED
SOURCE_OF[:, [ORIGIN_NGRAM, ORIGIN_SHARED, ORIGIN_AGREED, ORIGIN_GRAMMAR]] = NGRAM, SHARED, AGREED, NONE


@dataclass(frozen=True)
class FlatTree:
    """The flattened token graph of one request. Place 0 is the first node below the root."""

    token: np.ndarray  # int64 [n]
    parent: np.ndarray  # int32 [n], the parent's place; NONE for children of the root
    depth: np.ndarray  # int32 [n]
    origin: np.ndarray  # int8 [n], ORIGIN_* of each node
    via_merge: np.ndarray  # bool [n], whether the path to the node uses a merged edge
    survival: np.ndarray  # float32 [n], uncalibrated

    def first(self, size: int) -> FlatTree:
        """The tree of the first ``size`` nodes."""
        return FlatTree(*(getattr(self, of.name)[:size] for of in fields(self)))

    def select(self, allowed: GrammarTree) -> FlatTree:
        """The tree of the nodes that ``allowed_nodes`` returned. Nodes that the grammar added have survival 1."""
        places = np.asarray(allowed.places, np.int64)
        paths = [path for path in allowed.paths if path is not None]
        place_of = {tuple(path): place for place, path in enumerate(paths)}

        def of_draft(values: np.ndarray, otherwise: float) -> np.ndarray:
            # Nodes that the grammar added have place NONE, which is -1: the appended last entry.
            return np.append(values, np.asarray(otherwise, values.dtype))[places]

        return FlatTree(
            np.array(allowed.tokens, np.int64),
            np.array([place_of.get(tuple(path[:-1]), NONE) for path in paths], np.int32),
            np.array([len(path) for path in paths], np.int32),
            of_draft(self.origin, ORIGIN_GRAMMAR),
            of_draft(self.via_merge, False),
            of_draft(self.survival, 1),
        )


NO_NODES = FlatTree(*(np.zeros(0, kind) for kind in (np.int64, np.int32, np.int32, np.int8, np.bool_, np.float32)))


def flat_tree(trees: FlatTrees, row: int, size: int) -> FlatTree:
    """The first ``size`` nodes of one tree of a batch."""
    return FlatTree(
        token=trees.token[row, :size],
        parent=trees.parent[row, :size],
        depth=trees.depth[row, :size],
        origin=trees.origin[row, :size],
        via_merge=trees.via_merge[row, :size],
        survival=trees.survival[row, :size],
    )


class WalkTrees(NamedTuple):
    """The rows to verify, request by request. Each request's first row is its root."""

    token: np.ndarray  # int64 [num_rows]
    parent: np.ndarray  # int32 [num_rows], place of the parent's row (a root has 0); NONE for roots, or FOREIGN
    starts: np.ndarray  # int32 [num_requests + 1], first row of each request
