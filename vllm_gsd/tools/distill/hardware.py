"""How training uses the processor that it runs on."""

from typing import NamedTuple

import torch


class Hardware(NamedTuple):
    """What is best on a processor."""

    device: str  # where the student is
    dtype: torch.dtype  # what the target and the student's forward pass are computed in
    batch: int  # texts per optimizer step
    pack: int  # texts in one forward pass of a student that keeps texts apart by a dense mask, and in measurements
    at_once: int  # requests that the target answers together, which are a file of answers

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == torch.bfloat16)


# Processors without instructions for bfloat16 multiply it less than half as fast as float32.
CPU_DTYPE = torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32
# On a CPU packs of one text are fastest, since texts of a pack do not attend to each other. A killed run generates a
# file of answers again, which takes a slow CPU minutes.
CPU = Hardware("cpu", CPU_DTYPE, batch=8, pack=1, at_once=64)
GPU = Hardware("cuda", torch.bfloat16, batch=32, pack=4, at_once=512)


def found_hardware() -> Hardware:
    """What training runs on."""
    return GPU if torch.cuda.is_available() else CPU
