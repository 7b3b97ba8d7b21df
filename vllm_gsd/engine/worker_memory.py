"""Memory of a worker: it shares the KV cache's memory with hidden states, and returns freed memory to the system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_gsd.upstream import workers

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_interface import KVCacheSpec


class SharesMemory:
    """Worker mixin that loads the models, and splits vLLM's KV cache memory with the hidden states stored beside it."""

    model_runner: Any
    backends: Mapping[AttentionBackendEnum, str]  # our attention backends, by upstream's that they replace

    def load_model(self, **kwargs: Any) -> None:
        """Load the models with our attention backends in their layers, then return freed memory to the system."""
        with workers.attention_backends(self.backends):
            super().load_model(**kwargs)  # type: ignore[misc]
        give_back_freed()

    def determine_available_memory(self) -> int:
        """Return the bytes available for keys and values, without those for hidden states."""
        available = super().determine_available_memory()  # type: ignore[misc]
        give_back_freed()  # what the profiling run freed
        specs, drafter = self.model_runner.get_kv_cache_spec().values(), self.model_runner.speculation.drafter
        return kv_share(available, specs, 0 if drafter is None else drafter.feature_bytes)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as upstream does, then return freed memory. This is the last call before requests arrive."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        give_back_freed()
        return times

    def start_draft_weight_update(self) -> None:
        """Refuse what upstream would refuse by saying that there is no draft."""
        raise NotImplementedError("gsd cannot update its draft's weights; start the engine anew with the new draft.")


def kv_share(available: int, specs: Iterable[KVCacheSpec], feature_bytes: int) -> int:
    """Bytes for the KV cache when ``feature_bytes`` per token are stored in addition to keys and values.

    Args:
        available: bytes for both.
        feature_bytes: bytes of hidden states per token; 0 if the draft does not read any.
    """
    kv_bytes = sum(spec.page_size_bytes / spec.block_size for spec in specs)
    return int(available * kv_bytes / (kv_bytes + feature_bytes)) if feature_bytes else available


def give_back_freed() -> None:
    """Return memory that glibc's allocator keeps after ``free``.

    Weight packing and a warm-up leave a hundred MiB or more there.
    """
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)(0)  # other C libraries lack malloc_trim
