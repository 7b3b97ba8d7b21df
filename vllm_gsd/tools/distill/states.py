"""The target's states over the answers, recorded while it answers or computed by a separate forward pass.

``data`` describes the files.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_gsd.tools.distill.data import state_layers
from vllm_gsd.upstream.forwards import unwatch, watch

# Maximum tokens of a forward pass.
BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}


class Recorder:
    """Records the target's states while vLLM generates, so that answers need no second forward pass.

    It reads them from vLLM's V1 model runner in this process, which must run the model without torch.compile.
    """

    def __init__(self) -> None:
        self.states: dict[str, torch.Tensor] = {}
        self.seen: tuple[np.ndarray, torch.Tensor] | None = None

    @classmethod
    def attached(cls, llm: Any) -> Recorder | None:
        """A recorder that is active until ``take``, or None where the states cannot be read."""
        from vllm import envs

        if envs.VLLM_ENABLE_V1_MULTIPROCESSING or not llm.llm_engine.model_config.enforce_eager:
            return None
        recorder = cls()
        return recorder if all(llm.collective_rpc(recorder._attach)) else None

    def _attach(self, worker: Any) -> bool:
        from vllm.model_executor.models.interfaces import supports_eagle3

        self.runner = worker.model_runner
        self.longest = self.runner.max_model_len
        model = self.runner.get_model()
        if not supports_eagle3(model) or not watch(self.runner, self._begin, self._see, self._keep):
            return False
        model.set_aux_hidden_state_layers(tuple(state_layers(self.runner.model_config.hf_config.num_hidden_layers)))
        return True

    def _begin(self) -> None:
        self.seen = None

    def _see(self, positions: torch.Tensor, output: Any) -> torch.Tensor:
        last, layers = output
        self.seen = positions.cpu().numpy().copy(), torch.stack(layers, 1).to("cpu", torch.bfloat16)
        return last

    def _keep(self, scheduler_output: Any) -> None:
        if self.seen is None:
            return
        positions, states = self.seen
        row = 0
        for request in self.runner.input_batch.req_ids:
            count = scheduler_output.num_scheduled_tokens[request]
            if request not in self.states:
                self.states[request] = states.new_full((self.longest, *states.shape[1:]), torch.nan)
            self.states[request][positions[row : row + count]] = states[row : row + count]
            row += count

    def take(self, outputs: list[Any]) -> torch.Tensor | None:
        """Stop, and return the rows of these finished requests one after the other, or None if one is incomplete."""
        unwatch(self.runner)
        self.runner.get_model().set_aux_hidden_state_layers(())
        # vLLM appends a random suffix to its request ids.
        states = {name.rsplit("-", 1)[0]: rows for name, rows in self.states.items()} | self.states
        parts = []
        for output in outputs:
            length = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
            rows = states[output.request_id][:length].clone()
            rows[-1] = 0
            if rows[:, 0, 0].isnan().any():
                return None
            parts.append(rows)
        return torch.cat(parts) if parts else None


def write(states: torch.Tensor, folder: Path, name: str) -> None:
    """Write a file of states atomically."""
    from safetensors.torch import save_file

    partial = folder / f"{name}.partial"
    save_file({"states": states}, partial)
    partial.rename(folder / f"{name}.safetensors")


@torch.inference_mode()
def write_missing(target: Path, answers: list[Path], folder: Path, batch_tokens: int | None = None) -> None:
    """Run the target over the answers whose states are missing.

    Args:
        answers: files from ``generate.answer``.
        batch_tokens: maximum tokens of a forward pass; None for what suits the processor.
    """
    from datasets import Dataset
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM

    folder.mkdir(exist_ok=True)
    missing = [file for file in answers if not (folder / f"{file.stem}.safetensors").exists()]
    if not missing:
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch_tokens = batch_tokens or BATCH_TOKENS[device]
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).base_model.to(device).eval()
    layers = state_layers(model.config.num_hidden_layers)
    seen: dict[int, torch.Tensor] = {}
    for layer in layers:
        model.layers[layer - 1].register_forward_hook(lambda _, args, output, layer=layer: seen.update({layer: output}))
    with ThreadPoolExecutor(1) as writer:
        writing: list[Future[None]] = []
        for file in tqdm(missing, desc="states", unit="shard"):
            texts = [np.asarray(ids) for ids in Dataset.from_parquet(str(file), keep_in_memory=True)["input_ids"]]
            starts = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
            states = torch.zeros(int(starts[-1]), len(layers), model.config.hidden_size, dtype=torch.bfloat16)
            for chosen in _batches([len(text) for text in texts], batch_tokens):
                longest = len(texts[chosen[-1]])
                ids = torch.zeros(len(chosen), longest, dtype=torch.int64)
                for line, index in enumerate(chosen):
                    ids[line, : len(texts[index])] = torch.from_numpy(texts[index])
                model(input_ids=ids.to(device), use_cache=False)
                found = torch.stack([seen[layer] for layer in layers], 2).cpu()
                for line, index in enumerate(chosen):
                    states[starts[index] : starts[index + 1]] = found[line, : len(texts[index])]
            # A file is written while the next one's states are computed.
            for before in writing:
                before.result()
            writing = [writer.submit(write, states, folder, file.stem)]
        for before in writing:
            before.result()


def _batches(lengths: list[int], most: int) -> list[list[int]]:
    """Batches of texts (by index) of similar length, shortest first, each of at most ``most`` padded tokens."""
    batches: list[list[int]] = [[]]
    for index in np.argsort(lengths, kind="stable"):
        if batches[-1] and (len(batches[-1]) + 1) * lengths[index] > most:
            batches.append([])
        batches[-1].append(int(index))
    return batches
