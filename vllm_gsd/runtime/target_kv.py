"""The target's KV caches, for moving what was accepted to where plain decoding would have written it."""

import torch

from vllm_gsd.ops.kv_move import move_kv
from vllm_gsd.runtime.cpu_attention import kv_layout


class TargetKV:
    """Caches of all layers of a group but the draft's.

    Args:
        layers: attention layers by name, their caches allocated.
        names: of the group's layers.
        draft_layers: names of those to leave out.
    """

    def __init__(self, layers, names: list[str], draft_layers: list[str]):
        self.layers = [layers[name] for name in names if name not in set(draft_layers)]
        self.caches = [layer.kv_cache for layer in self.layers]
        self.layouts = [
            kv_layout(layer.isa, layer.kv_cache.shape[2], layer.head_size, layer.kv_cache.dtype)
            for layer in self.layers
        ]

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Move keys and values between slots, int64 [m] each; all reads come before all writes."""
        move_kv(self.caches, self.layouts, sources, destinations)
