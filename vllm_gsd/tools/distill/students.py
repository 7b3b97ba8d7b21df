"""What the three kinds of students have in common: how the Trainer and the measurements see them."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_gsd.tools.distill.data import Answer
from vllm_gsd.tools.distill.hardware import found_hardware
from vllm_gsd.tools.distill.packs import Packs
from vllm_gsd.tools.distill.states import Source
from vllm_gsd.tools.distill.target import Target


class Drafted(NamedTuple):
    """What a student drafts over a batch when the text before is the true one."""

    logits: torch.Tensor  # [m, drafted tokens]
    rows: torch.Tensor  # int64 [m], the flat positions of the batch whose states predict the same tokens
    chains: torch.Tensor  # int64 [n, depth], the indices in ``logits`` of each chain's tokens, in order


def layers_that_stay(depth: int, count: int) -> list[int]:
    """The numbers of ``count`` out of ``depth`` layers, ascending: the last and others at equal distances."""
    return sorted(int(number) for number in torch.linspace(depth - 1, 0, count).round())


class Student(nn.Module):
    """A student in training.

    Args:
        model: a model of transformers or of the speculators package, in float32.
        token_ids: the tokens that it can draft, int64 [n].
        target: loaded, on the device that the student goes to.
    """

    # How many states each text needs behind it, and whether a token is read with the states before it.
    padding, shift = 0, False

    def __init__(self, model: Any, token_ids: torch.Tensor, target: Target):
        super().__init__()
        self.model, self.target, self.hardware = model, target, found_hardware()
        # Texts of an optimizer step, and of a forward pass of training.
        self.batch, self.pack = self.hardware.batch, self.hardware.pack
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.to(self.hardware.device)

    def packs(self, source: Source) -> Packs:
        return Packs(source, self.padding, self.shift, self.hardware.dtype)

    def start(self, data: list[Answer], packs: Packs, new: bool) -> None:
        """Prepare for training on the answers; a new student gets better first weights than random ones."""

    def drafted(self, batch: dict[str, torch.Tensor]) -> Drafted:
        raise NotImplementedError

    def save(self, out: Path) -> None:
        """Write the folder that engines load, in bfloat16. The student is of no use afterwards."""
        self.model.to(torch.bfloat16).save_pretrained(out)
        self.target.copy_tokenizer(out)

    def load_state_dict(self, state_dict: Any, *args, **kwargs) -> Any:
        """Load what ``state_dict`` returned. The rest stays as it is."""
        return super().load_state_dict({**super().state_dict(), **state_dict})

    def state_dict(self, *args, **kwargs) -> dict[str, Any]:
        """Only the trained weights. The rest is the target's."""
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name in trained}
