"""Access to vLLM's grammar masks and draft tokens of requests with structured output.

vLLM 0.32 and 0.33 lay out the masks differently. The distinction can be removed with the support for 0.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.structured_output import StructuredOutputManager

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.request import Request

# vLLM 0.33 also masks tokens that would end the reasoning with text that the grammar cannot start with, and it reserves
# 1 + num_speculative_tokens masks for every request. vLLM 0.32 has one mask for each scheduled row.
SINCE_0_33 = hasattr(StructuredOutputManager, "_masked_reasoning_ends")


def reserve_masks(manager: StructuredOutputManager) -> None:
    """Allocate a manager's masks for the most rows that a batch can have, unless they exist."""
    if manager._grammar_bitmask is None:
        config = manager.vllm_config
        rows = config.scheduler_config.max_num_seqs * (1 + config.num_speculative_tokens)
        manager._grammar_bitmask = manager.backend.allocate_token_bitmask(rows)


def fill_mask(manager: StructuredOutputManager, request: Request, row: int, applies: bool) -> None:
    """Write the mask for the current state of the request's grammar to row ``row`` of the manager's masks.

    If the grammar does not apply to this row, the mask allows every token.
    """
    entry: tuple[Any, ...] = (request.structured_output_request.grammar, row, applies)
    if SINCE_0_33:
        entry += (() if applies else manager._masked_reasoning_ends(request),)
    manager._fill_bitmasks((entry,))


def allow_all(manager: StructuredOutputManager, row: int) -> None:
    """Write a mask that allows every token to row ``row`` of the manager's masks."""
    manager._grammar_bitmask[row] = -1


def masks(manager: StructuredOutputManager, num_rows: int) -> torch.Tensor:
    """The manager's first ``num_rows`` masks, int32 [num_rows, vocabulary / 32]."""
    return manager._grammar_bitmask[:num_rows]


def next_request_row(manager: StructuredOutputManager, first: int, row: int) -> int:
    """The first mask of the next request, if this request's masks are ``first`` to ``row`` - 1."""
    return first + 1 + manager.vllm_config.num_speculative_tokens if SINCE_0_33 else row


def first_masks(output: GrammarOutput, rows: Sequence[tuple[int, int]]) -> GrammarOutput:
    """Keep the first masks of each request; ``rows`` says how many were scheduled and how many are kept."""
    if SINCE_0_33 or all(scheduled == kept for scheduled, kept in rows):
        return output  # vLLM 0.33 reads the masks of a request from the same place, however many there are
    places = np.concatenate([np.arange(scheduled) < kept for scheduled, kept in rows])
    return replace(output, grammar_bitmask=output.grammar_bitmask[places])


def set_drafts(request: Request, tokens: list[int]) -> None:
    """Set the draft tokens of a scheduler's ``Request``."""
    request.spec_token_ids = tokens


def set_scheduled_drafts(scheduler_output: SchedulerOutput, request_id: str, tokens: list[int]) -> None:
    """Set a request's draft tokens in a scheduled step, and mark none of them invalid."""
    scheduler_output.scheduled_spec_decode_tokens[request_id] = tokens
    scheduler_output.num_invalid_spec_tokens.pop(request_id, None)
