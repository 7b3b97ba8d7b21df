"""Operators of graph-structured speculation, each with its slow and obvious reference beside it.

The compiled kernels (``kernels/cpu``) serve CPU tensors. Where the extension ``vllm_gsd._C`` is not built,
and on other devices, the PyTorch references serve instead, with the same results up to rounding. Nothing here
imports vLLM or has a gradient.
"""

import importlib
import importlib.util
import logging

import torch


def _load_extension() -> bool:
    """Register ``torch.ops.vllm_gsd``; False where that cannot be done, loudly if it should have worked."""
    try:
        importlib.import_module("vllm_gsd._C")
    except ImportError as error:
        if "vllm_gsd._C" in str(error) and importlib.util.find_spec("vllm_gsd._C") is None:
            return False
        logging.getLogger(__name__).warning(
            "vllm_gsd: the compiled kernels do not load (%s); slower PyTorch code is used instead", error
        )
        return False
    return True


HAVE_EXTENSION = _load_extension()


def use_kernel(tensor: torch.Tensor) -> bool:
    """Whether the compiled kernels serve ``tensor``."""
    return HAVE_EXTENSION and tensor.device.type == "cpu"
