"""Draft KV of committed text for drafts of whole blocks, which compute it from the target's hidden states.

Each target step computes the draft's keys and values of all its rows and writes them to the slots of the target's own.
When nodes are accepted, both move together. So a block of the KV cache that has the target's keys and values has the
draft's too: also those that the prefix cache serves.
"""

from typing import Any

import torch

from vllm_gsd.engine.verify.target_kv import target_kv_of


class ContextKV:
    """Writes and moves the draft's keys and values.

    Args:
        model: vLLM's draft model, a ``DFlashQwen3ForCausalLM`` or a subclass, such as ``Gemma4DSparkForCausalLM``.
        layers: its attention layers by name.
    """

    def __init__(self, model: Any, layers: dict[str, Any]):
        self.model = model
        self.norm = model.model.hidden_norm
        self.layers = [layer.self_attn for layer in model.model.layers]
        self.kv = target_kv_of(layers, list(layers), [])

    def write(self, slots: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> None:
        """Compute keys and values of ``states`` [n, hidden] at ``positions`` and store them in ``slots``, int64 [n]."""
        if layers_at_once(states.device):
            self.model.precompute_and_store_context_kv(states, positions, slots)
            return
        states = self.norm(states)
        for layer in self.layers:
            keys, values = _of_gemma4(layer, states) if hasattr(layer, "v_norm") else _of_qwen3(layer, states)
            keys, _ = layer.rotary_emb(positions, keys, None)
            heads = layer.num_kv_heads, layer.head_dim
            attn = layer.attn
            attn.impl.do_kv_cache_update(attn, keys.view(-1, *heads), values.view(-1, *heads), attn.kv_cache, slots)

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        self.kv.move(sources, destinations)


def layers_at_once(device: torch.device) -> bool:
    """Whether vLLM's own method serves, which takes few launches for all layers.

    On CPUs its kernel normalises the keys of every layer with the first layer's weights.
    """
    return device.type != "cpu"


def compute_idle(model: Any, states: torch.Tensor) -> None:
    """Compute keys and values on a GPU without storing them, so that the memory that this takes can be measured."""
    if layers_at_once(states.device):
        positions = torch.zeros(len(states), dtype=torch.int64, device=states.device)
        model.precompute_and_store_context_kv(states, positions, None)


def _of_qwen3(layer: Any, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    projected, _ = layer.qkv_proj(states)
    _, keys, values = projected.split([layer.q_size, layer.kv_size, layer.kv_size], dim=-1)
    keys = layer.k_norm(keys.unflatten(-1, (-1, layer.head_dim))).flatten(1)
    return keys, values if layer.v_scale is None else values * layer.v_scale


def _of_gemma4(layer: Any, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    projected = layer.k_proj(states)[0].unflatten(-1, (-1, layer.head_dim))  # keys are values too
    return layer.k_norm(projected).flatten(1), layer.v_norm(projected).flatten(1)
