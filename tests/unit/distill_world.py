"""A target and a work folder with its answers, for the tests of ``vllm-gsd distill``."""

import json
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_gsd.tools.distill import states
from vllm_gsd.tools.distill.lm import LanguageModel
from vllm_gsd.tools.distill.options import Options
from vllm_gsd.tools.distill.speculators_students import BlockStudent, Eagle3Student
from vllm_gsd.tools.distill.target import Target

CONFIG = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": None, "initializer_range": 0.12,
}  # fmt: skip
PROMPT = 3


def write_target(folder: Path) -> Path:
    """Write a target with random weights. They are numbers in bfloat16, which drafts are saved in."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).bfloat16().float().save_pretrained(folder, safe_serialization=True)
    return folder


def write_answers(folder: Path, target: Path) -> Path:
    """Write two files of answers and their states."""
    (folder / "answers").mkdir()
    rng = np.random.default_rng(0)
    for name in ("00000", "00001"):
        texts = [rng.integers(0, 300, length).tolist() for length in rng.integers(12, 40, 12)]
        rows = [{"input_ids": text, "prompt_len": PROMPT, "text": ""} for text in texts]
        Dataset.from_list(rows).to_parquet(str(folder / "answers" / f"{name}.parquet"))
    (folder / "options.json").write_text(json.dumps({"target": str(target), "prompts": None}))
    states.write_missing(target, files(folder), folder / "states")
    return folder


def student(kind, target, **options):
    """A new student with a vocabulary of 256 tokens, or one that starts from ``init``."""
    size = {} if "init" in options else {"vocab_size": 256}
    arguments = Options(target=str(target), kind=kind, **size, **options)
    cls = {"dspark": BlockStudent, "eagle3": Eagle3Student, "lm": LanguageModel}[kind]
    return cls.make(arguments, Target(target), np.append(np.arange(256)[::-1], np.arange(256, 300)))


def files(work: Path) -> list[Path]:
    """The files of answers in a work folder."""
    return sorted((work / "answers").glob("*.parquet"))
