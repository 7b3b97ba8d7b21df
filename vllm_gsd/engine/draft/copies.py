"""Hypotheses that are copied from texts: the request's own (``"ngram"``) and other requests' responses (``"shared"``).

A further source of this kind is added here, for both model runners.
"""

from collections.abc import Sized

import numpy as np

from vllm_gsd.config import GSDConfig
from vllm_gsd.engine.draft.batch import DraftBatch, GraphRequests
from vllm_gsd.engine.draft.shared_suffixes import SharedSuffixes
from vllm_gsd.host import graft_all_ngrams
from vllm_gsd.method.constants import NGRAM, NUM_ORIGINS, OFF_BELOW, SHARED
from vllm_gsd.method.flatten import SOURCE_OF_COPIES
from vllm_gsd.method.graph import GraphBatch

# Shortest suffix whose earlier occurrence counts as an n-gram match.
MIN_NGRAM_MATCH = 2
# For each origin, whether its nodes are copied from a text.
COPIED = np.zeros(NUM_ORIGINS, np.bool_)
COPIED[[*SOURCE_OF_COPIES]] = True
# The sources of ``Copies.packed``: the host looks them up for graphs that grow on the device.
PACKED = {"shared"}


def leave_out_copies(trust: np.ndarray, graphs: np.ndarray) -> None:
    """Graft no copies onto ``graphs``, bool [num_graphs], as if their requests rejected these; updates ``trust``."""
    trust[graphs, NGRAM] = trust[graphs, SHARED] = 0.0


class Copies:
    """The sources that need no draft model, for graphs of which at most ``num_nodes`` nodes are verified."""

    def __init__(self, config: GSDConfig, num_nodes: int):
        self.num_nodes, self.top_k = num_nodes, config.top_k
        self.has_ngrams = "ngram" in config.sources
        self.shared = SharedSuffixes(config.shared_responses) if "shared" in config.sources else None

    def __bool__(self) -> bool:
        """Whether there is any such source."""
        return self.has_ngrams or self.shared is not None

    def graft(self, graphs: GraphBatch, requests: GraphRequests) -> None:
        """Add hypotheses to the graphs of all requests that accept enough of them."""
        batch, trust = requests.batch, requests.trust
        token_rows = batch.token_rows[requests.index]
        if self.has_ngrams:
            deepest = np.minimum(requests.max_depth, self.num_nodes)  # no verified path is longer
            limits = trust[:, NGRAM] >= OFF_BELOW, self.top_k, deepest, MIN_NGRAM_MATCH
            graft_all_ngrams(graphs, batch.token_ids, token_rows, requests.length, *limits)
        if self.shared is not None:
            for row in np.flatnonzero(trust[:, SHARED] >= OFF_BELOW):
                index, text = requests.index[row], batch.token_ids[token_rows[row], : requests.length[row]]
                owner = batch.request_ids[index], batch.requests[index].lora_request
                self.shared.graft(graphs, row, *owner, text, self.num_nodes)

    def packed(self, batch: DraftBatch, wanted: np.ndarray, trust: np.ndarray, words: int) -> np.ndarray | None:
        """What the host looks up for graphs that grow on the device; see ``SharedSuffixes.packed``."""
        if self.shared is None:
            return None
        return self.shared.packed(batch, wanted & (trust[:, SHARED] >= OFF_BELOW), words)

    def remember(self, cache_salts: dict[str, str]) -> None:
        """Store the cache salts of new requests, by request id."""
        if self.shared is not None:
            self.shared.salts.update(cache_salts)

    def clear(self) -> None:
        if self.shared is not None:
            self.shared.clear()

    def tables(self) -> list[Sized]:
        """Tables keyed by request."""
        return [] if self.shared is None else [self.shared.salts]
