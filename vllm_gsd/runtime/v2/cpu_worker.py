"""The CPU worker with our V2 model runner and attention backend."""

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker import cpu_worker

from vllm_gsd.runtime.packed_weights import PacksWeights
from vllm_gsd.runtime.ranks import forget_shared_memory
from vllm_gsd.runtime.v2.worker import V2Worker


class GraphCPUWorker(V2Worker, PacksWeights, cpu_worker.CPUWorker):
    """``worker_cls`` of an engine with gsd on a CPU for which vLLM takes Model Runner V2."""

    def init_device(self) -> None:
        """Set up the device as upstream does, but build our runner and our speculator."""
        register_backend(AttentionBackendEnum.CPU_ATTN, "vllm_gsd.runtime.cpu_attention.TreeCPUAttentionBackend")
        # This makes V2 run on a CPU; everything of V2 must be imported after it.
        from vllm.v1.worker.cpu import model_runner as cpu_model_runner

        from vllm_gsd.runtime.v2.model_runner import GraphModelRunner, with_graph_speculator

        class GraphCPUModelRunner(GraphModelRunner, cpu_model_runner.CPUModelRunner):
            pass

        runner = cpu_model_runner.CPUModelRunner
        # Upstream names the class it builds; there is no hook to choose another.
        cpu_model_runner.CPUModelRunner = GraphCPUModelRunner
        try:
            with with_graph_speculator():
                super().init_device()
        finally:
            cpu_model_runner.CPUModelRunner = runner
        forget_shared_memory()
