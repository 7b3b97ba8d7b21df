"""The quality of a draft: its agreement with the target on held-out answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_gsd.tools.distill.train import BATCH, Collator, TrimmedStudent

if TYPE_CHECKING:
    from datasets import Dataset


@torch.no_grad()
def agreement(model: TrimmedStudent, data: Dataset, collator: Collator) -> dict[str, float]:
    """Share of positions where the target's best token is the draft's best (``top_1``) or in its best four."""
    hits = {1: 0, 4: 0}
    positions = 0
    model.eval()
    device = next(model.parameters()).device
    for start in range(0, len(data), BATCH):
        batch = collator([data[i] for i in range(start, min(start + BATCH, len(data)))])
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        with torch.autocast(device.type, torch.bfloat16):
            log_probs = model.log_probs(batch)
        best = model.token_ids[log_probs.topk(4, dim=1).indices]
        for k in hits:
            hits[k] += int((best[:, :k] == batch["top_ids"][:, :1]).any(dim=1).sum())
        positions += len(best)
    return {f"top_{k}": count / positions for k, count in hits.items()}
