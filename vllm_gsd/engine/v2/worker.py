"""The common base of our workers for Model Runner V2."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from vllm.config import VllmConfig, set_current_vllm_config

from vllm_gsd.engine.worker_memory import SharesMemory
from vllm_gsd.upstream import workers


class V2Worker(SharesMemory):
    """A worker whose speculator learns nothing from vLLM's warm-up requests."""

    vllm_config: VllmConfig
    _maybe_get_memory_pool_context: Callable[[str], AbstractContextManager[Any]]  # upstream's

    def load_model(self, **kwargs: Any) -> None:
        """Load the target, then the draft into memory that sleep mode keeps at every level.

        At level 2, sleep mode discards the memory of upstream's ``load_model``, and vLLM's ``reload_weights`` reads the
        target's weights only. Hidden states will lie in the KV cache's memory, which sleep mode discards.
        """
        super().load_model(**kwargs)
        with (
            workers.attention_backends(self.backends),
            self._maybe_get_memory_pool_context("runtime"),
            set_current_vllm_config(self.vllm_config),
        ):
            self.model_runner.load_draft()
        self.model_runner.features_pool = partial(self._maybe_get_memory_pool_context, "kv_cache")

    def measure(self) -> None:
        """Measure costs and reset the speculator, once everything else is warm."""
        self.model_runner.measure()
        self.model_runner.speculator.forget_warm_up()
