"""Keeping tensor-parallel ranks in step.

Every rank builds the graphs itself: the same inputs give the same graphs, so nothing large is sent. What is not the
same everywhere (clocks, floats that depend on threads, draws) is the first rank's: these few numbers are broadcast.
"""

from pathlib import Path

import numpy as np
import torch
from vllm.distributed import get_tp_group, model_parallel_is_initialized
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed


def from_first_rank(values: np.ndarray) -> np.ndarray:
    """The first tensor-parallel rank's values, on all of them; every rank gives an array of that shape and dtype."""
    if not model_parallel_is_initialized() or get_tp_group().world_size == 1:
        return values
    group, tensor = get_tp_group(), torch.from_numpy(np.ascontiguousarray(values))
    if group.device.type == "cpu":
        return group.broadcast(tensor, src=0).numpy()
    torch.distributed.broadcast(tensor, group.ranks[0], group.cpu_group)
    return tensor.numpy()


def forget_shared_memory() -> None:
    """Take the name from this rank's shared memory, through which upstream's CPU ranks sum, once all ranks have it.

    It goes with the last process that uses it then. With its name, a rank that is killed leaves it behind for ever.
    """
    memory = getattr(get_tp_group().device_communicator, "dist_module", None)
    if isinstance(memory, _CPUSHMDistributed):
        Path("/dev/shm", f"{memory.group_name}_{memory.communicator.rank}").unlink(missing_ok=True)  # noqa: S108
