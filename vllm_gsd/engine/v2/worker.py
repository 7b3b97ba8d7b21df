"""The common base of our workers for Model Runner V2."""

from typing import Any

from vllm_gsd.engine.worker_memory import SharesMemory


class V2Worker(SharesMemory):
    """A worker whose speculator learns nothing from vLLM's warm-up requests."""

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as upstream does, then measure costs and reset the speculator."""
        times = super().compile_or_warm_up_model()
        self.model_runner.measure()
        self.model_runner.speculator.forget_warm_up()
        return times
