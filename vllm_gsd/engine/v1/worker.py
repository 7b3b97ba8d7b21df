"""The CPU worker for Model Runner V1, with our model runner and attention backend."""

from vllm.logger import init_logger
from vllm.v1.worker import cpu_worker

from vllm_gsd.cpu.packed_weights import PacksWeights
from vllm_gsd.engine.attention.cpu import BACKENDS
from vllm_gsd.engine.parallel.ranks import forget_shared_memory
from vllm_gsd.engine.v1.model_runner import GraphModelRunner
from vllm_gsd.engine.worker_memory import SharesMemory
from vllm_gsd.ops import HAVE_EXTENSION
from vllm_gsd.upstream import workers

logger = init_logger("vllm.gsd")


class GraphCPUWorker(SharesMemory, PacksWeights, cpu_worker.CPUWorker):
    """The ``worker_cls`` of V1 engines with gsd."""

    backends = BACKENDS

    def init_device(self) -> None:
        if not HAVE_EXTENSION:
            logger.warning(
                "gsd: the compiled kernels are missing, so slower PyTorch code runs; reinstall vllm-gsd in this "
                "environment with a C++ compiler."
            )
        with workers.building_v1_runner(GraphModelRunner):
            super().init_device()
        forget_shared_memory()
