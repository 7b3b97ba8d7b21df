"""Keeps tensor-parallel ranks consistent.

Every rank builds the graphs itself; equal inputs give equal graphs, so nothing large is sent. A few numbers may differ
between ranks: clock readings, floats that depend on the number of threads, and random draws. The first rank broadcasts
these.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized


def from_first_rank(values: np.ndarray) -> np.ndarray:
    """Broadcast the first tensor-parallel rank's values; all ranks pass arrays of the same shape and dtype."""
    if not model_parallel_is_initialized() or get_tp_group().world_size == 1:
        return values
    group, tensor = get_tp_group(), torch.from_numpy(np.ascontiguousarray(values))
    if group.device.type == "cpu":
        return group.broadcast(tensor, src=0).numpy()
    torch.distributed.broadcast(tensor, group.ranks[0], group.cpu_group)
    return tensor.numpy()


def tensors_from_first_rank(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """As ``from_first_rank``, with one broadcast on the device, for which the host does not wait.

    Tensors with the widest elements come first, so that all are aligned.
    """
    if not model_parallel_is_initialized() or get_tp_group().world_size == 1:
        return tensors
    packed = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    # By the device's communicator: a CUDA graph cannot hold the group's broadcast, which is torch.distributed's.
    communicator = get_tp_group().device_communicator
    assert communicator is not None  # vLLM makes one for every group of several ranks
    parts = communicator.broadcast(packed, 0).split([tensor.nbytes for tensor in tensors])
    return [part.view(given.dtype).view(given.shape) for part, given in zip(parts, tensors, strict=True)]


def forget_shared_memory() -> None:
    """Unlink the shared memory through which upstream's CPU ranks all-reduce, once all ranks have opened it.

    The system then frees it with the last process that uses it. Otherwise, a rank that is killed would leave it behind.
    """
    memory = getattr(get_tp_group().device_communicator, "dist_module", None)
    if isinstance(memory, _CPUSHMDistributed):
        Path("/dev/shm", f"{memory.group_name}_{memory.communicator.rank}").unlink(missing_ok=True)  # noqa: S108
