"""The CPU worker with our model runner and attention backend."""

import copy
import functools
from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker import cpu_worker, gpu_model_runner

from vllm_gsd.ops import HAVE_EXTENSION
from vllm_gsd.runtime.attention_layers import own_backends
from vllm_gsd.runtime.cpu_attention import BACKENDS
from vllm_gsd.runtime.packed_weights import PacksWeights
from vllm_gsd.runtime.ranks import forget_shared_memory
from vllm_gsd.runtime.v1.model_runner import GraphModelRunner
from vllm_gsd.runtime.worker_memory import SharesMemory

logger = init_logger("vllm.gsd")


def _with_all_processors(upstream):
    """Upstream's ``build_logitsprocs`` as without speculation: with min_p, logit_bias and custom processors."""

    @functools.wraps(upstream)
    def build_logitsprocs(vllm_config, *args, **kwargs):
        vllm_config = copy.copy(vllm_config)
        vllm_config.speculative_config = None
        return upstream(vllm_config, *args, **kwargs)

    return build_logitsprocs


class GraphCPUWorker(SharesMemory, PacksWeights, cpu_worker.CPUWorker):
    """``worker_cls`` of an engine whose speculative method is gsd."""

    def init_device(self) -> None:
        """Set up the device as upstream does, but build ``GraphModelRunner``."""
        if not HAVE_EXTENSION:
            logger.warning(
                "gsd: the compiled kernels are missing, slower PyTorch code is used; reinstall vllm-gsd beside "
                "torch and a compiler, with pip's --no-build-isolation."
            )
        # Upstream names the class and the function it calls; there is no hook to choose others.
        runner, build = cpu_worker.CPUModelRunner, gpu_model_runner.build_logitsprocs
        cpu_worker.CPUModelRunner = GraphModelRunner
        gpu_model_runner.build_logitsprocs = _with_all_processors(build)
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner, gpu_model_runner.build_logitsprocs = runner, build
        forget_shared_memory()

    def load_model(self, **kwargs: Any) -> None:
        """Load target and draft, whose layers get our attention backend."""
        with own_backends(BACKENDS):
            super().load_model(**kwargs)
