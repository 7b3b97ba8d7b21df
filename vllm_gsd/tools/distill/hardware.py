"""How training uses the processor that it runs on."""

from typing import NamedTuple, Self

import torch


class Hardware(NamedTuple):
    """What is best on a processor."""

    device: str  # where the student is
    dtype: torch.dtype  # what the target and the student's forward pass are computed in
    attention: str  # the implementation that speculators' models use; all but "sdpa" need torch.compile
    batch: int  # texts per optimizer step
    pack: int  # texts in one forward pass
    anchors: int  # blocks that are trained per text, at random places of the answer
    untimed: int  # forward passes before the speed is measured
    timed: int  # those that it is measured over

    def plain(self) -> Self:
        """The same without torch.compile. A dense mask and every intermediate result are in memory then."""
        return self._replace(attention="sdpa", pack=min(self.pack, 4))

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def wait(self) -> None:
        """Wait until the device has finished. The processor that gives it work runs ahead."""
        if self.device == "cuda":
            torch.cuda.synchronize()


# Processors without instructions for bfloat16 multiply it less than half as fast as float32.
CPU_DTYPE = torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32
# On a CPU packs of one text are fastest, since texts of a pack do not attend to each other.
CPU = Hardware("cpu", CPU_DTYPE, "sdpa", batch=8, pack=1, anchors=24, untimed=1, timed=15)
# The first passes may compile the model again, for a pack of another size.
GPU = Hardware("cuda", torch.bfloat16, "simple_flex_attention", batch=32, pack=32, anchors=64, untimed=8, timed=40)


def found_hardware() -> Hardware:
    """What training runs on."""
    return GPU if torch.cuda.is_available() else CPU
