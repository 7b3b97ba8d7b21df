"""The GPU worker with our V2 model runner and attention backends."""

from vllm.v1.worker import gpu_worker

from vllm_gsd.engine.attention import cuda as cuda_attention
from vllm_gsd.engine.v2.model_runner import GraphModelRunner
from vllm_gsd.engine.v2.speculator import GraphSpeculator
from vllm_gsd.engine.v2.worker import V2Worker
from vllm_gsd.upstream import wire, workers


class GraphGPUWorker(V2Worker, gpu_worker.Worker):
    """The ``worker_cls`` of an engine with gsd on a GPU."""

    backends = cuda_attention.BACKENDS

    def _make_model_runner(self) -> GraphModelRunner:
        """Build our model runner with our speculator."""
        config = wire.options_of(self.vllm_config)
        assert config is not None
        cuda_attention.choose(config.tree_attention)
        with workers.building_speculator(GraphSpeculator):
            return GraphModelRunner(self.vllm_config, self.device)

    def _maybe_activate_jit_monitor(self) -> None:
        """Measure before vLLM monitors compilations, since measuring compiles the kernels that a plan may choose."""
        self.measure()
        super()._maybe_activate_jit_monitor()
