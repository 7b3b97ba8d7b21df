"""What grammar masks look like in the installed vLLM: 0.32 or 0.33. Goes when 0.32 is no longer supported."""

from typing import Any

from vllm.v1.structured_output import StructuredOutputManager

# 0.33 keeps tokens out that would end reasoning with what the grammar cannot begin with, and gives every request as
# many masks as its graph could have rows; 0.32 has a mask for each row that there is.
SINCE_0_33 = hasattr(StructuredOutputManager, "_masked_reasoning_ends")


def fill_mask(manager, request, row: int, applies: bool) -> None:
    """Write the mask of the grammar's present state to a row of the manager's; all is allowed if it doesn't apply."""
    entry: tuple[Any, ...] = (request.structured_output_request.grammar, row, applies)
    if SINCE_0_33:
        entry += (() if applies else manager._masked_reasoning_ends(request),)
    manager._fill_bitmasks((entry,))


def next_request_row(manager, first: int, row: int) -> int:
    """Where the next request's masks begin, after one's that begin at ``first`` and end before ``row``."""
    return first + 1 + manager.vllm_config.num_speculative_tokens if SINCE_0_33 else row
