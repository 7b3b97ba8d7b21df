"""Draft tokens from finished responses of other requests: the optional source ``"shared"``.

The suffix trees are arctic-inference's (SuffixDecoding, Oliaro et al., 2024). Responses are separated by LoRA adapter
and cache salt, so requests that may not share a prefix cache do not share suffixes either. Prompts are never stored.
The number of stored responses is bounded; the oldest are evicted first.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_gsd.engine.schedule.text_end import text_of
from vllm_gsd.host import graft_tree
from vllm_gsd.method.constants import NONE, ORIGIN_SHARED
from vllm_gsd.ops.ngram.api import pack_tree

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from vllm_gsd.engine.draft.batch import DraftBatch
    from vllm_gsd.method.graph import GraphBatch

# An adapter (None for the base model) and a cache salt: only requests with the same pair share responses.
Reader = tuple[tuple[int, str, str] | None, str | None]

# Depth of the suffix trees: the longest matched context plus its continuation. Memory grows with it.
TREE_DEPTH = 48
# Only the last tokens of a longer response are stored.
MOST_TOKENS = 4096
# A match of n tokens is continued by at most REACH * n tokens.
REACH = 4.0
# Continuations with a smaller share of the occurrences of the match are left out.
LEAST_SHARE = 0.05
# A continuation is trusted at least as much as that of an n-gram match of this length in the request's own text.
LEAST_MATCH = 2
# Id of the request that never ends and in whose name the suffix trees are read.
READER = "reader"


class SuffixTree(NamedTuple):
    """Continuations of a text; the fields are arguments of ``method.ngram.graft_tree``."""

    tokens: np.ndarray
    parents: np.ndarray
    shares: np.ndarray
    matched: int


class SharedSuffixes:
    """An index of finished responses by their suffixes, at most ``most_responses`` over all adapters and salts."""

    def __init__(self, most_responses: int):
        self.most_responses = most_responses
        self.salts: dict[str, str] = {}  # cache salts of running requests that have one
        self.caches: dict[Reader, Any] = {}  # arctic-inference's ``SuffixDecodingCache`` per reader
        self.kept: deque[tuple[Reader, int]] = deque()  # oldest first
        self.next_id = 0

    def finished(self, request_id: str, record: Any, response: list[int]) -> None:
        """Store the response of a finished request, without negative token ids, which are placeholders.

        ``record`` is the runner's record of the request.
        """
        reader = self._reader(request_id, record.lora_request)
        self.forget(request_id)
        response = text_of(record.sampling_params, response)
        tokens = np.array([token for token in response[-MOST_TOKENS:] if token >= 0], np.int32)
        if len(tokens) < 2:
            return  # there is no continuation to store
        if reader not in self.caches:
            from arctic_inference.suffix_decoding import SuffixDecodingCache

            self.caches[reader] = SuffixDecodingCache(TREE_DEPTH, -1)
            self.caches[reader].start_request(READER, [])
        cache = self.caches[reader]
        cache.start_request(self.next_id, [])
        cache.add_active_response(self.next_id, tokens)
        cache.stop_request(self.next_id)
        self.kept.append((reader, self.next_id))
        self.next_id += 1
        while len(self.kept) > self.most_responses:
            self._drop_oldest()

    def forget(self, request_id: str) -> None:
        """Drop the cache salt of a request that has ended, with or without a response."""
        self.salts.pop(request_id, None)

    def graft(self, graphs: GraphBatch, row: int, *request: Any) -> None:
        """Add continuations of the text's longest known suffixes to a token graph; ``request`` as for ``find``."""
        if (found := self.find(*request)) is not None:
            graft_tree(graphs, row, *found, ORIGIN_SHARED)

    def find(
        self, request_id: str, lora_request: LoRARequest | None, text: np.ndarray, num_nodes: int
    ) -> SuffixTree | None:
        """Look up at most ``num_nodes`` tokens that continue the longest known suffixes of ``text``, int32 [length].

        Returns None if nothing may be read.
        """
        cache = self.caches.get(self._reader(request_id, lora_request))
        if cache is None:
            return None
        latest = np.ascontiguousarray(text[-(TREE_DEPTH // 2) :], np.int32)
        found = cache.speculate(READER, latest, num_nodes, REACH, 0.0, LEAST_SHARE, use_tree_spec=True)
        # In arctic-inference's lists, place 0 is the first node below the root.
        return SuffixTree(
            np.array([NONE, *found.token_ids], np.int64),
            np.array([NONE, *(1 + parent for parent in found.parents)], np.int32),
            np.array([1.0, *found.probs], np.float32),
            # Of equally good matches, arctic-inference reports the shortest.
            max(LEAST_MATCH, found.match_len),
        )

    def packed(self, batch: DraftBatch, wanted: np.ndarray, words: int) -> np.ndarray:
        """Look up continuations of the texts of the ``wanted`` requests, as far as the host knows these texts.

        Returns:
            int32 [num_requests, words] for ``ops.ngram.api.graft_trees``, zeros for requests without continuations.
        """
        trees = np.zeros((len(wanted), words), np.int32)
        for place in np.flatnonzero(wanted):
            length, lora_request = int(batch.length[place]), batch.requests[place].lora_request
            text = batch.token_ids[batch.token_rows[place], :length]
            found = self.find(batch.request_ids[place], lora_request, text, words // 3 - 2)
            if found is not None:
                pack_tree(trees[place], *found, length)
        return trees

    def clear(self) -> None:
        while self.kept:
            self._drop_oldest()

    def _reader(self, request_id: str, lora: LoRARequest | None) -> Reader:
        """The adapter and cache salt that requests must have to share responses with this one."""
        adapter = None if lora is None else (lora.lora_int_id, lora.lora_name, lora.lora_path)
        return adapter, self.salts.get(request_id)

    def _drop_oldest(self) -> None:
        reader, oldest = self.kept.popleft()
        self.caches[reader].evict_cached_response(oldest)
        if len(self.caches[reader].cached_requests) == 1:  # only READER is left
            del self.caches[reader]
