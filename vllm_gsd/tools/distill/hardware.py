"""How training uses the processor that it runs on."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch


class Hardware(NamedTuple):
    """What is best on a processor.

    Args:
        device: where the student is.
        attention: the implementation that speculators' models use. All but "sdpa" need torch.compile.
        batch: texts per optimiser step.
        pack: texts in one forward pass.
        anchors: blocks that are trained per text, at random places of the answer.
        workers: processes that read packs, 0 for the training process itself.
        untimed, timed: forward passes before the speed is measured, and those that it is measured over.
    """

    device: str
    attention: str
    batch: int
    pack: int
    anchors: int
    workers: int
    untimed: int
    timed: int

    def plain(self) -> Hardware:
        """The same without torch.compile. A dense mask and every intermediate result are in memory then."""
        return self._replace(attention="sdpa", pack=min(self.pack, 4))


# On a CPU a single text costs least, since texts do not attend to each other.
CPU = Hardware("cpu", "sdpa", batch=8, pack=1, anchors=24, workers=0, untimed=1, timed=15)
# The first passes compile the model, and the next ones read packs that were collected meanwhile.
GPU = Hardware("cuda", "simple_flex_attention", batch=32, pack=32, anchors=64, workers=12, untimed=24, timed=40)


def found_hardware() -> Hardware:
    """What training runs on."""
    return GPU._replace(workers=min(GPU.workers, os.cpu_count() or 1)) if torch.cuda.is_available() else CPU
