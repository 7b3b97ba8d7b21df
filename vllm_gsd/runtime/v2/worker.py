"""The CPU worker with our V2 model runner and attention backend."""

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker import cpu_worker


class GraphCPUWorker(cpu_worker.CPUWorker):
    """``worker_cls`` of an engine with gsd for which vLLM takes Model Runner V2."""

    def init_device(self) -> None:
        """Set up the device as upstream does, but build our runner and our speculator."""
        register_backend(AttentionBackendEnum.CPU_ATTN, "vllm_gsd.runtime.cpu_attention.TreeCPUAttentionBackend")
        # The first of these makes V2 run on a CPU; everything of V2 must be imported after it.
        from vllm.v1.worker.cpu import model_runner as cpu_model_runner
        from vllm.v1.worker.gpu import model_runner as gpu_model_runner

        from vllm_gsd.runtime.v2.model_runner import GraphModelRunner
        from vllm_gsd.runtime.v2.speculator import GraphSpeculator

        class GraphCPUModelRunner(GraphModelRunner, cpu_model_runner.CPUModelRunner):
            pass

        runner, init_speculator = cpu_model_runner.CPUModelRunner, gpu_model_runner.init_speculator
        # Upstream names the class and the function it calls; there is no hook to choose others.
        cpu_model_runner.CPUModelRunner = GraphCPUModelRunner
        gpu_model_runner.init_speculator = lambda vllm_config, device, req_states: GraphSpeculator(vllm_config, device)
        try:
            super().init_device()
        finally:
            cpu_model_runner.CPUModelRunner, gpu_model_runner.init_speculator = runner, init_speculator
