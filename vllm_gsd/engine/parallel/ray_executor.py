"""vLLM's Ray executor on clusters without accelerators: a rank takes one of the CPUs that a node declares.

Upstream's asks the platform for the name of its devices in Ray, and vLLM's CPU platform has none. Goes when it has.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import ray
import torch
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.platforms import current_platform
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_utils import initialize_ray_cluster

import vllm_gsd
from vllm_gsd.engine.parallel.ray_nodes import check_nodes


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
        _keep_shared_memory_to_nodes()
        super().initialize_worker(*args, **kwargs)

    def worker_busy_loop(self, *args, **kwargs) -> None:
        """Upstream's, once all ranks have this rank's queues: the shared memory under them loses its name.

        Ray ends an actor with everything it started, and so with what would have removed the memory after it.
        """
        groups = [group() for group in parallel_state._groups.values()]
        for queue in (self.worker_response_mq, *(getattr(group, "mq_broadcaster", None) for group in groups)):
            buffer = getattr(queue, "buffer", None)
            if buffer is not None and buffer.is_creator:
                buffer.shared_memory.unlink()
                buffer.is_creator = False  # or it is removed again
        super().worker_busy_loop(*args, **kwargs)


class CPURayExecutor(ray_executor_v2.RayExecutorV2):
    """``distributed_executor_backend="ray"`` of an engine with gsd on vLLM's CPU platform."""

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        return {}  # the placement group's bundle holds the CPU

    def _init_executor(self) -> None:
        with _replaced(current_platform, "ray_device_key", "CPU"):
            initialize_ray_cluster(self.parallel_config, require_gpu_on_driver=False)
            check_nodes(self.parallel_config.placement_group)
            with _replaced(ray_executor_v2, "RayWorkerProc", CPURayWorkerProc):
                super()._init_executor()

    def shutdown(self) -> None:
        """Upstream's; but where Ray has ended before, as at the end of a program, its actors are gone already."""
        if not ray.is_initialized():  # asking it to kill them would start it again
            self.ray_worker_handles: list[ray_executor_v2.RayWorkerHandle] = []
        super().shutdown()


def _keep_shared_memory_to_nodes() -> None:
    """Have ranks on several nodes talk over the network.

    Upstream's CPU communicator takes shared memory if all ranks agree on its name, which comes from the port of their
    rendezvous: over TCP it is the same on every node, and they would wait for one another forever. Goes when upstream
    asks for the node.
    """
    upstream = _CPUSHMDistributed.make_group_name
    node = ray.get_runtime_context().get_node_id()[:8]
    _CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: f"{upstream(communicator)}-{node}")


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` within; upstream reads it from there and has no hook."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
