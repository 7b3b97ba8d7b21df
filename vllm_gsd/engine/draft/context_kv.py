"""Draft KV of committed text for drafts of whole blocks, which compute it from the target's hidden states.

Each target step computes the draft's keys and values of all its rows and writes them to the slots of the target's own.
When nodes are accepted, both move together. So a block of the KV cache that has the target's keys and values has the
draft's too: also those that the prefix cache serves.
"""

from collections.abc import Callable
from typing import Any

import torch

from vllm_gsd.engine.verify.target_kv import target_kv_of
from vllm_gsd.upstream.drafts import normalise_keys_by_layer, pack_context_projections


class ContextKV:
    """Writes and moves the draft's keys and values.

    Args:
        model: vLLM's draft model, a ``DFlashQwen3ForCausalLM`` or a subclass, such as ``Gemma4DSparkForCausalLM``.
        layers: its attention layers by name.
        packs: whether our kernel for CPUs shall multiply with a weight.
    """

    def __init__(self, model: Any, layers: dict[str, Any], packs: Callable[[torch.Tensor], bool]):
        self.model = model
        self.kv = target_kv_of(layers, list(layers), [])
        if next(model.parameters()).device.type == "cpu":
            normalise_keys_by_layer(model)
            pack_context_projections(model, packs)

    def write(self, slots: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> None:
        """Compute keys and values of ``states`` [n, hidden] at ``positions`` and store them in ``slots``, int64 [n]."""
        self.model.precompute_and_store_context_kv(states, positions, slots)

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        self.kv.move(sources, destinations)


def compute_idle(model: Any, states: torch.Tensor) -> None:
    """Compute keys and values without storing them, so that the memory that this takes can be measured."""
    positions = torch.zeros(len(states), dtype=torch.int64, device=states.device)
    model.precompute_and_store_context_kv(states, positions, None)
