"""What vLLM's Ray executor is told on clusters without accelerators, where a rank takes a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_gsd.upstream.patching import replace, replaced


@contextmanager
def devices_are_cpus() -> Iterator[None]:
    """While ranks are placed: CPUs are what a node has devices of.

    The platform is one object of a class that other platforms share, so only the object is changed.
    """
    from vllm.platforms import current_platform

    before = current_platform.ray_device_key
    current_platform.ray_device_key = "CPU"
    try:
        yield
    finally:
        current_platform.ray_device_key = before


@contextmanager
def ranks_on_cpus(worker: type) -> Iterator[None]:
    """While ranks are started: their actors are of this class."""
    with replaced("vllm.v1.executor.ray_executor_v2:RayWorkerProc", lambda upstream: worker):
        yield


def keep_shared_memory_to_nodes(node: str) -> None:
    """Have ranks on several nodes talk over the network.

    Upstream's CPU communicator takes shared memory if all ranks agree on its name, which comes from the port of their
    rendezvous: over TCP it is the same on every node, and they would wait for one another forever.

    Args:
        node: this rank's, as part of a name.
    """
    replace(
        "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.make_group_name",
        lambda upstream: staticmethod(lambda communicator: f"{upstream(communicator)}-{node}"),
    )


def forget_name(queue: Any) -> None:
    """Take the name from the shared memory under a ``MessageQueue`` that this process has made, if it has."""
    buffer = getattr(queue, "buffer", None)
    if buffer is not None and buffer.is_creator:
        buffer.shared_memory.unlink()
        buffer.is_creator = False  # or it is removed again
