"""Makes vLLM multiply with our kernel where that is faster."""

from contextlib import nullcontext
from typing import Any

import torch

from vllm_gsd.cpu.linear import packing, packs
from vllm_gsd.upstream import weights, wire


class PacksWeights:
    """A CPU worker that packs its models' bfloat16 matrices for :func:`vllm_gsd.cpu.linear.linear`.

    With ``"cpu_kernels": "off"`` it packs nothing, and vLLM's own matrix products run.
    """

    vllm_config: Any

    def load_model(self, **kwargs: Any) -> None:
        packs_here = uses_cpu_kernels(self.vllm_config) and packs_weights(torch.empty(16, 2, dtype=torch.bfloat16))
        wire.note_compiled(self.vllm_config, packed_weights=packing() if packs_here else None)
        if not packs_here:
            super().load_model(**kwargs)  # type: ignore[misc]
            return
        with weights.packing(packs_weights) as embeddings:
            super().load_model(**kwargs)  # type: ignore[misc]
        model = self.vllm_config.model_config
        if model.head_dtype == model.dtype:  # otherwise vLLM uses the unpacked weight of the LM head
            weights.pack_lm_heads(embeddings)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Read the target's weights again; the new ones are packed as the old ones were."""
        with weights.packing(packs_weights) if uses_cpu_kernels(self.vllm_config) else nullcontext():
            super().reload_weights(*args, **kwargs)  # type: ignore[misc]


def uses_cpu_kernels(vllm_config: Any) -> bool:
    """Whether our CPU kernels may replace vLLM's matrix products, and its attention for rows that do not branch."""
    config = wire.options_of(vllm_config)
    return config is not None and config.cpu_kernels == "auto"


def packs_weights(weight: torch.Tensor) -> bool:
    """Whether to pack a weight for our kernel.

    Weights are not packed if the processor has AMX, or if AMD's zentorch is installed, which vLLM then uses.
    """
    upstream_is_better = torch.cpu._is_amx_tile_supported() or hasattr(torch.ops.zentorch, "zentorch_linear_unary")
    return not upstream_is_better and packs(weight)
