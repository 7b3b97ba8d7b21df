"""The one way by which a step's host values reach the device."""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d


class Staging:
    """Copies host arrays to a device through pinned memory, so that the host does not wait.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Start copying arrays of one dtype, all with one copy; the results have the arrays' shapes."""
        packed = async_tensor_h2d(np.concatenate([array.reshape(-1) for array in arrays]), device=self.device)
        parts = packed.split([array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
