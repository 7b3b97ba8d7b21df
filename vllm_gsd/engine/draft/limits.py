"""How many KV slots beyond the committed text a step may touch."""

from vllm_gsd.config import GSDConfig


def draft_kv_slots(config: GSDConfig) -> int:
    """Draft KV slots per request: nodes the draft model may be run on in one step.

    More nodes are drafted than verified, since a level can push earlier nodes below the N best; twice N covers that
    with rare exceptions, where growth stops early.
    """
    return 2 * config.num_speculative_tokens if config.model is not None else 0


def num_lookahead_tokens(config: GSDConfig) -> int:
    """Slots to reserve past the tokens scheduled for the target: the root's draft KV and the drafted nodes'."""
    return 1 + draft_kv_slots(config) if config.model is not None else 0
