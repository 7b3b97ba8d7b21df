"""How many KV slots a step may use beyond the committed text."""

from vllm_gsd.config import GSDConfig


def draft_kv_slots(config: GSDConfig) -> int:
    """Draft KV slots per request, which is the most nodes that the draft model runs in one step.

    The draft runs on more nodes than are verified, because a level can push earlier nodes out of the N best. Twice N
    is nearly always enough; otherwise growth stops early.
    """
    return 2 * config.num_speculative_tokens if config.model is not None else 0


def num_lookahead_tokens(config: GSDConfig) -> int:
    """Slots to reserve after the tokens scheduled for the target: draft KV of the root and of the drafted nodes."""
    return 1 + draft_kv_slots(config) if config.model is not None else 0
