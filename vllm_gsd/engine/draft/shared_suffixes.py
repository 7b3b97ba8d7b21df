"""Hypotheses from finished responses of other requests: source ``"shared"``, off unless asked for.

The suffix trees are arctic-inference's (SuffixDecoding, Oliaro et al., 2024). Responses are kept apart by adapter and
by cache salt: whoever may not share a prefix cache does not share suffixes either, and no prompt is ever kept. The
index is bounded by the number of responses, the oldest ones leaving first.
"""

from collections import deque
from typing import Any

import numpy as np

from vllm_gsd.host import graft_tree
from vllm_gsd.method.constants import ORIGIN_SHARED

# Longest context compared plus continuation; memory grows with it.
TREE_DEPTH = 48
# Of longer responses only the end is kept.
MOST_TOKENS = 4096
# A match of n tokens is continued by at most this many times n.
REACH = 4.0
# Continuations that were seen less often than this, given the match, are left out.
LEAST_SHARE = 0.05
# A continuation is taken for at least as sure as that of an n-gram of so many tokens in the own text.
LEAST_MATCH = 2
# Trees are read in the name of a request that never ends.
READER = "reader"


class SharedSuffixes:
    """Finished responses, findable by any of their suffixes.

    Args:
        most_responses: most responses kept, over all adapters and salts.
    """

    def __init__(self, most_responses: int):
        self.most_responses = most_responses
        self.salts: dict[str, str] = {}  # of running requests that have one
        self.caches: dict[Any, Any] = {}  # by who may see them
        self.kept: deque[tuple[Any, int]] = deque()  # oldest first
        self.next_id = 0

    def finished(self, request_id: str, lora_request: Any, response: list[int]) -> None:
        """Keep a finished request's response (token ids; negative ones are placeholders).

        Args:
            lora_request: vLLM's ``LoRARequest`` of it, or None.
        """
        reader = self._reader(request_id, lora_request)
        self.salts.pop(request_id, None)
        tokens = np.array([token for token in response[-MOST_TOKENS:] if token >= 0], np.int32)
        if len(tokens) < 2:
            return  # nothing follows anything
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

    def graft(self, graphs, row: int, request_id: str, lora_request, text: np.ndarray, num_nodes: int) -> None:
        """Add continuations of the text's longest known suffixes to a graph.

        Args:
            graphs, row: GraphBatch and the graph in it.
            lora_request: vLLM's ``LoRARequest`` of the request, or None.
            text: int32 [length], its committed tokens.
            num_nodes: most nodes worth adding.
        """
        cache = self.caches.get(self._reader(request_id, lora_request))
        if cache is None:
            return
        latest = np.ascontiguousarray(text[-(TREE_DEPTH // 2) :], np.int32)
        found = cache.speculate(READER, latest, num_nodes, REACH, 0.0, LEAST_SHARE, use_tree_spec=True)
        tokens, parents = np.array(found.token_ids, np.int64), np.array(found.parents, np.int32)
        shares = np.array(found.probs, np.float32)
        # Of matches that promise the same the shortest is named.
        matched = max(LEAST_MATCH, found.match_len)
        graft_tree(graphs, row, tokens, parents, shares, matched, ORIGIN_SHARED)

    def clear(self) -> None:
        """Forget all responses."""
        while self.kept:
            self._drop_oldest()

    def _reader(self, request_id: str, lora: Any) -> tuple[Any, str | None]:
        """Who may see a request's response: whoever runs the same adapter with the same salt."""
        adapter = None if lora is None else (lora.lora_int_id, lora.lora_name, lora.lora_path)
        return adapter, self.salts.get(request_id)

    def _drop_oldest(self) -> None:
        reader, oldest = self.kept.popleft()
        self.caches[reader].evict_cached_response(oldest)
        if len(self.caches[reader].cached_requests) == 1:  # only the one that reads
            del self.caches[reader]
