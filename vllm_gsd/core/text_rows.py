"""Rows of committed text that the draft model has yet to run over, and where rows lie in the paged KV cache."""

import numpy as np

from vllm_gsd.core.compiled import compiled


@compiled
def next_rows(done, due, most, counts):
    """How many tokens of each text one forward runs: text by text, until it is full.

    Args:
        done, due: int64 [num_requests], tokens that it has run already, and that it is to have run.
        most: rows of a forward.
        counts: output, int64 [num_requests].

    Returns:
        rows of the forward.
    """
    left = most
    for row in range(len(due)):
        counts[row] = min(max(due[row] - done[row], 0), left)
        left -= counts[row]
    return most - left


@compiled
def text_rows(done, counts, token_ids, token_rows, token, position, request):
    """Write the next rows of each request, request by request.

    Args:
        done, counts: int64 [num_requests], tokens before the rows, and rows of each request.
        token_ids: int32 [any, most tokens]; token_rows: int64 [num_requests], each request's row of it.
        token, position, request: outputs, int64 [sum(counts)].
    """
    line = 0
    for row in range(len(counts)):
        for place in range(counts[row]):
            position[line] = done[row] + place
            token[line] = token_ids[token_rows[row], position[line]]
            request[line] = row
            line += 1


@compiled
def kv_slots(block_table, rows, positions, block_size):
    """Physical KV slots, int64 [n].

    Args:
        block_table: int32 [any, max_blocks]; rows: int64 [n], whose blocks.
        positions: int64 [n], logical positions; those below 0 lie at 0.
    """
    slots = np.empty(len(rows), np.int64)
    for line in range(len(rows)):
        place = max(positions[line], 0)
        slots[line] = block_table[rows[line], place // block_size] * np.int64(block_size) + place % block_size
    return slots
