"""The CPU worker with our model runner and attention backend."""

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker import cpu_worker

from vllm_gsd.runtime.v1.model_runner import GraphModelRunner


class GraphCPUWorker(cpu_worker.CPUWorker):
    """``worker_cls`` of an engine whose speculative method is gsd."""

    def init_device(self) -> None:
        """Set up the device as upstream does, but build ``GraphModelRunner``."""
        register_backend(AttentionBackendEnum.CPU_ATTN, "vllm_gsd.runtime.cpu_attention.TreeCPUAttentionBackend")
        # Upstream's init_device names the class it builds; there is no hook to choose another.
        upstream = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = GraphModelRunner
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = upstream
