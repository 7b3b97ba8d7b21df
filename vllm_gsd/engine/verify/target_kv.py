"""The target's KV caches: KV of accepted nodes moves to the slots that plain decoding would have used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_gsd.ops.kv_move.cpu import move_kv
from vllm_gsd.ops.kv_move.paged import PagedCaches, move_paged_kv

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention


class TargetKV(ABC):
    """The allocated KV caches of the target's layers, given by name. A layer may share the cache of another."""

    def __init__(self, layers: dict[str, Attention]):
        self.names = list(layers)
        self.layers = list(layers.values())
        # A shared cache must be moved once, not once per layer.
        owners: dict[int, Attention] = {}
        for layer in self.layers:
            owners.setdefault(layer.kv_cache.data_ptr(), layer)
        self.owners = list(owners.values())
        self.caches = [layer.kv_cache for layer in self.owners]

    @abstractmethod
    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Move keys and values between slots. Within a request, all reads precede all writes.

        Args:
            sources, destinations: int64 slots. With shape [num_requests, most], pairs with a negative source are
                skipped. With shape [n], all pairs are moved.
        """


class CPUTargetKV(TargetKV):
    """KV caches in the layouts of vLLM's CPU backend."""

    def __init__(self, layers: dict[str, Attention]):
        from vllm_gsd.engine.attention.cpu import kv_layout

        super().__init__(layers)
        self.layouts = [
            kv_layout(layer.isa, layer.kv_cache.shape[2], layer.head_size, layer.kv_cache.dtype)
            for layer in self.owners
        ]
        if all(layout is self.layouts[0] for layout in self.layouts):
            del self.layouts[1:]  # one layout for all caches

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        if sources.dim() > 1:
            real = sources >= 0
            sources, destinations = sources[real], destinations[real]
        move_kv(self.caches, self.layouts, sources, destinations)


class PagedTargetKV(TargetKV):
    """KV caches in the layout of vLLM's GPU backends."""

    def __init__(self, layers: dict[str, Attention]):
        super().__init__(layers)
        alike: dict[Any, list[torch.Tensor]] = {}  # layers may differ in their number of heads
        for cache in self.caches:
            alike.setdefault((cache.shape, cache.stride(), cache.dtype), []).append(cache)
        self.paged = [PagedCaches(caches) for caches in alike.values()]

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        for caches in self.paged:
            move_paged_kv(caches, sources, destinations)


def target_kv_of(layers: dict[str, Attention], names: list[str], draft_layers: Sequence[str]) -> TargetKV:
    """The KV caches of the layers ``names`` of a KV cache group, but for those of ``draft_layers``."""
    kept = {name: layers[name] for name in names if name not in set(draft_layers)}
    if next(iter(kept.values())).attn_backend.get_name() == "CPU_ATTN":
        return CPUTargetKV(kept)
    return PagedTargetKV(kept)
