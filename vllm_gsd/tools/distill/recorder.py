"""Records the target's states while it answers, so that a CPU does not run the target twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_gsd.tools.distill.hardware import found_hardware
from vllm_gsd.tools.distill.states import state_layers
from vllm_gsd.upstream.forwards import unwatch, watch


class Recorder:
    """Records the target's states while vLLM generates, so that answers need no second forward pass.

    It reads them from vLLM's V1 model runner in this process, which must run the model without torch.compile.
    """

    def __init__(self) -> None:
        # The positions and states of each step, by request.
        self.states: dict[str, list[tuple[np.ndarray, torch.Tensor]]] = {}
        self.seen: tuple[np.ndarray, torch.Tensor] | None = None

    @classmethod
    def attached(cls, llm: Any) -> Recorder | None:
        """A recorder that is active until ``take``, or None where states cannot be read or are not stored."""
        from vllm import envs

        if found_hardware().device != "cpu":
            return None
        if envs.VLLM_ENABLE_V1_MULTIPROCESSING or not llm.llm_engine.model_config.enforce_eager:
            return None
        recorder = cls()
        return recorder if all(llm.collective_rpc(recorder._attach)) else None

    def _attach(self, worker: Any) -> bool:
        from vllm.model_executor.models.interfaces import supports_eagle3

        self.runner = worker.model_runner
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
            part = positions[row : row + count], states[row : row + count]
            self.states.setdefault(request, []).append(part)
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
            positions, known = zip(*states[output.request_id], strict=True)
            places, found = np.concatenate(positions), torch.cat(known)
            # The engine may have run a token or two beyond the end.
            rows = found.new_full((max(length, int(places.max()) + 1), *found.shape[1:]), torch.nan)
            rows[places] = found
            rows = rows[:length]
            rows[-1] = 0
            if rows[:, 0, 0].isnan().any():
                return None
            parts.append(rows)
        return torch.cat(parts) if parts else None
