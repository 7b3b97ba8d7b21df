"""A clock over the parts of a step: what of it the models' forwards take, and what the rest.

The functions that make up a step are wrapped on the live objects of an engine in this process; time within a part that
another part calls counts for the inner one alone.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from vllm_gsd.upstream.parts import wrap_parts

PARTS = ("draft forward", "draft", "target forward", "attention", "walk", "compaction", "scheduler", "other")


class PartsClock:
    """Seconds by part; ``attach`` it once, ``restart`` it, read ``seconds``. It runs while it is ``on``."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.draft_levels = 0  # forward passes of our own drafts
        self.running: list[str] = []
        self.since = 0.0
        self.on = False
        # Asked once: every part would ask twice, and pay for it.
        self.has_gpu = torch.cuda.is_available()

    def attach(self, llm: Any) -> bool:
        """Wrap the parts of this engine's step; False where they run in other processes."""
        return wrap_parts(llm, self._timed)

    def restart(self) -> None:
        """Start again from zero."""
        self.seconds.clear()
        self.draft_levels = 0

    def _timed(self, function: Callable[..., Any], name: str, part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            # The draft's own attention is drafting.
            if not self.on or (self.running and self.running[-1].startswith("draft") and part != "draft forward"):
                return function(*args, **kwargs)
            self.draft_levels += name == "_call"
            self._enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return timed

    def _enter(self, part: str) -> None:
        self._charge()
        self.running.append(part)

    def _leave(self) -> None:
        self._charge()
        self.running.pop()

    def _charge(self) -> None:
        """Give the time since the last change to the part that ran."""
        if self.has_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.running:
            self.seconds[self.running[-1]] += now - self.since
        self.since = now
