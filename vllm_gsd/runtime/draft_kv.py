"""Which draft KV is valid, per physical block.

The draft model shares the target's blocks, and vLLM's prefix cache hands a block on as soon as the *target's*
keys and values are in it. Where the draft did not run (speculation off for a request, no room, a fallback) such a
block has none of the draft's: drafting from it would stay lossless and accept nothing. So validity is tracked
per block, and whatever is missing is computed before the draft is used.
"""

import numpy as np


class DraftKVTracker:
    """Follows the scheduler's block assignments and the draft model's writes.

    Args:
        num_blocks: physical blocks of the KV cache.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.valid = np.zeros(num_blocks, np.int32)  # leading tokens of each block with draft KV
        self.blocks: dict[str, list[int]] = {}
        self.length: dict[str, int] = {}  # leading tokens of each request with draft KV

    def admit(self, request_id: str, block_ids: list[int], num_cached_tokens: int) -> None:
        """A request starts (or resumes) with these blocks, the first of them from the prefix cache.

        Args:
            num_cached_tokens: tokens whose target KV is cached already; blocks beyond them are fresh.
        """
        num_cached_blocks = num_cached_tokens // self.block_size
        self.valid[block_ids[num_cached_blocks:]] = 0
        self.blocks[request_id] = list(block_ids)
        length = 0
        for block in block_ids[:num_cached_blocks]:
            length += int(self.valid[block])
            if self.valid[block] < self.block_size:
                break
        self.length[request_id] = length

    def extend(self, request_id: str, block_ids: list[int]) -> None:
        """A running request got further, fresh blocks."""
        self.valid[block_ids] = 0
        self.blocks[request_id].extend(block_ids)

    def advance(self, request_id: str, length: int) -> None:
        """The draft model has now written KV of the request's first ``length`` committed tokens."""
        start = self.length[request_id]
        blocks = self.blocks[request_id]
        for index in range(start // self.block_size, (length - 1) // self.block_size + 1):
            self.valid[blocks[index]] = min(self.block_size, length - index * self.block_size)
        self.length[request_id] = length

    def remove(self, request_id: str) -> None:
        """A request is gone; its blocks keep what they hold for the prefix cache."""
        self.blocks.pop(request_id, None)
        self.length.pop(request_id, None)

    def update(self, scheduler_output) -> None:
        """Apply one step's ``SchedulerOutput`` (a single KV cache group is assumed)."""
        for request_id in scheduler_output.finished_req_ids:
            self.remove(request_id)
        for request in scheduler_output.scheduled_new_reqs:
            self.admit(request.req_id, request.block_ids[0], request.num_computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            new_blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                self.admit(request_id, new_blocks[0], cached.num_computed_tokens[index])
            elif new_blocks is not None:
                self.extend(request_id, new_blocks[0])
