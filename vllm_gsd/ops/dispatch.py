"""Where the Triton kernels (``vllm_gsd/kernels``) serve, and the checks that their entries share."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch


@functools.cache
def have_triton() -> bool:
    """Whether Triton can be imported; it is not imported for that."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors: ``TRITON_INTERPRET=1`` before its import."""
    return os.environ.get("TRITON_INTERPRET") == "1" and have_triton()


def use_triton(tensor: torch.Tensor, node_by_node: bool = False) -> bool:
    """Whether the Triton kernels serve ``tensor``: it lies on a GPU, or on the CPU with Triton interpreted.

    Args:
        node_by_node: of a kernel that goes from node to node; interpreted it takes seconds, and its tests call for it.
    """
    if tensor.is_cuda:
        return have_triton()
    return tensor.device.type == "cpu" and interpreted() and not node_by_node


def check_tensor(
    name: str, tensor: torch.Tensor, device: torch.device, dims: int, *dtypes: torch.dtype, rows: int = 0
) -> None:
    """Raise ValueError, one sentence, unless ``tensor`` fits; needs no synchronisation."""
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, but must be {allowed}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, but must have {dims} dimensions")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, but must be on {device} as the other tensors")
    if dims and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, but must have 1")
    if rows and tensor.shape[0] < rows:
        raise ValueError(f"{name} has {tensor.shape[0]} rows, but needs {rows}")
