"""Copies of device tensors for a host that does not wait for them."""

from collections import deque
from typing import Any

import torch


class LateCopies:
    """A queue of things to be told to the host, each once its tensors have arrived.

    Args:
        device: where the tensors come from. What comes from the host's own memory has arrived at once.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.queue: deque[tuple[Any, dict[str, torch.Tensor], torch.cuda.Event | None]] = deque()

    def send(self, label: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Copy tensors as they are now; ``label`` comes out with them."""
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

    def take(self, wait: bool):
        """What has arrived, oldest first: label and tensors.

        Args:
            wait: for everything that was sent.
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
