"""int8 weights for drafting on a CPU: a draft level is memory-bound, and int8 halves the bytes of bfloat16.

Each weight row is scaled by its largest absolute value, and each input row by its own at run time (W8A8, like
LLM.int8() without outlier columns, Dettmers et al. 2022). Quantization affects only the candidates, which the target
verifies.
"""

import torch
from vllm import _custom_ops as vllm_ops


class Int8Rows:
    """``x @ weight.T`` with vLLM's oneDNN op. It keeps no reference to ``weight``, bfloat16 [rows, size]."""

    def __init__(self, weight: torch.Tensor):
        # The op copies the weight but reads the scales from this tensor, so it must stay alive.
        self.scale = weight.abs().amax(dim=1, keepdim=True).float().clamp_(min=1e-12).div_(127).view(1, -1)
        rounded = (weight / self.scale.view(-1, 1)).round_().to(torch.int8)
        self.num_rows = len(weight)
        self.handler = vllm_ops.create_onednn_scaled_mm(
            rounded.t(), self.scale, weight.dtype, dynamic_quant=True, use_azp=False, primitive_cache_size=32
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map bfloat16 [n, size] to the products, bfloat16 [n, rows]."""
        output = x.new_empty(len(x), self.num_rows)
        rounded, scale, _ = vllm_ops.onednn_scaled_int8_quant(x.contiguous())
        return vllm_ops.onednn_scaled_mm(self.handler, rounded, output, scale, None, None, None)


def int8_pays(weight: torch.Tensor) -> bool:
    """Whether int8 is at least as fast as the weight's own type on this processor (AVX-512 VNNI)."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return bool(torch.cpu.get_capabilities().get("avx512_vnni")) and hasattr(
        torch.ops._C, "create_onednn_scaled_mm_handler"
    )
