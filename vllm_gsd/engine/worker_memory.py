"""What a worker leaves to the KV cache, and what it gives back to the system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from typing import Any


class SharesMemory:
    """A worker whose KV cache and the hidden states kept beside it take what upstream gives to the KV cache."""

    model_runner: Any

    def load_model(self, **kwargs: Any) -> None:
        """See upstream."""
        super().load_model(**kwargs)  # type: ignore[misc]
        give_back_freed()

    def determine_available_memory(self) -> int:
        """See upstream; of it, what is for keys and values."""
        available = super().determine_available_memory()  # type: ignore[misc]
        give_back_freed()  # the warm-up's
        specs = self.model_runner.get_kv_cache_spec().values()
        return kv_share(available, specs, self.model_runner.speculation.feature_bytes)

    def compile_or_warm_up_model(self) -> Any:
        """See upstream; the last thing before requests come."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        give_back_freed()
        return times


def kv_share(available: int, specs: Iterable[Any], feature_bytes: int) -> int:
    """Bytes for the KV cache, where ``feature_bytes`` a token are kept beside it.

    Args:
        available: bytes for both.
        specs: vLLM's KV cache specs of all layers.
    """
    kv_bytes = sum(spec.page_size_bytes / spec.block_size for spec in specs)
    return int(available * kv_bytes / (kv_bytes + feature_bytes)) if feature_bytes else available


def give_back_freed() -> None:
    """Return freed memory that glibc's allocator keeps: packing weights and a warm-up leave a hundred MiB and more."""
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)(0)  # other C libraries have no such function
