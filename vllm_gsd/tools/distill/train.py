"""Training a student with transformers' ``Trainer``, which resumes from the last checkpoint."""

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from vllm_gsd.tools.distill.data import Answer
from vllm_gsd.tools.distill.optimizer import MuonAndAdamW
from vllm_gsd.tools.distill.options import Options
from vllm_gsd.tools.distill.packs import Packs
from vllm_gsd.tools.distill.stages import kept, stage
from vllm_gsd.tools.distill.students import Student

WARM_UP = 0.05
WEIGHT_DECAY = 0.01
# Optimizer steps over which the speed of training is measured.
TIMED = 4


def train(model: Student, work: Path, data: list[Answer], packs: Packs, options: Options, minutes: float | None) -> int:
    """Train a student in float32, resuming from its checkpoints; return the number of steps.

    It is planned from the time limit, if there is one, and only once, so that a resumed run has the same schedule.
    """
    model.train()
    folder = work / "checkpoints"

    def trainer(steps: int, rate: float) -> Any:
        arguments = TrainingArguments(
            output_dir=str(folder),
            use_cpu=model.hardware.device == "cpu",
            bf16=model.hardware.dtype == torch.bfloat16,
            max_steps=steps,
            per_device_train_batch_size=model.pack,
            gradient_accumulation_steps=model.batch // model.pack,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, round(WARM_UP * steps)),
            remove_unused_columns=False,
            dataloader_pin_memory=False,  # batches are on the device already
            logging_steps=max(1, min(50, steps // 10)),
            logging_nan_inf_filter=False,  # the filter waits for the GPU at every step
            save_strategy="steps" if rate else "no",
            save_steps=max(10, min(500, steps // 10)),
            save_total_limit=1,
            report_to="none",
            seed=options.seed,
        )
        # With several GPUs the Trainer would multiply the batch by their number, but a pack cannot be divided.
        arguments._n_gpu = min(1, arguments.n_gpu)
        optimizers = MuonAndAdamW(model, rate, WEIGHT_DECAY), None
        return Trainer(model, arguments, packs.collate, train_dataset=data, optimizers=optimizers)

    def plan() -> int:
        steps = max(1, round(options.epochs * -(-len(data) // model.batch)))
        if minutes is None:
            return steps
        with stage("measuring the speed of training"):  # at a rate of 0, so the weights do not change
            seconds = trainer(TIMED, 0.0).train().metrics["train_runtime"] / TIMED
        return max(1, min(steps, int(60 * minutes / seconds)))

    steps = kept(work / "steps.json", plan)
    # A run that was killed while it saved left a folder without this file, which is written last.
    saved = [file.parent for file in folder.glob("checkpoint-*/trainer_state.json")]
    last = max(saved, key=lambda folder: int(folder.name.split("-")[1]), default=None)
    with stage(f"training in {steps} steps"):
        trainer(steps, options.value("learning_rate")).train(resume_from_checkpoint=last and str(last))
    return steps
