"""The GPU worker with our V2 model runner and attention backends."""

from typing import Any

from vllm.v1.worker import gpu_worker

from vllm_gsd.compat.hooks import gsd_config
from vllm_gsd.runtime import cuda_attention
from vllm_gsd.runtime.attention_layers import own_backends
from vllm_gsd.runtime.v2.model_runner import GraphModelRunner, with_graph_speculator
from vllm_gsd.runtime.worker_memory import SharesMemory


class GraphGPUWorker(SharesMemory, gpu_worker.Worker):
    """``worker_cls`` of an engine with gsd on a GPU."""

    def _make_model_runner(self) -> Any:
        """See upstream."""
        config = gsd_config(self.vllm_config)
        assert config is not None
        cuda_attention.choose(config.tree_attention)
        with with_graph_speculator():
            return GraphModelRunner(self.vllm_config, self.device)

    def load_model(self, **kwargs: Any) -> None:
        """Load target and draft, whose layers get our attention backends."""
        with own_backends(cuda_attention.BACKENDS):
            super().load_model(**kwargs)
