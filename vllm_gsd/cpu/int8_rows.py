"""Matrices in int8 for drafting on a CPU: half of bfloat16's bytes, which is what a draft level waits for.

Rows are scaled each by its largest value, inputs each by theirs as they come (W8A8, LLM.int8() without outliers,
Dettmers et al. 2022). Only candidates depend on it: what is accepted is for the target to say.
"""

import torch
from vllm import _custom_ops as vllm_ops


class Int8Rows:
    """``x @ weight.T`` by vLLM's own oneDNN op.

    Args:
        weight: bfloat16 [rows, size]; not kept.
    """

    def __init__(self, weight: torch.Tensor):
        # Kept, as the op reads them from where they lie; of the weight it makes a copy of its own.
        self.scale = weight.abs().amax(dim=1, keepdim=True).float().clamp_(min=1e-12).div_(127).view(1, -1)
        rounded = (weight / self.scale.view(-1, 1)).round_().to(torch.int8)
        self.num_rows = len(weight)
        self.handler = vllm_ops.create_onednn_scaled_mm(
            rounded.t(), self.scale, weight.dtype, dynamic_quant=True, use_azp=False, primitive_cache_size=32
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The products, bfloat16 [n, rows], of bfloat16 [n, size]."""
        output = x.new_empty(len(x), self.num_rows)
        rounded, scale, _ = vllm_ops.onednn_scaled_int8_quant(x.contiguous())
        return vllm_ops.onednn_scaled_mm(self.handler, rounded, output, scale, None, None, None)


def int8_pays(weight: torch.Tensor) -> bool:
    """Whether this processor multiplies int8 at least as fast as this matrix's own type."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return bool(torch.cpu.get_capabilities().get("avx512_vnni")) and hasattr(
        torch.ops._C, "create_onednn_scaled_mm_handler"
    )
