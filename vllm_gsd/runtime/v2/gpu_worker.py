"""The GPU worker with our V2 model runner and attention backends."""

from typing import Any

from vllm.v1.worker import gpu_worker

from vllm_gsd.runtime import cuda_attention
from vllm_gsd.runtime.v2.model_runner import GraphModelRunner
from vllm_gsd.runtime.v2.speculator import GraphSpeculator
from vllm_gsd.runtime.worker_memory import SharesMemory
from vllm_gsd.upstream import wire, workers


class GraphGPUWorker(SharesMemory, gpu_worker.Worker):
    """``worker_cls`` of an engine with gsd on a GPU."""

    def _make_model_runner(self) -> Any:
        """See upstream; our backends are chosen by the layers, which are made later."""
        config = wire.options_of(self.vllm_config)
        assert config is not None
        cuda_attention.register(config.tree_attention)
        with workers.building_speculator(GraphSpeculator):
            return GraphModelRunner(self.vllm_config, self.device)
