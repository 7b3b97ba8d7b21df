"""A request's flattened graph on its way from the drafter to the target, and the rows of all of them in a step."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_gsd.engine.schedule.grammar import KeptTree
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

# Parent of a row that belongs to no tree of ours: no walk ever steps into it.
FOREIGN = -2

# Source of nodes (NONE for those of a grammar), by whether they lie behind a merged edge and by origin.
SOURCE_OF = np.full((2, NUM_ORIGINS), NATIVE, np.int8)
SOURCE_OF[1] = MERGED
SOURCE_OF[:, [ORIGIN_NGRAM, ORIGIN_SHARED, ORIGIN_AGREED, ORIGIN_GRAMMAR]] = NGRAM, SHARED, AGREED, NONE


@dataclass(frozen=True)
class DraftTree:
    """The flattened graph proposed for one request; place 0 is the first node below the root."""

    token: np.ndarray  # int64 [n]
    parent: np.ndarray  # int32 [n], NONE for children of the root
    depth: np.ndarray  # int32 [n]
    origin: np.ndarray  # int8 [n], ORIGIN_* of each node
    via_merge: np.ndarray  # bool [n]
    survival: np.ndarray  # float32 [n], as promised by its source

    def select(self, kept: KeptTree) -> "DraftTree":
        """The tree of these nodes; those that the grammar suggests are taken for sure."""
        places = np.asarray(kept.places, np.int64)
        row = {tuple(path): index for index, path in enumerate(kept.paths)}

        def of_draft(values: np.ndarray, otherwise) -> np.ndarray:
            # NONE, for nodes that the grammar suggests, is -1: the last entry.
            return np.append(values, np.asarray(otherwise, values.dtype))[places]

        return DraftTree(
            np.array(kept.tokens, np.int64),
            np.array([row.get(tuple(path[:-1]), NONE) for path in kept.paths], np.int32),
            np.array([len(path) for path in kept.paths], np.int32),
            of_draft(self.origin, ORIGIN_GRAMMAR),
            of_draft(self.via_merge, False),
            of_draft(self.survival, 1),
        )


NO_NODES = DraftTree(*(np.zeros(0, kind) for kind in (np.int64, np.int32, np.int32, np.int8, np.bool_, np.float32)))


class WalkTrees(NamedTuple):
    """Rows to verify, request by request, the root of each first."""

    token: np.ndarray  # int64 [num_rows]
    parent: np.ndarray  # int32 [num_rows], place in the own tree; NONE for roots, FOREIGN where there is no tree
    starts: np.ndarray  # int32 [num_requests + 1]
