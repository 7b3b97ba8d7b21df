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
from vllm_gsd.tools.distill.stages import kept, logger, stage
from vllm_gsd.tools.distill.students import Student

WARM_UP = 0.05
WEIGHT_DECAY = 0.01
# Packs up to this much longer than usual are padded to one size; longer ones take twice that.
SLACK = 1.35
# The number of positions in a block of flex attention.
ATTENTION_BLOCK = 128


def train(model: Student, work: Path, data: list[Answer], packs: Packs, options: Options, minutes: float | None) -> int:
    """Train a student in float32, resuming from its checkpoints; return the number of steps.

    It is planned from the time limit, if there is one.
    """
    from transformers import Trainer, TrainingArguments

    model.train()
    _try(model, data, packs)
    steps = _planned_steps(model, work, data, packs, options, minutes)
    hardware = model.hardware
    arguments = TrainingArguments(
        output_dir=str(work / "checkpoints"),
        use_cpu=hardware.device == "cpu",
        bf16=hardware.dtype == torch.bfloat16,
        max_steps=steps,
        per_device_train_batch_size=hardware.pack,
        gradient_accumulation_steps=hardware.batch // hardware.pack,
        learning_rate=options.learning_rate,
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
        optimizers=(MuonAndAdamW(model, options.learning_rate, WEIGHT_DECAY), None),
    )
    # A pack of an unusual size that does not compile is computed without.
    with stage(f"training in {steps} steps"), torch._dynamo.config.patch(suppress_errors=True):
        trainer.train(resume_from_checkpoint=last and str(last))
    packs.multiple = 1
    return steps


def _try(model: Student, data: list[Answer], packs: Packs) -> None:
    """Compile the model if that helps, and continue without torch.compile if it fails."""
    if model.hardware.attention == "sdpa":
        return
    packs.multiple = _usual_size(model, data)
    batch = packs.collate([data[i % len(data)] for i in range(model.hardware.pack)])
    try:
        with stage("compiling the student"):
            _learn(model, batch)
            model.hardware.wait()
    except Exception as error:
        logger.warning("training continues without torch.compile, which failed: %s", error)
        model.go_plain()
    model.zero_grad()
    packs.multiple = _usual_size(model, data)


def _usual_size(model: Student, data: list[Answer]) -> int:
    """Positions that nearly all packs fit in, for which the model is compiled; 1 where nothing is compiled."""
    if model.hardware.attention == "sdpa":
        return 1
    size = SLACK * model.hardware.pack * (float(np.mean([len(answer.input_ids) for answer in data])) + model.padding)
    return -(-int(size) // ATTENTION_BLOCK) * ATTENTION_BLOCK


def _planned_steps(
    model: Student, work: Path, data: list[Answer], packs: Packs, options: Options, minutes: float | None
) -> int:
    """The number of optimizer steps, decided once, so that a resumed run follows the same schedule."""

    def plan() -> dict[str, int]:
        batch = model.hardware.batch
        steps = max(1, round(options.epochs * len(data) / batch))
        if minutes is not None:
            with stage("measuring the speed of training"):
                per_step = batch * _seconds_per_text(model, data, packs, options.seed)
            steps = max(1, min(steps, int(60 * minutes / per_step)))
        return {"steps": steps}

    return int(kept(work / "steps.json", plan)["steps"])


def _seconds_per_text(model: Student, data: list[Answer], packs: Packs, seed: int) -> float:
    """Mean time to read random texts and to learn from them. The weights do not change."""
    size, count = model.hardware.pack, model.hardware.untimed + model.hardware.timed
    order = np.resize(np.random.default_rng(seed).permutation(len(data)), count * size)
    begun = 0.0
    for number, batch in enumerate(batches([data[i] for i in order], packs, size), 1):
        _learn(model, batch)
        model.zero_grad()
        if number == model.hardware.untimed:
            model.hardware.wait()
            begun = time.perf_counter()
    model.hardware.wait()
    return (time.perf_counter() - begun) / (size * model.hardware.timed)


def _learn(model: Student, batch: dict[str, torch.Tensor]) -> None:
    """A forward and a backward pass, as the Trainer makes them."""
    with model.hardware.autocast():
        loss = model(**batch)["loss"]
    loss.backward()
