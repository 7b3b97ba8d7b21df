"""The forward pass of speculators' DSpark blocks, with attention that costs what the blocks see.

Their own forward pass attends with a mask over the whole batch, in which most places are hidden. Here each text is
attended to by its own blocks only, in plain matrix products, which need neither torch.compile nor a GPU.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "anchored_blocks"


class Blocks(NamedTuple):
    """The blocks of a batch of texts.

    A block stands at an anchor, a token of the text. It reads the target's states before its anchor, and row k of it
    guesses the token k + 1 after the anchor.
    """

    anchors: torch.Tensor  # int64 [m], positions of the batch, ascending
    rows: torch.Tensor  # int64 [m, size], the positions whose states predict what the rows guess
    lengths: list[int]  # of the texts, in positions
    counts: list[int]  # how many of the blocks are in each text


def chosen_blocks(known: torch.Tensor, document_ids: torch.Tensor, size: int, share: float) -> Blocks:
    """Blocks at a random share of the positions that are known, bool [n]. ``document_ids``: int64 [n], ascending."""
    places = known.nonzero()[:, 0]
    chosen = torch.rand(len(places), device=places.device) < share
    chosen[0] |= ~chosen.any()
    anchors = places[chosen]
    lengths = document_ids.bincount()
    counts = document_ids[anchors].bincount(minlength=len(lengths))
    rows = anchors[:, None] + torch.arange(size, device=anchors.device)
    return Blocks(anchors, rows, lengths.tolist(), counts.tolist())


def hidden_states(model: Any, batch: dict[str, torch.Tensor], blocks: Blocks) -> torch.Tensor:
    """What the LM head reads, [m, size, hidden].

    Args:
        model: speculators' ``DSparkDraftModel``, whose attention is ``NAME``.
        batch: of ``Packs.collate``.
    """
    tokens = torch.full_like(blocks.rows, model.mask_token_id)
    tokens[:, 0] = batch["input_ids"][0, blocks.anchors]
    hidden = model.embed_tokens(tokens).flatten(0, 1)[None]
    context = model.hidden_norm(model.fc(batch["hidden_states"]))
    places = batch["position_ids"][0]
    after = places[blocks.anchors, None] + torch.arange(blocks.rows.shape[1], device=places.device)
    rotary = model.rotary_emb(hidden, torch.cat([places, after.flatten()])[None])
    for layer in model.layers:
        hidden = layer(hidden_states=hidden, target_hidden=context, attention_mask=blocks, position_embeddings=rotary)
    return model.norm(hidden)[0].view(*blocks.rows.shape, -1)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """Attention of transformers' interface: [1, heads, blocks * size, head] to the texts' keys and to the blocks'."""
    (count, size), groups, width = blocks.rows.shape, key.shape[1], query.shape[3]
    end = sum(blocks.lengths)
    # The heads of a group read the same keys, so their rows are multiplied together.
    query, key = (query * scaling).to(value.dtype), key.to(value.dtype)
    queries = query[0].view(groups, -1, count, size, width).transpose(1, 2).flatten(2, 3)
    of_texts = [rows[0, :, :end].split(blocks.lengths, 1) for rows in (key, value)]
    of_blocks = [rows[0, :, end:].unflatten(1, (count, size)).split(blocks.counts, 1) for rows in (key, value)]
    found, first = [], 0
    for places, rows, keys, values, own_keys, own_values in zip(
        blocks.anchors.split(blocks.counts), queries.split(blocks.counts, 1), *of_texts, *of_blocks, strict=True
    ):
        hidden = torch.arange(keys.shape[1], device=key.device) >= (places - first)[:, None, None]
        mask = torch.zeros(hidden.shape, dtype=value.dtype, device=key.device).masked_fill_(hidden, -torch.inf)
        scores = (rows.flatten(1, 2) @ keys.transpose(1, 2)).view(*rows.shape[:3], keys.shape[1]).add_(mask)
        weights = torch.cat([scores, rows @ own_keys.transpose(2, 3)], 3).softmax(3, torch.float32).to(value.dtype)
        of_text, of_block = weights.split((keys.shape[1], size), 3)
        found.append((of_text.flatten(1, 2) @ values).view(rows.shape) + of_block @ own_values)
        first += keys.shape[1]
    output = torch.cat(found, 1).unflatten(2, (-1, size))
    return output.permute(1, 3, 0, 2, 4).reshape(1, count * size, -1, width), None


AttentionInterface.register(NAME, attend)
