"""Has vLLM multiply by our kernel, where that is the faster one."""

from __future__ import annotations

from typing import Any

import torch

from vllm_gsd.ops.linear import packs
from vllm_gsd.upstream import weights, wire


class PacksWeights:
    """A CPU worker whose models' bfloat16 matrices are packed for :func:`vllm_gsd.ops.linear.linear`."""

    vllm_config: Any

    def load_model(self, **kwargs: Any) -> None:
        """Load the target, and with it the draft."""
        wire.note_packed_weights(self.vllm_config, packs_weights(torch.empty(16, 2, dtype=torch.bfloat16)))
        with weights.packing(packs_weights) as embeddings:
            super().load_model(**kwargs)  # type: ignore[misc]
        model = self.vllm_config.model_config
        if model.head_dtype == model.dtype:  # else upstream multiplies by the LM head's weight itself
            weights.pack_lm_heads(embeddings)


def packs_weights(weight: torch.Tensor) -> bool:
    """Whether to pack a weight for our kernel.

    Not where there are matrix units (AMX), nor beside AMD's own library, which vLLM takes where it is installed.
    """
    upstream_is_better = torch.cpu._is_amx_tile_supported() or hasattr(torch.ops.zentorch, "zentorch_linear_unary")
    return not upstream_is_better and packs(weight)
