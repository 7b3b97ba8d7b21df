"""Has vLLM multiply by our kernel, where that is the faster one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers import utils

from vllm_gsd.ops.linear import linear, pack_weight, packs

# Beside our options in ``VllmConfig.additional_config``, and so in the name of vLLM's cache of compiled code.
PACKED_KEY = "gsd_packed_weights"


class PacksWeights:
    """A CPU worker whose models' bfloat16 matrices are packed for :func:`vllm_gsd.ops.linear.linear`."""

    vllm_config: Any

    def load_model(self, **kwargs: Any) -> None:
        """Load the target, and with it the draft."""
        self.vllm_config.additional_config[PACKED_KEY] = packs_weights(torch.empty(16, 2, dtype=torch.bfloat16))
        with _packing():
            super().load_model(**kwargs)  # type: ignore[misc]


@contextmanager
def _packing() -> Iterator[None]:
    """Upstream packs weights for oneDNN in a function that its layers look up by name; there is no hook."""
    upstream = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        if not packs_weights(layer.weight):
            upstream(layer, remove_weight)
            return
        packed = pack_weight(layer.weight.detach())
        if remove_weight:
            layer.weight = torch.nn.Parameter(packed, requires_grad=False)
            layer.cpu_linear = linear
        else:  # an embedding's too, which reads rows of it
            layer.cpu_linear = lambda x, weight, bias: linear(x, packed, bias)

    utils.dispatch_cpu_unquantized_gemm = dispatch
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = upstream


def packs_weights(weight: torch.Tensor) -> bool:
    """Whether to pack a weight for our kernel.

    Not where there are matrix units (AMX), nor beside AMD's own library, which vLLM takes where it is installed.
    """
    upstream_is_better = torch.cpu._is_amx_tile_supported() or hasattr(torch.ops.zentorch, "zentorch_linear_unary")
    return not upstream_is_better and packs(weight)
