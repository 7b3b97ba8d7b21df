"""vLLM's Ray executor for clusters without accelerators: each rank uses one of the CPUs that a node declares.

Upstream's executor asks the platform for its Ray device, and vLLM's CPU platform does not name one. This module can be
removed when it does.
"""

from typing import Any

import ray
import torch
from vllm.distributed import parallel_state
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list
from vllm.v1.executor import ray_executor_v2

import vllm_gsd
from vllm_gsd.engine.parallel.ray_nodes import check_nodes
from vllm_gsd.upstream import ray_ranks


class CPURayWorkerProc(ray_executor_v2.RayWorkerProc):
    """A rank in a Ray actor. Importing this class in the actor loads the plugin before vLLM runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vllm_gsd.register()
        super().__init__(*args, **kwargs)

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """The node's id, and the rank as the only "device", because upstream counts and sorts the devices."""
        return ray.get_runtime_context().get_node_id(), [self._init_kwargs["rank"]]

    def initialize_worker(self, *args: Any, **kwargs: Any) -> None:
        """Set the number of threads to this rank's share of the node's cores, then proceed as upstream."""
        ranks_here = len(kwargs.pop("assigned_physical_gpu_ids"))
        cores = {(cpu.numa_node, cpu.physical_core) for cpu in get_allowed_cpu_list()}
        # Ray sets OMP_NUM_THREADS to 1 in this process, so the value of the engine's process decides. It may be a list,
        # with a number for each level of nested threads.
        threads = args[3].get("OMP_NUM_THREADS", "").partition(",")[0]
        torch.set_num_threads(int(threads or 0) or max(1, len(cores) // ranks_here))
        ray_ranks.keep_shared_memory_to_nodes(ray.get_runtime_context().get_node_id()[:8])
        super().initialize_worker(*args, **kwargs)

    def worker_busy_loop(self, *args: Any, **kwargs: Any) -> None:
        """Unlink the shared memory of this rank's queues, which all ranks have opened, then proceed as upstream.

        Ray kills an actor with all its child processes, including the one that would unlink the memory.
        """
        groups = [group() for group in parallel_state._groups.values()]
        for queue in (self.worker_response_mq, *(getattr(group, "mq_broadcaster", None) for group in groups)):
            ray_ranks.forget_name(queue)
        super().worker_busy_loop(*args, **kwargs)


class CPURayExecutor(ray_executor_v2.RayExecutorV2):
    """``distributed_executor_backend="ray"`` of an engine with gsd on vLLM's CPU platform."""

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        return {}  # the placement group's bundle reserves the CPU

    def _init_executor(self) -> None:
        with ray_ranks.devices_are_cpus():
            ray_ranks.reserve_nodes(self.parallel_config)
            check_nodes(self.parallel_config.placement_group)
            with ray_ranks.ranks_on_cpus(CPURayWorkerProc):
                super()._init_executor()

    def shutdown(self) -> None:
        """Shut down as upstream does. If Ray has ended already, as at program exit, there are no actors to kill."""
        if not ray.is_initialized():  # a call to ray.kill would start Ray again
            self.ray_worker_handles: list[ray_executor_v2.RayWorkerHandle] = []
        super().shutdown()
