"""Asynchronous copies of device tensors to the host."""

import functools
import math
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

# How many of the newest copies ranks in step leave in the queue. The device does not idle while the host waits for
# older ones, because it still has a draft phase and a forward pass to run.
UNDER_WAY = 1


class _Copy(NamedTuple):
    """Labelled tensors in one host buffer, one after another."""

    label: Any
    tensors: dict[str, tuple[np.dtype, tuple[int, ...]]]
    bytes: torch.Tensor  # uint8
    event: torch.cuda.Event | None

    def values(self) -> dict[str, np.ndarray]:
        """The tensors as arrays, which share the buffer."""
        values, buffer, end = {}, self.bytes.numpy(), 0
        for name, (dtype, shape) in self.tensors.items():
            start, end = end, end + dtype.itemsize * math.prod(shape)
            values[name] = buffer[start:end].view(dtype).reshape(shape)
        return values


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype


class LateCopies:
    """A queue of labelled tensors that are being copied to the host.

    Args:
        device: the device of the tensors. On a CPU, copies are complete at once.
        in_step: whether tensor-parallel ranks must take the same copies at the same time, whenever these are finished.
    """

    def __init__(self, device: torch.device, in_step: bool = False) -> None:
        self.device = device
        self.in_step = in_step
        self.queue: deque[_Copy] = deque()

    def send(self, label: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Start copying the current values of tensors, all with one copy; ``take`` returns them with ``label``."""
        # Wide elements first, so that all are aligned.
        ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
        packed = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in ordered.values()])
        kinds, event = {name: (_numpy_dtype(one.dtype), tuple(one.shape)) for name, one in ordered.items()}, None
        if self.device.type != "cpu":
            pinned = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            packed, event = pinned.copy_(packed, non_blocking=True), torch.cuda.Event()
            event.record()
        self.queue.append(_Copy(label, kinds, packed, event))

    def take(self, wait: bool) -> Iterator[tuple[Any, dict[str, np.ndarray]]]:
        """Remove and yield the finished copies, oldest first, as label and host arrays.

        Args:
            wait: whether to wait until all copies are finished. Ranks in step always wait, but leave the newest.
        """
        while len(self.queue) > (UNDER_WAY if self.in_step and not wait else 0):
            event = self.queue[0].event
            if event is not None:
                if wait or self.in_step:
                    event.synchronize()
                elif not event.query():
                    return
            done = self.queue.popleft()
            yield done.label, done.values()
