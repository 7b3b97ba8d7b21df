"""Changes to vLLM's Ray executor on clusters without accelerators, where each rank uses a CPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from vllm_gsd.upstream.patching import replace, replaced

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue


@contextmanager
def devices_are_cpus() -> Iterator[None]:
    """Make vLLM place ranks on the CPUs of a node inside this context.

    The change is made on the platform object, because other platforms share its class.
    """
    from vllm.platforms import current_platform

    before = current_platform.ray_device_key
    current_platform.ray_device_key = "CPU"
    try:
        yield
    finally:
        current_platform.ray_device_key = before


def reserve_nodes(parallel_config: ParallelConfig) -> None:
    """Make the placement group of an engine's ranks.

    vLLM 0.32 asks for a device on the engine's own node unless told otherwise, and 0.33 never does. The distinction can
    be removed with the support for 0.32.
    """
    from vllm.v1.executor.ray_utils import initialize_ray_cluster

    asks = "require_gpu_on_driver" in inspect.signature(initialize_ray_cluster).parameters
    initialize_ray_cluster(parallel_config, **({"require_gpu_on_driver": False} if asks else {}))


def second_executor() -> bool:
    """Whether vLLM takes the executor that we build on.

    vLLM 0.32 has an older one, too, which an environment variable chooses. Remove this with the support for 0.32.
    """
    from vllm import envs

    return getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)


def ranks_on_cpus(worker: type) -> AbstractContextManager[None]:
    """Start ranks as actors of the class ``worker`` inside this context."""
    return replaced("vllm.v1.executor.ray_executor_v2:RayWorkerProc", lambda upstream: worker)


def keep_shared_memory_to_nodes(node: str) -> None:
    """Use shared memory between the ranks of one ``node`` only, so that ranks on different nodes use the network.

    Upstream's CPU communicator uses shared memory if all ranks agree on its name. It derives the name from the port of
    their rendezvous. Over TCP that port is the same on every node, and the ranks would wait for one another forever.
    """
    replace(
        "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.make_group_name",
        lambda upstream: staticmethod(lambda communicator: f"{upstream(communicator)}-{node}"),
    )


def forget_name(queue: MessageQueue | None) -> None:
    """Unlink the shared memory of a ``MessageQueue`` if this process created it."""
    buffer = getattr(queue, "buffer", None)
    if buffer is not None and buffer.is_creator:
        buffer.shared_memory.unlink()
        buffer.is_creator = False  # so that upstream does not unlink it again
