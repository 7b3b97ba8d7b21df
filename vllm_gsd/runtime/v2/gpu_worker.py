"""The GPU worker with our V2 model runner and attention backends."""

from typing import Any

from vllm.v1.worker import gpu_worker

from vllm_gsd.compat.hooks import gsd_config
from vllm_gsd.runtime import cuda_attention
from vllm_gsd.runtime.v2.model_runner import GraphModelRunner, with_graph_speculator
from vllm_gsd.runtime.v2.worker import V2Worker


class GraphGPUWorker(V2Worker, gpu_worker.Worker):
    """``worker_cls`` of an engine with gsd on a GPU."""

    def _make_model_runner(self) -> Any:
        """See upstream; our backends are chosen by the layers, which are made later."""
        config = gsd_config(self.vllm_config)
        assert config is not None
        cuda_attention.register(config.tree_attention)
        with with_graph_speculator():
            return GraphModelRunner(self.vllm_config, self.device)
