"""Copies a step's host values to the device."""

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d


def send(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Start copying arrays of one dtype through pinned memory, all with one copy, for which the host does not wait.

    The results have the arrays' shapes.
    """
    packed = async_tensor_h2d(np.concatenate([array.reshape(-1) for array in arrays]), device=device)
    parts = packed.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
