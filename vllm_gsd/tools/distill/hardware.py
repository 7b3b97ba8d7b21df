"""How training uses the processor that it runs on."""

from typing import NamedTuple

import torch


class Hardware(NamedTuple):
    """What is best on a processor."""

    device: str  # where the student is
    dtype: torch.dtype  # what the target and the student's forward pass are computed in
    batch: int  # texts per optimizer step
    pack: int  # texts in one forward pass of a student that keeps texts apart by a dense mask, and in measurements

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def wait(self) -> None:
        """Wait until the device has finished. The processor that gives it work runs ahead."""
        if self.device == "cuda":
            torch.cuda.synchronize()


# Processors without instructions for bfloat16 multiply it less than half as fast as float32.
CPU_DTYPE = torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32
# On a CPU packs of one text are fastest, since texts of a pack do not attend to each other.
CPU = Hardware("cpu", CPU_DTYPE, batch=8, pack=1)
GPU = Hardware("cuda", torch.bfloat16, batch=32, pack=4)


def found_hardware() -> Hardware:
    """What training runs on."""
    return GPU if torch.cuda.is_available() else CPU
