"""Reference of ``vllm_gsd.ops.attention.merge``."""

import torch

from vllm_gsd.ops.attention.merge import check_parts


def merge_attention_reference(
    output: torch.Tensor,
    parts: torch.Tensor,
    part_lses: torch.Tensor,
    lse: torch.Tensor | None = None,
    end_row: torch.Tensor | None = None,
) -> None:
    """``merge_attention`` in plain PyTorch, in float64."""
    check_parts(output, parts, part_lses, lse, end_row)
    rows = slice(0, parts.shape[1] if end_row is None else int(end_row))
    logs = part_lses[:, rows].double()
    logs = logs.masked_fill(logs == torch.inf, -torch.inf)
    total = torch.logsumexp(logs, 0)
    weights = torch.exp(logs - total.masked_fill(total == -torch.inf, 0.0)).unsqueeze(-1)
    values = torch.where(weights > 0, parts[:, rows].double(), 0.0)
    output[rows] = (weights * values).sum(0).to(output.dtype)
    if lse is not None:
        lse[rows] = total.to(lse.dtype)
