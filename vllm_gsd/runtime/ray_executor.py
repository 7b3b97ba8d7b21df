"""vLLM's Ray executor on clusters without accelerators: a rank takes one of the CPUs that a node declares.

Upstream's asks the platform for the name of its devices in Ray, and vLLM's CPU platform has none. Goes when it has.
"""

from typing import Any

import ray
import torch
from vllm.distributed import parallel_state
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_utils import initialize_ray_cluster

import vllm_gsd
from vllm_gsd.runtime.ray_nodes import check_nodes
from vllm_gsd.upstream import ray_ranks


class CPURayWorkerProc(ray_executor_v2.RayWorkerProc):
    """A rank in a Ray actor. That Ray imports this class loads the plugin there before vLLM does anything."""

    def __init__(self, *args, **kwargs):
        vllm_gsd.register()
        super().__init__(*args, **kwargs)

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """The node, and the rank as the only "device": upstream counts and sorts them."""
        return ray.get_runtime_context().get_node_id(), [self._init_kwargs["rank"]]

    def initialize_worker(self, *args, **kwargs) -> None:
        """Upstream's, with this rank's share of the node's cores and its shared memory kept to the node."""
        ranks_here = len(kwargs.pop("assigned_physical_gpu_ids"))
        cores = {(cpu.numa_node, cpu.physical_core) for cpu in get_allowed_cpu_list()}
        # Ray has set OMP_NUM_THREADS to 1 in this process; what counts is whether the engine's process has it.
        driver_env_vars = args[3]
        torch.set_num_threads(int(driver_env_vars.get("OMP_NUM_THREADS", 0)) or max(1, len(cores) // ranks_here))
        ray_ranks.keep_shared_memory_to_nodes(ray.get_runtime_context().get_node_id()[:8])
        super().initialize_worker(*args, **kwargs)

    def worker_busy_loop(self, *args, **kwargs) -> None:
        """Upstream's, once all ranks have this rank's queues: the shared memory under them loses its name.

        Ray ends an actor with everything it started, and so with what would have removed the memory after it.
        """
        groups = [group() for group in parallel_state._groups.values()]
        for queue in (self.worker_response_mq, *(getattr(group, "mq_broadcaster", None) for group in groups)):
            ray_ranks.forget_name(queue)
        super().worker_busy_loop(*args, **kwargs)


class CPURayExecutor(ray_executor_v2.RayExecutorV2):
    """``distributed_executor_backend="ray"`` of an engine with gsd on vLLM's CPU platform."""

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        return {}  # the placement group's bundle holds the CPU

    def _init_executor(self) -> None:
        with ray_ranks.devices_are_cpus():
            initialize_ray_cluster(self.parallel_config, require_gpu_on_driver=False)
            check_nodes(self.parallel_config.placement_group)
            with ray_ranks.ranks_on_cpus(CPURayWorkerProc):
                super()._init_executor()

    def shutdown(self) -> None:
        """Upstream's; but where Ray has ended before, as at the end of a program, its actors are gone already."""
        if not ray.is_initialized():  # asking it to kill them would start it again
            self.ray_worker_handles: list[ray_executor_v2.RayWorkerHandle] = []
        super().shutdown()
