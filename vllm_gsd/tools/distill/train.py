"""Training the student on the target's probabilities, with transformers' ``Trainer``.

The loss is the cross-entropy of the student's trimmed LM head against the target's most likely tokens at the positions
of the answers. The Trainer keeps checkpoints, and a killed run resumes from the last one.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from vllm_gsd.config.draft_vocab import choose_draft_vocab, read_draft_vocab
from vllm_gsd.tools.distill.generate import TOP

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

Collator = Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]

BATCH = 8
WARM_UP = 0.05
# Minimum tokens of an answer to learn from.
SHORTEST = 2
# Steps that are timed before training, to plan how many fit into the time limit.
TIMED_STEPS = 6


def load_answers(files: list[Path], longest: int) -> Dataset:
    """The answers of all shards, without those longer than ``longest`` tokens and those of a single token.

    Each has its ``length``, the name of its ``file``, and the index of its ``first`` token in the file.
    """
    from datasets import concatenate_datasets, load_dataset

    parts = []
    for file in files:
        part: Any = load_dataset("parquet", data_files=str(file), split="train", keep_in_memory=True)
        lengths = np.array([len(ids) for ids in part["input_ids"]], np.int64)
        part = part.remove_columns("text").add_column("length", lengths)
        part = part.add_column("first", np.cumsum(lengths) - lengths)
        parts.append(part.add_column("file", [file.stem] * len(part)))
    data: Any = concatenate_datasets(parts)
    return data.filter(
        lambda row: row["prompt_len"] + SHORTEST <= row["length"] <= longest, desc="neither long nor empty"
    ).with_format("numpy")


class TrimmedStudent(nn.Module):
    """A student whose LM head computes a part of the vocabulary, in the form that the Trainer needs.

    Args:
        vocab_size: the target's.
        token_ids: the trimmed vocabulary, int64 [n], ascending.
    """

    def __init__(self, vocab_size: int, token_ids: torch.Tensor):
        super().__init__()
        place = torch.full((vocab_size,), -1)
        place[token_ids] = torch.arange(len(token_ids))
        self.register_buffer("place", place, persistent=False)
        self.register_buffer("token_ids", token_ids, persistent=False)

    @property
    def _keys_to_ignore_on_save(self) -> list[str]:
        # The Trainer accepts that a checkpoint lacks these names.
        return sorted(set(super().state_dict()) - set(self.state_dict()))

    def tie_weights(self) -> None:
        """The Trainer calls this after it has loaded a checkpoint."""

    def state_dict(self, *args, **kwargs) -> dict[str, Any]:
        """Only the trained weights. The rest is the target's, and safetensors cannot save its tied weights."""
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name in trained}

    def log_probs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Log-probabilities of the tokens after the flat positions ``rows``, float32 [n, trimmed].

        Args:
            batch: from a collator.
        """
        raise NotImplementedError


class Distillation(TrimmedStudent):
    """A student that is a complete language model, and its loss.

    Args:
        student: a causal language model of transformers.
        token_ids: the trimmed vocabulary, int64 [n], ascending.
        freeze_embedding: whether to exclude embedding and LM head from training.
    """

    def __init__(self, student: PreTrainedModel, token_ids: torch.Tensor, freeze_embedding: bool):
        super().__init__(student.config.vocab_size, token_ids)
        self.student = student
        for weight in (student.get_input_embeddings().weight, student.get_output_embeddings().weight):
            weight.requires_grad_(not freeze_embedding)

    def tie_weights(self) -> None:
        """See ``TrimmedStudent``."""
        self.student.tie_weights()

    def log_probs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """See ``TrimmedStudent``."""
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        hidden = self.student.base_model(**inputs, use_cache=False)[0]
        head = self.student.get_output_embeddings().weight[self.token_ids]
        return torch.log_softmax(nn.functional.linear(hidden.flatten(0, 1)[batch["rows"]], head).float(), dim=-1)

    def forward(self, input_ids, attention_mask, rows, top_ids, top_logprobs) -> dict[str, torch.Tensor]:
        """The loss of a batch.

        Args:
            input_ids, attention_mask: int64 [batch, length].
            rows: int64 [n], flat positions whose next token is known.
            top_ids: int64 [n, TOP], the target's most likely next tokens.
            top_logprobs: float32 [n, TOP], their log-probabilities.
        """
        places = self.place[top_ids]
        weight = top_logprobs.exp().masked_fill(places < 0, 0.0)
        log_probs = self.log_probs({"input_ids": input_ids, "attention_mask": attention_mask, "rows": rows})
        chosen = log_probs.gather(1, places.clamp(min=0))
        return {"loss": -(weight * chosen).sum() / len(rows)}


def collate(answers: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The arguments of ``Distillation.forward`` for a batch."""
    longest = max(len(answer["input_ids"]) for answer in answers)
    input_ids = torch.zeros(len(answers), longest, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    rows = []
    for line, answer in enumerate(answers):
        length = len(answer["input_ids"])
        input_ids[line, :length] = torch.from_numpy(np.asarray(answer["input_ids"], np.int64))
        mask[line, :length] = 1
        rows.append(torch.arange(line * longest + int(answer["prompt_len"]) - 1, line * longest + length - 1))
    top = {name: np.concatenate([answer[name] for answer in answers]) for name in ("top_ids", "top_logprobs")}
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "rows": torch.cat(rows),
        "top_ids": torch.from_numpy(top["top_ids"].astype(np.int64).reshape(-1, TOP)),
        "top_logprobs": torch.from_numpy(top["top_logprobs"].astype(np.float32).reshape(-1, TOP)),
    }


def load_distillation(folder: Path, freeze_embedding: bool) -> Distillation:
    """Load a student with its trimmed vocabulary, in float32."""
    from transformers import AutoModelForCausalLM

    student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    vocab_size = student.config.vocab_size
    token_ids = choose_draft_vocab(read_draft_vocab(folder), vocab_size, None)
    if token_ids is None:
        token_ids = np.arange(vocab_size)
    return Distillation(student, torch.from_numpy(token_ids), freeze_embedding)


def save_trained(model: Distillation, start: Path, out: Path) -> None:
    """Write the trained student in bfloat16 as a Hugging Face folder, with the other files of ``start``."""
    making = out.with_suffix(".partial")
    shutil.rmtree(making, ignore_errors=True)
    shutil.copytree(start, making)
    model.student.to(torch.bfloat16).save_pretrained(making)
    making.rename(out)
    model.student.float()


def count_parameters(folder: Path, vocab_size: int) -> tuple[int, int]:
    """All parameters of a model, and those that a draft level reads: its layers and ``vocab_size`` LM head rows."""
    from safetensors import safe_open

    total, layers, width = 0, 0, 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no dict
                shape = tensors.get_slice(name).get_shape()
                size = math.prod(shape)
                total += size
                layers += size if ".layers." in name else 0
                width = shape[1] if "embed_tokens" in name else width
    return total, layers + vocab_size * width


def train(
    model: TrimmedStudent,
    work: Path,
    data: Dataset,
    collator: Collator,
    *,
    epochs: float,
    minutes: float | None,
    learning_rate: float,
    seed: int,
) -> None:
    """Train a student.

    Args:
        model: the student, in float32.
        work: the folder for checkpoints.
        data: from ``load_answers``.
        collator: makes a batch of answers.
        epochs: the maximum number of passes over the data.
        minutes: the time limit, from which the number of steps is planned; None for no limit.
    """
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    on_cpu = not torch.cuda.is_available()
    steps = _planned_steps(model, work, data, collator, epochs, minutes, seed, on_cpu)
    arguments = TrainingArguments(
        output_dir=str(work / "checkpoints"),
        use_cpu=on_cpu,
        bf16=True,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, round(WARM_UP * steps)),
        weight_decay=0.01,
        train_sampling_strategy="group_by_length",
        length_column_name="length",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        label_names=[],
        logging_steps=max(1, min(50, steps // 10)),
        save_steps=max(10, steps // 10),
        save_total_limit=1,
        report_to="none",
        seed=seed,
    )
    last = get_last_checkpoint(arguments.output_dir) if Path(arguments.output_dir).is_dir() else None
    trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collator)
    trainer.train(resume_from_checkpoint=last)


def _planned_steps(
    model, work: Path, data, collator: Collator, epochs: float, minutes: float | None, seed: int, on_cpu: bool
) -> int:
    """The number of optimiser steps, decided once, so that a resumed run follows the same schedule."""
    plan = work / "steps.json"
    if plan.is_file():
        return int(json.loads(plan.read_text())["steps"])
    steps = max(1, round(epochs * len(data) / BATCH))
    if minutes is not None:
        steps = max(1, min(steps, int(60 * minutes / _seconds_per_step(model, data, collator, seed, on_cpu))))
    plan.write_text(json.dumps({"steps": steps}))
    return steps


def _seconds_per_step(model: TrimmedStudent, data, collator: Collator, seed: int, on_cpu: bool) -> float:
    """Mean time of a forward and backward pass over random batches. The weights do not change."""
    device = "cpu" if on_cpu else "cuda"
    model.to(device)
    order = np.random.default_rng(seed).permutation(len(data))
    times = []
    for step in range(TIMED_STEPS):
        chosen = [data[int(i)] for i in np.resize(order[step * BATCH :], BATCH)] if len(order) else []
        batch = {name: tensor.to(device) for name, tensor in collator(chosen).items()}
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = model(**batch)["loss"]
        loss.backward()
        model.zero_grad()
        times.append(time.perf_counter() - start)
    return float(np.mean(times[1:]))
