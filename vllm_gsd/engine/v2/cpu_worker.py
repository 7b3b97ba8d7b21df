"""The CPU worker with our V2 model runner and attention backend."""

from vllm.v1.worker import cpu_worker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_gsd.cpu.packed_weights import PacksWeights
from vllm_gsd.engine.attention.cpu import BACKENDS
from vllm_gsd.engine.parallel.ranks import forget_shared_memory
from vllm_gsd.engine.v2.worker import V2Worker
from vllm_gsd.upstream import workers


class GraphCPUWorker(PacksWeights, V2Worker, cpu_worker.CPUWorker):
    """The ``worker_cls`` of an engine with gsd that runs Model Runner V2 on a CPU."""

    backends = BACKENDS

    def init_device(self) -> None:
        """Set up the device as upstream does, but build our model runner and speculator."""
        # Importing this module makes V2 run on a CPU. All other modules of V2 must be imported after it.
        from vllm.v1.worker.cpu import model_runner as cpu_model_runner

        from vllm_gsd.engine.v2.model_runner import GraphModelRunner
        from vllm_gsd.engine.v2.speculator import GraphSpeculator

        class GraphCPUModelRunner(GraphModelRunner, cpu_model_runner.CPUModelRunner):
            pass

        with workers.building_v2_cpu_runner(GraphCPUModelRunner), workers.building_speculator(GraphSpeculator):
            super().init_device()
        forget_shared_memory()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warm up as upstream does, then measure."""
        times = super().compile_or_warm_up_model()
        self.measure()
        return times
