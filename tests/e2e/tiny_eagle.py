"""A draft of EAGLE's kind for the tiny target: fitted to its hidden states over random text, never trained."""

from pathlib import Path

import numpy as np
import torch
from datasets import Dataset

from vllm_gsd.tools.distill import eagle, hidden_states
from vllm_gsd.tools.distill.train import load_answers


def build_tiny_eagle(target: Path, folder: Path, vocab_size: int) -> Path:
    """Build it in ``folder``; the layer is random but for what the fit says."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    torch.manual_seed(5)
    prompts = torch.randint(3, vocab_size, (64, 8))
    texts = model.generate(prompts, max_new_tokens=56, do_sample=False, eos_token_id=None, pad_token_id=0).numpy()
    answer = {"prompt_len": 8, "top_ids": [0] * 8, "top_logprobs": [0.0] * 8, "text": ""}
    folder.mkdir()
    file = folder / "answers.parquet"
    Dataset.from_list([{"input_ids": text.tolist(), **answer} for text in texts]).to_parquet(str(file))
    features = hidden_states.write_features(target, [file], folder / "features")
    eagle.make_start(target, folder / "start", np.arange(vocab_size), load_answers([file], 100), features)
    student = eagle.load(folder / "start", target)
    for module in (student.layers[0].self_attn.o_proj, student.layers[0].mlp.down_proj):
        torch.nn.init.normal_(module.weight, std=0.02)
    eagle.save_trained(student, folder / "start", folder / "draft")
    return folder / "draft"


def load_exact(draft: Path, target: Path) -> eagle.EagleStudent:
    """The student as an engine in float32 runs it."""
    student = eagle.load(draft, target)
    embedding, head = eagle.target_ends(target)
    student.embedding, student.head = embedding.float(), head[student.token_ids].float()
    return student


def chain_steps(student: eagle.EagleStudent, model, text: list[int], first: int, length: int) -> tuple[int, int]:
    """Target steps, and drafts accepted, of a greedy chain of ``length`` drafts, where the text is the target's own.

    Args:
        text: prompt and answer; ``first``: the prompt's length.
    """
    with torch.no_grad():
        states = model.model(input_ids=torch.tensor([text]))[0]
    features = torch.nn.functional.pad(states[:, :-1], (0, 0, 1, 0))
    steps, accepted, known = 1, 0, first + 1  # the prompt's own step gives a token
    while known < len(text):
        path = list(text[:known])
        before = features[:, :known]
        most = min(length, len(text) - known - 1)  # the last place is the bonus token's
        for _ in range(most):
            with torch.no_grad():
                hidden = student.levels(torch.tensor([path]), before, 1)[0][:, -1:]
            path.append(int(student.token_ids[(hidden @ student.head.T).argmax()]))
            before = torch.cat((before, hidden), 1)
        right = 0
        while right < most and path[known + right] == text[known + right]:
            right += 1
        steps, accepted, known = steps + 1, accepted + right, known + right + 1
    return steps, accepted
