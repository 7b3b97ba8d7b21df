"""The loss of an LM head: cross-entropy with the target's likeliest tokens, a few rows at a time.

The logits of many rows over a vocabulary take more memory than the model, and the passes over them more time than the
products. Here a few rows' logits, their loss and their gradient are computed together, as in Liger (Hsu et al. 2024).
"""

from typing import Any

import torch

# Rows whose logits are in memory at the same time. A CPU's caches hold them.
ROWS = 512


class HeadLoss(torch.autograd.Function):
    """The sum of the cross-entropies of rows.

    Args of ``apply``:
        rows: what is multiplied with both parts of the head, [n, hidden + rank].
        head: the LM head, which is not trained, [vocabulary, hidden].
        bias: the trained part, float32 [vocabulary, rank].
        token_ids, chances: the likeliest tokens, int64 [n, k], and their probabilities, float32 [n, k]. The rest of
            the vocabulary is left out.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        head: torch.Tensor,
        bias: torch.Tensor,
        token_ids: torch.Tensor,
        chances: torch.Tensor,
    ) -> torch.Tensor:
        of_rows, of_bias, total = torch.empty_like(rows), torch.zeros_like(bias), chances.new_zeros(())
        hidden, mass = head.shape[1], chances.sum(1, keepdim=True)
        head = torch.cat([head, bias], 1).to(rows.dtype)
        for first in range(0, len(rows), ROWS):
            part = slice(first, first + ROWS)
            logits = (rows[part] @ head.T).float()
            logits -= logits.amax(1, keepdim=True)
            of_likeliest = logits.gather(1, token_ids[part])
            sums = logits.exp_().sum(1, keepdim=True)
            total += (mass[part] * sums.log()).sum() - (chances[part] * of_likeliest).sum()
            slope = logits.mul_(mass[part] / sums).scatter_add_(1, token_ids[part], -chances[part]).to(rows.dtype)
            of_rows[part] = slope @ head
            of_bias += slope.T @ rows[part, hidden:]
        ctx.save_for_backward(of_rows, of_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_rows, of_bias = ctx.saved_tensors
        return slopes[0] * of_rows, None, slopes[0] * of_bias, None, None
