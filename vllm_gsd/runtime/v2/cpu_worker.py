"""The CPU worker with our V2 model runner and attention backend."""

from vllm.v1.worker import cpu_worker

from vllm_gsd.runtime.packed_weights import PacksWeights
from vllm_gsd.runtime.ranks import forget_shared_memory
from vllm_gsd.runtime.worker_memory import SharesMemory
from vllm_gsd.upstream import wire, workers


class GraphCPUWorker(SharesMemory, PacksWeights, cpu_worker.CPUWorker):
    """``worker_cls`` of an engine with gsd on a CPU for which vLLM takes Model Runner V2."""

    def init_device(self) -> None:
        """Set up the device as upstream does, but build our runner and our speculator."""
        workers.take_over_attention({"CPU_ATTN": wire.CPU_ATTENTION})
        # This makes V2 run on a CPU; everything of V2 must be imported after it.
        from vllm.v1.worker.cpu import model_runner as cpu_model_runner

        from vllm_gsd.runtime.v2.model_runner import GraphModelRunner
        from vllm_gsd.runtime.v2.speculator import GraphSpeculator

        class GraphCPUModelRunner(GraphModelRunner, cpu_model_runner.CPUModelRunner):
            pass

        with workers.building_v2_cpu_runner(GraphCPUModelRunner), workers.building_speculator(GraphSpeculator):
            super().init_device()
        forget_shared_memory()
