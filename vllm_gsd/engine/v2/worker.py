"""What the workers of Model Runner V2 have in common."""

from typing import Any

from vllm_gsd.engine.worker_memory import SharesMemory


class V2Worker(SharesMemory):
    """A worker that starts with nothing learned from the requests that vLLM makes up to warm up its kernels."""

    def compile_or_warm_up_model(self) -> Any:
        """See upstream."""
        times = super().compile_or_warm_up_model()
        self.model_runner.speculator.forget_warm_up()
        return times
