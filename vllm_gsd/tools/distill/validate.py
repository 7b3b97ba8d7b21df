"""The quality of a draft: how often it agrees with the target on held-out answers, by depth."""

import torch

from vllm_gsd.tools.distill.data import Answer
from vllm_gsd.tools.distill.packs import Packs, batches
from vllm_gsd.tools.distill.students import Student

WIDEST = 4


@torch.no_grad()
def agreement(model: Student, data: list[Answer], packs: Packs) -> dict[str, list[float] | float]:
    """How often the target's best token is the draft's best (``top_1``) or in its best four (``top_4``), by depth.

    The text before is always the true one. ``chain`` is the mean number of a chain's first tokens that agree.

    Returns:
        these three, or nothing if no answer is as long as a chain.
    """
    torch.manual_seed(0)
    model.eval()
    found = []
    for batch in batches(data, packs, model.hardware.pack):
        with model.hardware.autocast():
            drafted = model.drafted(batch)
        best, _ = model.target.likeliest(batch["verifier_last_hidden_states"][0, drafted.rows], slice(None), 1)
        top = model.token_ids[drafted.logits.topk(WIDEST, 1).indices]
        found.append((top == best)[drafted.chains].cpu())
    hits = torch.cat(found).float()
    if len(hits) == 0:
        return {}
    return {
        "top_1": hits[..., 0].mean(0).tolist(),
        "top_4": hits.amax(2).mean(0).tolist(),
        "chain": float(hits[..., 0].cumprod(1).sum(1).mean()),
    }
