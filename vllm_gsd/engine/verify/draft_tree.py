"""Flattened token graphs on the host: one request's tree, the rows of all trees in a step, and the walks over them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from vllm_gsd.engine.schedule.grammar import GrammarTree
from vllm_gsd.method.constants import MERGED, NATIVE, NONE, NUM_ORIGINS, ORIGIN_GRAMMAR, ORIGIN_ROOT
from vllm_gsd.method.flatten import SOURCE_OF_COPIES, FlatTrees

# Parent of a row that has no node. No walk steps into such a row.
FOREIGN = -2

# The source of a node (NONE for roots and nodes of a grammar), indexed by ``via_merge`` and origin.
SOURCE_OF = np.full((2, NUM_ORIGINS), NATIVE, np.int8)
SOURCE_OF[1] = MERGED
SOURCE_OF[:, [*SOURCE_OF_COPIES]] = [*SOURCE_OF_COPIES.values()]
SOURCE_OF[:, [ORIGIN_ROOT, ORIGIN_GRAMMAR]] = NONE


@dataclass(frozen=True)
class FlatTree:
    """The flattened token graph of one request; place 0 is the root. Arrays have n + 1 places for n nodes."""

    token: np.ndarray  # int64
    parent: np.ndarray  # int32, the parent's place; NONE for the root
    depth: np.ndarray  # int32, root is 0
    origin: np.ndarray  # int8, ORIGIN_*
    via_merge: np.ndarray  # bool, whether the path to the place uses a merged edge
    survival: np.ndarray  # float32, uncalibrated

    @property
    def num_nodes(self) -> int:
        """Number of nodes, without the root."""
        return len(self.token) - 1

    @property
    def drafts(self) -> list[int]:
        """What vLLM schedules: the tokens of the nodes, without the root."""
        return self.token[1:].tolist()

    def first(self, num_nodes: int) -> FlatTree:
        """The tree of the root and the first ``num_nodes`` nodes."""
        return FlatTree(*(getattr(self, field.name)[: 1 + num_nodes] for field in fields(self)))

    def select(self, allowed: GrammarTree) -> FlatTree:
        """The tree of the nodes that ``allowed_nodes`` returned. Nodes that the grammar added have survival 1."""
        places = np.asarray(allowed.places, np.int64)
        paths = [tuple(path) for path in allowed.paths if path is not None]
        place_of = {path: place for place, path in enumerate(paths)}

        def of_draft(values: np.ndarray, otherwise: float) -> np.ndarray:
            # Nodes that the grammar added have place NONE, which is -1: the appended last entry.
            return np.append(values, np.asarray(otherwise, values.dtype))[places]

        return FlatTree(
            np.array(allowed.tokens, np.int64),
            np.array([NONE, *(place_of[path[:-1]] for path in paths[1:])], np.int32),
            np.array([len(path) for path in paths], np.int32),
            of_draft(self.origin, ORIGIN_GRAMMAR),
            of_draft(self.via_merge, False),
            of_draft(self.survival, 1),
        )


# The tree of a root whose token does not matter.
NO_NODES = FlatTree(
    token=np.full(1, NONE, np.int64),
    parent=np.full(1, NONE, np.int32),
    depth=np.zeros(1, np.int32),
    origin=np.full(1, ORIGIN_ROOT, np.int8),
    via_merge=np.zeros(1, np.bool_),
    survival=np.ones(1, np.float32),
)


def flat_tree(trees: FlatTrees, row: int, num_nodes: int) -> FlatTree:
    """The root and the first ``num_nodes`` nodes of one tree of a batch."""
    return FlatTree(*(getattr(trees, field.name)[row, : 1 + num_nodes] for field in fields(FlatTree)))


class WalkTrees(NamedTuple):
    """The rows to verify, request by request. Each request's first row is its root."""

    token: np.ndarray  # int64 [num_rows]
    parent: np.ndarray  # int32 [num_rows], the parent's place in its tree; NONE for roots, or FOREIGN
    starts: np.ndarray  # int32 [num_requests + 1], first row of each request


class Paths(NamedTuple):
    """The accepted path of each request. On the device, ``ops.walk.api.Accepted`` holds the same."""

    tokens: np.ndarray  # int [num_requests, levels], the accepted nodes' tokens, the bonus token, and padding
    num_tokens: np.ndarray  # int [num_requests], tokens that are not padding; 0 for a request that emits nothing
    last: np.ndarray  # int [num_requests], place in its tree at which the walk ended; 0 is the root
