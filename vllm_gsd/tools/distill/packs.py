"""Batches of answers with the target's states, as the models of the speculators package read them."""

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from vllm_gsd.tools.distill.data import Answer
from vllm_gsd.tools.distill.states import Source
from vllm_gsd.tools.prompt_file import thinned

# Answers from which the usual size of the states is known.
SCALE_TEXTS = 64


class Packs:
    """Makes batches of answers and the target's states over them.

    Args:
        padding: unused positions after each text. A block that begins at a text's end reaches into them.
        shift: whether a position holds a token with the states before it, as EAGLE-3 heads read them, or with its own.
        dtype: that of the states in the batches.
    """

    def __init__(self, source: Source, padding: int = 0, shift: bool = False, dtype: torch.dtype = torch.bfloat16):
        self.source, self.padding, self.shift, self.dtype = source, padding, shift, dtype
        self.scale: torch.Tensor | None = None

    def standardise(self, data: list[Answer]) -> torch.Tensor:
        """Scale the hidden states of later batches, each dimension by its usual size over the data.

        Some dimensions of a language model are a thousand times larger than others, and learn poorly together.

        Returns:
            the scale, float32 [layers * hidden].
        """
        states = self.source(thinned(data, SCALE_TEXTS))
        sample = torch.cat([rows[::4].flatten(1).float() for rows in states])
        # In bfloat16 the product is as exact as in float32 and takes a fraction of the time.
        self.scale = (1 / sample.abs().median(0).values.clamp_min(1e-6)).to(self.dtype)
        return self.scale.float()

    def collate(self, answers: list[Answer]) -> dict[str, torch.Tensor]:
        """A batch of texts one after the other, on the source's device.

        Returns:
            ``input_ids``, ``position_ids`` and ``document_ids``, int64 [1, n]; ``hidden_states`` [1, n,
            layers * hidden], scaled if ``standardise`` was called; ``verifier_last_hidden_states``, those of the last
            layer as they are; ``loss_mask``, bool [1, n]: whether the target's state at a position is known and
            predicts a token of the answer.
        """
        texts = [self._text(number, answer) for number, answer in enumerate(answers)]
        states = [pad(rows.to(self.dtype), (0, 0, 0, 0, 0, self.padding)) for rows in self.source(answers)]
        hidden = torch.cat([rows[: len(rows) - self.shift] for rows in states]).flatten(1)
        last = torch.cat([rows[self.shift :, -1] for rows in states])
        batch = {name: torch.cat([text[name] for text in texts]).to(hidden.device) for name in texts[0]}
        batch["hidden_states"] = hidden if self.scale is None else hidden * self.scale
        batch["verifier_last_hidden_states"] = last
        return {name: rows[None] for name, rows in batch.items()}

    def _text(self, number: int, answer: Answer) -> dict[str, torch.Tensor]:
        count = len(answer.input_ids)
        place = torch.arange(self.shift, count + self.padding)
        return {
            "input_ids": pad(torch.from_numpy(answer.input_ids), (0, self.padding))[self.shift :],
            "position_ids": place,
            "document_ids": torch.full_like(place, number),
            "loss_mask": (place >= answer.prompt_len - 1) & (place < count - 1),
        }


def batches(data: list[Answer], packs: Packs, size: int) -> Iterator[dict[str, torch.Tensor]]:
    """All answers in order, in batches of ``size``."""
    for start in range(0, len(data), size):
        yield packs.collate(data[start : start + size])
