"""Training a student with transformers' ``Trainer``, which resumes from the last checkpoint."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_gsd.tools.distill.data import Answer
from vllm_gsd.tools.distill.optimizer import MuonAndAdamW
from vllm_gsd.tools.distill.options import Options
from vllm_gsd.tools.distill.packs import Packs, batches
from vllm_gsd.tools.distill.stages import kept, stage
from vllm_gsd.tools.distill.students import Student

WARM_UP = 0.05
WEIGHT_DECAY = 0.01
# Optimizer steps before the speed of training is measured, and those that it is measured over.
UNTIMED, TIMED = 1, 3


def train(model: Student, work: Path, data: list[Answer], packs: Packs, options: Options, minutes: float | None) -> int:
    """Train a student in float32, resuming from its checkpoints; return the number of steps.

    It is planned from the time limit, if there is one.
    """
    from transformers import Trainer, TrainingArguments

    model.train()
    steps = _planned_steps(model, work, data, packs, options, minutes)
    hardware = model.hardware
    arguments = TrainingArguments(
        output_dir=str(work / "checkpoints"),
        use_cpu=hardware.device == "cpu",
        bf16=hardware.dtype == torch.bfloat16,
        max_steps=steps,
        per_device_train_batch_size=model.pack,
        gradient_accumulation_steps=model.batch // model.pack,
        learning_rate=options.value("learning_rate"),
        lr_scheduler_type="cosine",
        warmup_steps=max(1, round(WARM_UP * steps)),
        weight_decay=WEIGHT_DECAY,
        remove_unused_columns=False,
        dataloader_pin_memory=False,  # batches are on the device already
        label_names=[],
        logging_steps=max(1, min(50, steps // 10)),
        logging_nan_inf_filter=False,  # the filter waits for the GPU at every step
        save_steps=max(10, min(500, steps // 10)),
        save_total_limit=1,
        report_to="none",
        seed=options.seed,
    )
    # With several GPUs the Trainer would multiply the batch by their number, but a pack cannot be divided among them.
    arguments._n_gpu = min(1, arguments.n_gpu)
    # A run that was killed while it saved left a folder without this file, which is written last.
    saved = [file.parent for file in Path(arguments.output_dir).glob("checkpoint-*/trainer_state.json")]
    last = max(saved, key=lambda folder: int(folder.name.split("-")[1]), default=None)
    trainer: Any = Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        data_collator=packs.collate,
        optimizers=(MuonAndAdamW(model, options.value("learning_rate"), WEIGHT_DECAY), None),
    )
    with stage(f"training in {steps} steps"):
        trainer.train(resume_from_checkpoint=last and str(last))
    return steps


def _planned_steps(
    model: Student, work: Path, data: list[Answer], packs: Packs, options: Options, minutes: float | None
) -> int:
    """The number of optimizer steps, decided once, so that a resumed run follows the same schedule."""

    def plan() -> dict[str, int]:
        batch = model.batch
        steps = max(1, round(options.epochs * -(-len(data) // batch)))
        if minutes is not None:
            with stage("measuring the speed of training"):
                per_step = batch * _seconds_per_text(model, data, packs, options.seed)
            steps = max(1, min(steps, int(60 * minutes / per_step)))
        return {"steps": steps}

    return int(kept(work / "steps.json", plan)["steps"])


def _seconds_per_text(model: Student, data: list[Answer], packs: Packs, seed: int) -> float:
    """Mean time to read random texts and to learn from them. The weights do not change."""
    optimizer, count = MuonAndAdamW(model, lr=0.0, weight_decay=0.0), model.batch // model.pack
    order = np.resize(np.random.default_rng(seed).permutation(len(data)), (UNTIMED + TIMED) * model.batch)
    begun = 0.0
    for number, batch in enumerate(batches([data[i] for i in order], packs, model.pack), 1):
        with model.hardware.autocast():
            loss = model(**batch)["loss"]
        loss.backward()
        if number % count:
            continue
        optimizer.step()
        model.zero_grad()
        if number == UNTIMED * count:
            model.hardware.wait()
            begun = time.perf_counter()
    model.hardware.wait()
    return (time.perf_counter() - begun) / (TIMED * model.batch)
