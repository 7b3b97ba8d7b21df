"""The target's states over the answers: read from files, or computed where they are used.

The states of an answer are bfloat16 [tokens, layers, hidden]. That of its last token is not used, because the target
need not have run it.

A CPU runs the target slowly, so its states are stored: ``states/{name}.safetensors`` holds one tensor, ``states``, with
those of all answers of ``answers/{name}.parquet``. On a GPU they are computed again for each pack. That costs
little compared with training the student on the pack. For a large target, every epoch costs what storing would have
cost once. Storing 9M tokens of a small target took 39 GB and more time than its training.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vllm_gsd.tools.distill.data import Answer, read_answers
from vllm_gsd.tools.errors import ToolError

# Maximum tokens of a forward pass, padding included. More need fewer launches for a pack and have more padding.
BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}


def state_layers(depth: int) -> list[int]:
    """The layers of a target of ``depth`` layers whose states are kept: about each quarter of them, and the last.

    Layer n is the state that layer n reads, and ``depth`` the last layer's output, before the final norm.
    """
    return sorted({min(depth, quarter * -(-depth // 4)) for quarter in (1, 2, 3, 4)})


#: Where states come from: gives those of each answer.
Source = Callable[[list[Answer]], list[torch.Tensor]]


class StoredStates:
    """Reads states from the files in ``folder``."""

    def __init__(self, folder: Path):
        self.file = cache(lambda name: _opened(folder / f"{name}.safetensors"))

    def __call__(self, answers: list[Answer]) -> list[torch.Tensor]:
        return [self.file(answer.file)[answer.first : answer.first + len(answer.input_ids)] for answer in answers]


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, "pt").get_slice("states")
    except SafetensorError as error:
        raise ToolError(f"{str(file)!r} is damaged ({error}); delete it, and the states are made again.") from error


class ComputedStates:
    """Runs the target over answers."""

    def __init__(self, target: Path, device: str, dtype: torch.dtype = torch.bfloat16):
        from transformers import AutoModelForCausalLM

        self.device = device
        self.model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).base_model
        self.model.to(device).eval()
        self.seen: dict[int, torch.Tensor] = {}
        for layer in state_layers(self.model.config.num_hidden_layers):
            self.model.layers[layer - 1].register_forward_hook(
                lambda _, args, output, layer=layer: self.seen.update({layer: output})
            )

    # Not in inference mode, whose tensors a student's backward pass cannot use.
    @torch.no_grad()
    def __call__(self, answers: list[Answer]) -> list[torch.Tensor]:
        """See ``Source``. Each text is a line of a forward pass, so it sees no other; padding comes after it."""
        texts = [torch.from_numpy(answer.input_ids) for answer in answers]
        found: dict[int, torch.Tensor] = {}
        for chosen in _batches([len(text) for text in texts], BATCH_TOKENS[self.device]):
            ids = torch.nn.utils.rnn.pad_sequence([texts[index] for index in chosen], batch_first=True)
            self.model(input_ids=ids.to(self.device), use_cache=False)
            states = torch.stack([self.seen[layer].bfloat16() for layer in sorted(self.seen)], 2)
            found |= {index: states[line, : len(texts[index])] for line, index in enumerate(chosen)}
        return [found[index] for index in range(len(texts))]


def _batches(lengths: list[int], most: int) -> list[list[int]]:
    """Batches of texts (by index) of similar length, shortest first, each of at most ``most`` padded tokens."""
    batches: list[list[int]] = [[]]
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches[-1] and (len(batches[-1]) + 1) * lengths[index] > most:
            batches.append([])
        batches[-1].append(index)
    return batches


def write_missing(target: Path, answers: list[Path], folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Run the target on the CPU over the files of answers whose states are missing. See ``ComputedStates``."""
    from safetensors.torch import save_file
    from tqdm import tqdm

    folder.mkdir(exist_ok=True)
    if missing := [file for file in answers if not (folder / f"{file.stem}.safetensors").exists()]:
        compute = ComputedStates(target, "cpu", dtype)
        for file in tqdm(missing, desc="states", unit="shard"):
            partial = folder / f"{file.stem}.{os.getpid()}.partial"  # another run may read the same answers
            save_file({"states": torch.cat(compute(read_answers(file)))}, partial)
            partial.chmod(0o644)  # safetensors' own mode would keep other users from learning from these answers
            partial.rename(folder / f"{file.stem}.safetensors")
