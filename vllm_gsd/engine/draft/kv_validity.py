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

    def admit(self, starting: list[tuple[str, list[int], int]]) -> None:
        """Requests start (or resume) in one step.

        Args:
            starting: request, its blocks, and how many of its tokens have target KV from the prefix cache; blocks
                beyond those tokens are fresh.
        """
        # A request may share blocks that another was given in this very step: empty all fresh ones before counting.
        for _, blocks, num_cached in starting:
            self.valid[blocks[num_cached // self.block_size :]] = 0
        for request_id, blocks, num_cached in starting:
            self.blocks[request_id] = list(blocks)
            length = 0
            for block in blocks[: num_cached // self.block_size]:
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
        starting = [(r.req_id, r.block_ids[0], r.num_computed_tokens) for r in scheduler_output.scheduled_new_reqs]
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            new_blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                starting.append((request_id, new_blocks[0], cached.num_computed_tokens[index]))
            elif new_blocks is not None:
                self.extend(request_id, new_blocks[0])
        self.admit(starting)
