"""The CPU worker of an engine with our CPU kernels and without speculation: ``"sources": []``."""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker import cpu_worker

from vllm_gsd.cpu.packed_weights import PacksWeights
from vllm_gsd.engine.attention.cpu_causal import BACKENDS
from vllm_gsd.engine.attention.layers import attention_layers, check_draft_layers
from vllm_gsd.engine.worker_memory import give_back_freed
from vllm_gsd.ops import HAVE_EXTENSION
from vllm_gsd.upstream import workers

logger = init_logger("vllm.gsd")


class KernelsCPUWorker(PacksWeights, cpu_worker.CPUWorker):
    """The ``worker_cls`` of such an engine. The model runner and the scheduler are vLLM's own."""

    def load_model(self, **kwargs: Any) -> None:
        """Load the model with our attention backend.

        Raises:
            GSDConfigError: a layer uses a kind of attention that our kernel does not support.
        """
        if not HAVE_EXTENSION:
            logger.warning(
                "gsd: the compiled kernels are missing, so this engine is no faster than vLLM's own; reinstall "
                "vllm-gsd in this environment with a C++ compiler."
            )
        with workers.attention_backends(BACKENDS):
            super().load_model(**kwargs)
        check_draft_layers(attention_layers(self.vllm_config))
        give_back_freed()
