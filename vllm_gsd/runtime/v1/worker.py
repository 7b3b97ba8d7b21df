"""The CPU worker with our model runner and attention backend."""

from vllm.logger import init_logger
from vllm.v1.worker import cpu_worker

from vllm_gsd.ops import HAVE_EXTENSION
from vllm_gsd.runtime.packed_weights import PacksWeights
from vllm_gsd.runtime.ranks import forget_shared_memory
from vllm_gsd.runtime.v1.model_runner import GraphModelRunner
from vllm_gsd.runtime.worker_memory import SharesMemory
from vllm_gsd.upstream import wire, workers

logger = init_logger("vllm.gsd")


class GraphCPUWorker(SharesMemory, PacksWeights, cpu_worker.CPUWorker):
    """``worker_cls`` of an engine whose speculative method is gsd."""

    def init_device(self) -> None:
        """Set up the device as upstream does, but build ``GraphModelRunner``."""
        if not HAVE_EXTENSION:
            logger.warning(
                "gsd: the compiled kernels are missing, slower PyTorch code is used; reinstall vllm-gsd beside "
                "torch and a compiler, with pip's --no-build-isolation."
            )
        workers.take_over_attention({"CPU_ATTN": wire.CPU_ATTENTION})
        with workers.building_v1_runner(GraphModelRunner):
            super().init_device()
        forget_shared_memory()
