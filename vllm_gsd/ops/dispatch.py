"""Choosing between a Triton kernel and PyTorch, and the checks that the operators share."""

import functools
import importlib.util
import os

import torch


@functools.cache
def have_triton() -> bool:
    """Whether Triton is installed; this does not import it."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton interprets kernels on CPU tensors: ``TRITON_INTERPRET=1`` was set before Triton was imported."""
    return os.environ.get("TRITON_INTERPRET") == "1" and have_triton()


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels serve ``tensor``: it is on a GPU, or on the CPU while Triton interprets."""
    return have_triton() if tensor.is_cuda else tensor.device.type == "cpu" and interpreted()


def require_triton(operator: str, tensor: torch.Tensor) -> None:
    """Raise RuntimeError, one sentence, unless Triton kernels serve ``tensor``."""
    if not use_triton(tensor):
        raise RuntimeError(f"{operator} runs on GPUs with Triton only, but its tensors are on {tensor.device}")


def check_tensor(
    name: str, tensor: torch.Tensor, device: torch.device, dims: int, *dtypes: torch.dtype, rows: int = 0
) -> None:
    """Raise ValueError, one sentence, unless ``tensor`` fits; does not synchronise with the device."""
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


def warps_for(lanes: int) -> int:
    """Warps of a program over this many lanes: 8 lanes a thread up to 4096 lanes, since each takes some registers."""
    return max(1, min(16, lanes // 256))


def registers_for(warps: int) -> int | None:
    """Registers of a thread, for ``maxnreg``: all that there are, since ptxas would rather spill than run fewer blocks.

    None for 16 warps, where a thread gets no more than its share of the processor's.
    """
    return 255 if warps < 16 else None
