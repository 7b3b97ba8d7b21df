"""How many KV slots a step may use beyond the committed text, and how much text the draft may read in it."""

import numpy as np

from vllm_gsd.config import GSDConfig
from vllm_gsd.config.draft_check import kind_of_model
from vllm_gsd.config.draft_kind import BLOCK_KINDS

# Tokens of texts that the draft may catch up on in a step; more if the target reads more tokens in a step.
MOST_MISSED = 4096
# What the draft has missed of a text that is too long for it: more tokens than any text has.
TOO_LONG = 1 << 40


def draft_kv_slots(config: GSDConfig) -> int:
    """Draft KV slots per request, which is the most nodes that the draft model runs in one step.

    The draft runs on more nodes than are verified, because a level can push earlier nodes out of the N best. Twice N
    is nearly always enough; otherwise growth stops early.
    """
    return 2 * config.num_speculative_tokens


def num_lookahead_tokens(config: GSDConfig) -> int:
    """Slots to reserve after the tokens scheduled for the target: draft KV of the root and of what is drafted."""
    if config.model is None:
        return 0
    # A block has at most as many rows behind the root as a graph has nodes.
    blocks = kind_of_model(config.model) in BLOCK_KINDS
    return 1 + (config.num_speculative_tokens if blocks else draft_kv_slots(config))


def within_reach(missed: np.ndarray, most: int) -> np.ndarray:
    """The requests that the draft may catch up on in one step: those of which it has missed the least.

    Args:
        missed: int64 [n], the tokens of each request that the draft has not read.
        most: limit on the missed tokens of one request, and of all chosen requests but the last together.

    Returns:
        int64 [at most n], indices into ``missed``, the least missed first.
    """
    order = np.argsort(missed, kind="stable")
    missed = missed[order]
    return order[(missed <= most) & (missed.cumsum() - missed < most)]
