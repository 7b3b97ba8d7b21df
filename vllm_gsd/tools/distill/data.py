"""The answers and the target's states over them, as the models of the speculators package read them.

A file of answers is ``answers/{name}.parquet`` with ``input_ids`` (request and answer), ``prompt_len`` and ``text``.
Its states are ``states/{name}.safetensors``: one tensor, ``states``, bfloat16 [tokens of all its rows, layers, hidden].
The state of an answer's last token is not used, because the target need not have run it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from datasets import Dataset

# Minimum tokens of an answer to learn from.
SHORTEST = 2
# Answers from which the usual size of the states is known.
SCALE_TEXTS = 64


def state_layers(depth: int) -> list[int]:
    """The layers of a target of ``depth`` layers whose states are kept: about each quarter of them, and the last.

    Layer n is the state that layer n reads, and ``depth`` the last layer's output, before the final norm.
    """
    return sorted({min(depth, quarter * -(-depth // 4)) for quarter in (1, 2, 3, 4)})


def load_answers(files: list[Path], longest: int) -> Dataset:
    """The answers of all files, without those longer than ``longest`` tokens and those of a single token.

    Each has its ``length``, the name of its ``file``, and the index of its ``first`` token in the file.
    """
    from datasets import concatenate_datasets, load_dataset

    parts = []
    for file in files:
        part: Any = load_dataset("parquet", data_files=str(file), split="train", keep_in_memory=True)
        part = part.select_columns(["input_ids", "prompt_len"])
        lengths = np.array([len(ids) for ids in part["input_ids"]], np.int64)
        part = part.add_column("length", lengths).add_column("first", np.cumsum(lengths) - lengths)
        parts.append(part.add_column("file", [file.stem] * len(part)))
    data: Any = concatenate_datasets(parts)
    return data.filter(
        lambda row: row["prompt_len"] + SHORTEST <= row["length"] <= longest, desc="neither long nor empty"
    ).with_format("numpy")


def count_tokens(data: Dataset, vocab_size: int) -> np.ndarray:
    """How often each token occurs in the answers, int64 [vocab_size]."""
    counts = np.zeros(vocab_size, np.int64)
    for row in data:
        counts += np.bincount(row["input_ids"][int(row["prompt_len"]) :], minlength=vocab_size)
    return counts


def spread(data: Dataset, count: int) -> Dataset:
    """About ``count`` answers, evenly spread over the data, or all."""
    return data.select(range(0, len(data), max(1, len(data) // count)))


class States:
    """Reads the target's states over the answers, and makes batches of both.

    Args:
        folder: the folder of the files ``{name of the answers' file}.safetensors``.
        padding: unused positions after each text. A block that begins at a text's end reaches into them.
        shift: whether a position holds a token with the states before it, as EAGLE-3 heads read them, or with its own.
    """

    def __init__(self, folder: Path, padding: int = 0, shift: bool = False):
        self.folder, self.padding, self.shift = folder, padding, shift
        self.files: dict[str, Any] = {}
        self.scale: torch.Tensor | None = None
        # Batches are padded to a multiple of this many positions.
        self.multiple = 1

    def standardise(self, data: Dataset) -> torch.Tensor:
        """Scale the hidden states of later batches, each dimension by its usual size over the data.

        Some dimensions of a language model are a thousand times larger than others, and learn poorly together.

        Returns:
            the scale, float32 [layers * hidden].
        """
        sample = torch.cat([self.of(row)[::4].flatten(1).float() for row in spread(data, SCALE_TEXTS)])
        # In the states' type, in which the product is as exact as in float32 and takes a fraction of the time.
        self.scale = (1 / sample.abs().median(0).values.clamp_min(1e-6)).bfloat16()
        return self.scale.float()

    def of(self, row: dict[str, Any]) -> torch.Tensor:
        """States of a request with its answer, bfloat16 [length, layers, hidden]."""
        from safetensors import safe_open

        name, first = str(row["file"]), int(row["first"])
        if name not in self.files:
            self.files[name] = safe_open(self.folder / f"{name}.safetensors", "pt").get_slice("states")
        return self.files[name][first : first + int(row["length"])]

    def collate(self, answers: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """A batch of texts one after the other, as the models of speculators read it.

        Returns:
            ``input_ids``, ``position_ids`` and ``document_ids``, int64 [1, n]; ``hidden_states``, bfloat16 [1, n,
            layers * hidden], scaled if ``standardise`` was called; ``verifier_last_hidden_states``, those of the last
            layer as they are; ``loss_mask``, bool [1, n]: whether the target's state at a position is known and
            predicts a token of the answer. Padding is like a text of which nothing is learned.
        """
        parts = [self._text(number, row) for number, row in enumerate(answers)]
        if count := -sum(len(part["input_ids"]) for part in parts) % self.multiple:
            padding = {name: part.new_zeros(count, *part.shape[1:]) for name, part in parts[0].items()}
            place = torch.arange(count)
            parts.append({**padding, "position_ids": place, "document_ids": torch.full_like(place, len(answers))})
        return {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}

    def _text(self, number: int, row: dict[str, Any]) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(np.asarray(row["input_ids"], np.int64))
        states, place = self.of(row), torch.arange(len(ids) + self.padding)
        inputs = states.flatten(1) if self.scale is None else states.flatten(1) * self.scale
        text = {
            "input_ids": _padded(ids, self.padding),
            "position_ids": place,
            "document_ids": torch.full_like(place, number),
            "hidden_states": _padded(inputs, self.padding),
            "verifier_last_hidden_states": _padded(states[:, -1], self.padding),
            "loss_mask": (place >= int(row["prompt_len"]) - 1) & (place < len(ids) - 1),
        }
        if not self.shift:
            return text
        return {name: part[:-1] if name == "hidden_states" else part[1:] for name, part in text.items()}


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(count, *rows.shape[1:])])


def batches(data: Dataset, states: States, size: int) -> Iterator[dict[str, torch.Tensor]]:
    """All answers in order, in batches of ``size``."""
    for start in range(0, len(data), size):
        yield states.collate([data[i] for i in range(start, min(start + size, len(data)))])
