"""Rows of committed text that the draft model has not run yet, and their slots in the paged KV cache."""

import numpy as np


def next_rows(done: np.ndarray, due: np.ndarray, most: int, counts: np.ndarray) -> int:
    """Choose how many tokens of each text a forward runs: text by text, until the forward is full.

    Args:
        done, due: int64 [num_requests], number of tokens already run, and to be run in total.
        most: maximum number of rows of a forward.
        counts: output, int64 [num_requests].

    Returns:
        number of rows of the forward.
    """
    left = most
    for row, wanted in enumerate((due - done).tolist()):
        counts[row] = min(max(wanted, 0), left)
        left -= int(counts[row])
    return most - left


def text_rows(
    done: np.ndarray,
    counts: np.ndarray,
    token_ids: np.ndarray,
    token_rows: np.ndarray,
    token: np.ndarray,
    position: np.ndarray,
    request: np.ndarray,
) -> None:
    """Write the next rows of each request, request by request.

    Args:
        done, counts: int64 [num_requests], number of tokens before the rows, and number of rows, of each request.
        token_ids: int32 [rows, max_tokens]; token_rows: int64 [num_requests], each request's row in it.
        token, position, request: outputs, int64 [sum(counts)].
    """
    line = 0
    for row in range(len(counts)):
        for place in range(counts[row]):
            position[line] = done[row] + place
            token[line] = token_ids[token_rows[row], position[line]]
            request[line] = row
            line += 1


def kv_slots(block_table: np.ndarray, rows: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Physical KV slots, int64 [n].

    Args:
        block_table: int32 [num_requests, max_blocks]; rows: int64 [n], request of each position.
        positions: int64 [n], logical positions; negative ones count as 0.
    """
    index, offset = np.divmod(np.maximum(positions, 0), block_size)
    return block_table[rows, index].astype(np.int64) * block_size + offset
