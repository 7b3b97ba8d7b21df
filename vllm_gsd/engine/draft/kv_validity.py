"""Tracks which draft KV is valid, per physical block.

The draft model shares the target's blocks. vLLM's prefix cache reuses a block as soon as it holds the *target's* keys
and values. The block may lack the draft's, because the draft did not run for that request. Drafting from such a block
would remain lossless but lower the acceptance length. So validity is tracked per block, and missing draft KV is
computed before the draft is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class DraftKVTracker:
    """Follows the scheduler's block assignments and the draft model's writes.

    Args:
        shift: how many tokens after its own the draft's row of a token reads. The last rows of a cached text belong to
            the text that followed it when it was cached, so they are computed again.
    """

    def __init__(self, num_blocks: int, block_size: int, shift: int = 0):
        self.block_size = block_size
        self.shift = shift
        self.valid = np.zeros(num_blocks, np.int32)  # per block, number of leading tokens that have draft KV
        self.blocks: dict[str, list[int]] = {}
        self.length: dict[str, int] = {}  # per request, number of leading tokens that have draft KV
        self.shared: dict[str, int] = {}  # per request, number of leading tokens whose draft KV may be another's

    def admit(self, starting: list[tuple[str, list[int], int]]) -> None:
        """Track requests that start or resume in this step.

        Args:
            starting: for each request its id, its blocks, and the number of its tokens that have target KV from the
                prefix cache. Blocks after those tokens are newly allocated.
        """
        # A request may share blocks that were allocated to another in this step, so reset all new blocks first.
        for _, blocks, num_cached in starting:
            self.valid[blocks[num_cached // self.block_size :]] = 0
        for request_id, blocks, num_cached in starting:
            self.blocks[request_id], self.length[request_id] = list(blocks), 0
            self.shared[request_id] = num_cached // self.block_size * self.block_size - self.shift
            self._follow(request_id)

    def extend(self, request_id: str, block_ids: list[int]) -> None:
        """Track newly allocated blocks of a running request."""
        self.valid[block_ids] = 0
        self.blocks[request_id].extend(block_ids)

    def lengths(self, request_ids: Sequence[str]) -> np.ndarray:
        """The number of leading tokens that have draft KV, int64 [num_requests]."""
        return np.array([self._follow(request_id) for request_id in request_ids], np.int64)

    def _follow(self, request_id: str) -> int:
        """The request's length, after other requests may have written draft KV into the blocks that it shares."""
        length, shared, blocks = self.length[request_id], self.shared[request_id], self.blocks[request_id]
        while length < shared:
            place = length // self.block_size
            found = place * self.block_size + int(self.valid[blocks[place]])
            if found <= length:
                break
            length = self.length[request_id] = min(found, shared)
        return length

    def advance(self, request_id: str, length: int) -> None:
        """Record that the draft model has written KV for the request's first ``length`` committed tokens."""
        start = self.length[request_id]
        blocks = self.blocks[request_id]
        for index in range(start // self.block_size, (length - 1) // self.block_size + 1):
            self.valid[blocks[index]] = min(self.block_size, length - index * self.block_size)
        self.length[request_id] = length

    def remove(self, request_id: str) -> None:
        """Stop tracking a request. The validity of its blocks remains, since the prefix cache may reuse them."""
        for known in (self.blocks, self.length, self.shared):
            known.pop(request_id, None)

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Apply the block assignments of one step. There must be a single KV cache group."""
        for request_id in scheduler_output.finished_req_ids:
            self.remove(request_id)
        starting = [(r.req_id, r.block_ids[0], r.num_computed_tokens) for r in scheduler_output.scheduled_new_reqs]
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            new_blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                starting.append((request_id, new_blocks[0], cached.num_computed_tokens[index]))
            elif new_blocks is not None:
                self.extend(request_id, new_blocks[0])
        self.admit(starting)
