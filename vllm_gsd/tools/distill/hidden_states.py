"""The target's hidden states over the answers, recorded while it answers or computed by a separate forward pass.

Each file of answers has a file ``{name}.npy``, float16 [tokens of all its rows, hidden]. The row of an answer's last
token is not used, because the target need not have run it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_gsd.tools.distill.train import collate
from vllm_gsd.upstream.forwards import unwatch, watch


class Recorder:
    """Records the target's hidden states while vLLM generates, so that answers need no second forward pass.

    It reads them from vLLM's V1 model runner in this process.
    """

    def __init__(self) -> None:
        self.states: dict[str, np.ndarray] = {}
        self.seen: tuple[np.ndarray, np.ndarray] | None = None

    @classmethod
    def attached(cls, llm: Any) -> Recorder | None:
        """A recorder that is active until ``take``, or None for another runner or a runner in another process."""
        from vllm import envs

        if envs.VLLM_ENABLE_V1_MULTIPROCESSING:
            return None
        recorder = cls()
        return recorder if all(llm.collective_rpc(recorder._attach)) else None

    def _attach(self, worker: Any) -> bool:
        self.runner = worker.model_runner
        self.longest = self.runner.max_model_len
        return watch(self.runner, self._begin, self._see, self._keep)

    def _begin(self) -> None:
        self.seen = None

    def _see(self, positions: torch.Tensor, states: torch.Tensor) -> None:
        self.seen = (positions.cpu().numpy().copy(), states.to("cpu", torch.float16).numpy())

    def _keep(self, scheduler_output: Any) -> None:
        if self.seen is None:
            return
        positions, states = self.seen
        row = 0
        for request in self.runner.input_batch.req_ids:
            count = scheduler_output.num_scheduled_tokens[request]
            if request not in self.states:
                self.states[request] = np.full((self.longest, states.shape[1]), np.nan, np.float16)
            self.states[request][positions[row : row + count]] = states[row : row + count]
            row += count

    def take(self, outputs: list[Any]) -> np.ndarray | None:
        """Stop, and return the concatenated rows of these finished requests, or None if one is incomplete."""
        unwatch(self.runner)
        # vLLM appends a random suffix to its request ids.
        states = {name.rsplit("-", 1)[0]: rows for name, rows in self.states.items()} | self.states
        parts = []
        for output in outputs:
            length = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
            rows = states[output.request_id][:length].copy()
            rows[-1] = 0
            if np.isnan(rows[:, 0]).any():
                return None
            parts.append(rows)
        return np.concatenate(parts) if parts else None


def write(states: np.ndarray, folder: Path, name: str) -> None:
    """Write a file of hidden states atomically."""
    partial = folder / f"{name}.partial.npy"
    np.save(partial, states)
    partial.rename(folder / f"{name}.npy")


class Features:
    """Reads the target's hidden states over the answers.

    Args:
        folder: the folder of the files ``{name of the answers' file}.npy``, float16 [tokens, hidden].
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[str, np.ndarray] = {}

    def of(self, row: dict[str, Any]) -> torch.Tensor:
        """Hidden states of a request with its answer, float32 [length, hidden]."""
        name = str(row["file"])
        if name not in self.files:
            self.files[name] = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        first = int(row["first"])
        return torch.from_numpy(self.files[name][first : first + len(row["input_ids"])].astype(np.float32))

    def collate(self, answers: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """The arguments of ``EagleStudent.forward`` for a batch."""
        batch = collate(answers)
        own = [self.of(answer) for answer in answers]
        features = torch.zeros(*batch["input_ids"].shape, own[0].shape[1], dtype=torch.bfloat16)
        for line, rows in enumerate(own):
            features[line, 1 : len(rows)] = rows[:-1]
        return {**batch, "features": features}


@torch.inference_mode()
def write_features(target: Path, answers: list[Path], folder: Path, batch_tokens: int = 4096) -> Features:
    """Run the target over the answers whose hidden states are missing.

    Args:
        answers: files from ``generate.answer``.
        batch_tokens: maximum tokens of a forward pass.
    """
    from datasets import Dataset
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM

    folder.mkdir(exist_ok=True)
    missing = [file for file in answers if not (folder / f"{file.stem}.npy").exists()]
    if not missing:
        return Features(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).base_model.to(device).eval()
    for file in tqdm(missing, desc="hidden states", unit="shard"):
        texts = [np.asarray(ids) for ids in Dataset.from_parquet(str(file), keep_in_memory=True)["input_ids"]]
        starts = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
        states = np.zeros((starts[-1], model.config.hidden_size), np.float16)
        for chosen in _batches([len(text) for text in texts], batch_tokens):
            longest = len(texts[chosen[-1]])
            ids = torch.zeros(len(chosen), longest, dtype=torch.int64)
            for line, index in enumerate(chosen):
                ids[line, : len(texts[index])] = torch.from_numpy(texts[index])
            hidden = model(input_ids=ids.to(device), use_cache=False)[0].to("cpu", torch.float16).numpy()
            for line, index in enumerate(chosen):
                states[starts[index] : starts[index + 1]] = hidden[line, : len(texts[index])]
        write(states, folder, file.stem)
    return Features(folder)


def _batches(lengths: list[int], most: int) -> list[list[int]]:
    """Batches of texts (by index) of similar length, shortest first, each of at most ``most`` padded tokens."""
    batches: list[list[int]] = [[]]
    for index in np.argsort(lengths, kind="stable"):
        if batches[-1] and (len(batches[-1]) + 1) * lengths[index] > most:
            batches.append([])
        batches[-1].append(int(index))
    return batches
