"""Grammar masks and drafts of requests with structured output, as the installed vLLM keeps them.

Versions 0.32 and 0.33 differ in masks; what tells them apart goes when 0.32 is no longer supported.
"""

from typing import Any

import torch
from vllm.v1.structured_output import StructuredOutputManager

# 0.33 keeps tokens out that would end reasoning with what the grammar cannot begin with, and gives every request as
# many masks as its graph could have rows; 0.32 has a mask for each row that there is.
SINCE_0_33 = hasattr(StructuredOutputManager, "_masked_reasoning_ends")


def reserve_masks(manager: StructuredOutputManager) -> None:
    """Have a manager's masks allocated, enough for every row that a batch can have."""
    if manager._grammar_bitmask is None:
        config = manager.vllm_config
        rows = config.scheduler_config.max_num_seqs * (1 + config.num_speculative_tokens)
        manager._grammar_bitmask = manager.backend.allocate_token_bitmask(rows)


def fill_mask(manager, request, row: int, applies: bool) -> None:
    """Write the mask of the grammar's present state to a row of the manager's; all is allowed if it doesn't apply."""
    entry: tuple[Any, ...] = (request.structured_output_request.grammar, row, applies)
    if SINCE_0_33:
        entry += (() if applies else manager._masked_reasoning_ends(request),)
    manager._fill_bitmasks((entry,))


def allow_all(manager, row: int) -> None:
    """Write a mask that allows everything to a row of the manager's."""
    manager._grammar_bitmask[row] = -1


def masks(manager, num_rows: int) -> torch.Tensor:
    """The manager's first masks, int32 [num_rows, vocabulary / 32]."""
    return manager._grammar_bitmask[:num_rows]


def next_request_row(manager, first: int, row: int) -> int:
    """Where the next request's masks begin, after one's that begin at ``first`` and end before ``row``."""
    return first + 1 + manager.vllm_config.num_speculative_tokens if SINCE_0_33 else row


def set_drafts(request, tokens: list[int]) -> None:
    """The draft tokens of a scheduler's ``Request``, from now on."""
    request.spec_token_ids = tokens


def set_scheduled_drafts(scheduler_output, request_id: str, tokens: list[int]) -> None:
    """The draft tokens of a request in a step that is scheduled; none of them counts as invalid."""
    scheduler_output.scheduled_spec_decode_tokens[request_id] = tokens
    scheduler_output.num_invalid_spec_tokens.pop(request_id, None)
