"""Training a student with transformers' ``Trainer``, which resumes from the last checkpoint."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_gsd.tools.distill.data import States
from vllm_gsd.tools.distill.options import Options
from vllm_gsd.tools.distill.students import Student

if TYPE_CHECKING:
    from datasets import Dataset

BATCH = 8
WARM_UP = 0.05
# Texts that are timed before training, to plan how many fit into the time limit.
TIMED = 16


def pack_size(device: torch.device | str) -> int:
    """Texts in one forward pass. On a CPU a single one costs least, since texts do not attend to each other."""
    return 1 if torch.device(device).type == "cpu" else BATCH


def train(model: Student, work: Path, data: Dataset, states: States, options: Options, minutes: float | None) -> int:
    """Train a student, resuming from its checkpoints.

    Args:
        model: the student, in float32.
        work: the folder for checkpoints.
        data: from ``load_answers``.
        minutes: the time limit, from which the number of steps is planned; None for no limit.

    Returns:
        the number of steps.
    """
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    steps = _planned_steps(model, work, data, states, options, minutes)
    arguments = TrainingArguments(
        output_dir=str(work / "checkpoints"),
        use_cpu=device == "cpu",
        bf16=True,
        max_steps=steps,
        per_device_train_batch_size=pack_size(device),
        gradient_accumulation_steps=BATCH // pack_size(device),
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, round(WARM_UP * steps)),
        weight_decay=0.01,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        label_names=[],
        logging_steps=max(1, min(50, steps // 10)),
        save_steps=max(10, min(500, steps // 10)),
        save_total_limit=1,
        report_to="none",
        seed=options.seed,
    )
    last = get_last_checkpoint(arguments.output_dir) if Path(arguments.output_dir).is_dir() else None
    Trainer(model=model, args=arguments, train_dataset=data, data_collator=states.collate).train(
        resume_from_checkpoint=last
    )
    return steps


def _planned_steps(
    model: Student, work: Path, data: Dataset, states: States, options: Options, minutes: float | None
) -> int:
    """The number of optimiser steps, decided once, so that a resumed run follows the same schedule."""
    plan = work / "steps.json"
    if not plan.is_file():
        steps = max(1, round(options.epochs * len(data) / BATCH))
        if minutes is not None:
            per_step = BATCH * _seconds_per_text(model, data, states, options.seed)
            steps = max(1, min(steps, int(60 * minutes / per_step)))
        plan.write_text(json.dumps({"steps": steps}))
    return int(json.loads(plan.read_text())["steps"])


def _seconds_per_text(model: Student, data: Dataset, states: States, seed: int) -> float:
    """Mean time of a forward and backward pass over random texts. The weights do not change."""
    device = model.token_ids.device
    size = pack_size(device)
    order = np.resize(np.random.default_rng(seed).permutation(len(data)), (TIMED // size, size))
    times = []
    for chosen in order:
        batch = {name: rows.to(device) for name, rows in states.collate([data[int(i)] for i in chosen]).items()}
        begun = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**batch)["loss"]
        loss.backward()
        model.zero_grad()
        times.append((time.perf_counter() - begun) / size)
    return float(np.mean(times[1:]))
