"""Operators of graph-structured speculation. None of them imports vLLM or has a gradient.

Two kinds of kernels serve them. The C++ extension ``vllm_gsd._C`` (``kernels/cpu``) serves CPU tensors, and Triton
kernels serve GPU tensors. ``dispatch`` chooses the Triton kernels.

An operator raises ValueError where shapes, dtypes, devices or numbers do not fit, and RuntimeError where it needs
Triton and that cannot run on the tensors. Both messages are one sentence.

Some operators also have a PyTorch version in this package, because it runs in production:
``tree_attention_reference``, ``topk_softmax_reference``, ``argmax_of_walks_reference``, ``move_kv_reference`` and what
``state_rows`` does elsewhere serve CPUs where the extension is not built.

All other references are in ``tests/kernels/references``.
"""

import importlib
import importlib.util
import logging
import os

import torch


def _load_extension() -> bool:
    """Register ``torch.ops.vllm_gsd``, if possible; return whether it was. Warn of an extension that does not load."""
    if os.environ.get("VLLM_GSD_NO_EXTENSION") == "1":
        return False
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
