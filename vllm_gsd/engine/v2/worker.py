"""The common base of our workers for Model Runner V2."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from vllm_gsd.engine.worker_memory import SharesMemory


class V2Worker(SharesMemory):
    """A worker whose speculator learns nothing from vLLM's warm-up requests."""

    _maybe_get_memory_pool_context: Callable[[str], AbstractContextManager[Any]]  # upstream's

    def load_model(self, **kwargs: Any) -> None:
        """Load target and draft, the draft into memory that sleep mode keeps at every level.

        At level 2, sleep mode discards weights, and vLLM's ``reload_weights`` reads those of the target only.
        """
        self.model_runner.draft_memory = lambda: self._maybe_get_memory_pool_context("runtime")
        super().load_model(**kwargs)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as upstream does, then measure costs and reset the speculator."""
        times = super().compile_or_warm_up_model()
        self.model_runner.measure()
        self.model_runner.speculator.forget_warm_up()
        return times
