"""The optimizer of students: Muon for matrices, as in the speculators package's trainer, and AdamW for the rest."""

from contextlib import nullcontext
from typing import Any

import torch
from speculators.train.optimizers import split_named_params_for_muon
from torch.overrides import TorchFunctionMode

from vllm_gsd.tools.distill.hardware import CPU_DTYPE


class InFloat32(TorchFunctionMode):
    """Lets ``Tensor.bfloat16`` copy a tensor as it is.

    PyTorch's Muon computes in bfloat16. Without instructions for it, that takes five times as long as the rest of a
    training step.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.bfloat16:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for the matrices of layers, AdamW for embeddings, LM heads, biases and norms.

    Muon's steps are scaled to the size of AdamW's (Liu et al. 2025), so one learning rate serves both.
    """

    def __init__(self, model: torch.nn.Module, lr: float, weight_decay: float):
        matrices, others = split_named_params_for_muon(model)
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay),
        ]
        super().__init__(self._groups(), {})
        on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
        self.precision = InFloat32() if on_cpu and CPU_DTYPE is torch.float32 else nullcontext()

    def _groups(self) -> list[dict[str, Any]]:
        """The parts' own groups, so that a scheduler that sets their learning rates reaches the parts."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:
        with self.precision:
            for part in self.parts:
                part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = self._groups()  # loading replaced them
