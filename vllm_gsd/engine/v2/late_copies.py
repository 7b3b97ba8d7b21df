"""Asynchronous copies of device tensors to the host."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch


class LateCopies:
    """A queue of labelled tensors that are being copied to the host.

    Args:
        device: the device of the tensors. On a CPU, copies are complete at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.queue: deque[tuple[Any, dict[str, torch.Tensor], torch.cuda.Event | None]] = deque()

    def send(self, label: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Start copying the current values of tensors; ``take`` returns them with ``label``."""
        if self.device.type == "cpu":
            self.queue.append((label, {name: tensor.clone() for name, tensor in tensors.items()}, None))
            return
        copies = {}
        for name, tensor in tensors.items():
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies[name] = pinned.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.queue.append((label, copies, event))

    def take(self, wait: bool) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
        """Remove and yield the finished copies, oldest first, as label and host tensors.

        Args:
            wait: whether to wait until all copies are finished.
        """
        while self.queue:
            _, _, event = self.queue[0]
            if event is not None:
                if wait:
                    event.synchronize()
                elif not event.query():
                    return
            label, tensors, _ = self.queue.popleft()
            yield label, tensors
