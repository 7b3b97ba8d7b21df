"""A clock over the parts of a step: the forward passes of target and draft, and everything around them.

It wraps the functions that make up a step, on the live objects of an engine in this process. When one part calls
another, the time counts only for the inner part.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from vllm_gsd.upstream.parts import wrap_parts

PARTS = ("draft forward", "draft", "target forward", "attention", "walk", "compaction", "scheduler", "other")


class PartsClock:
    """Seconds by part. ``attach`` it once, ``restart`` it, then read ``seconds``. It runs while ``on`` is true.

    ``total`` is the time of the whole steps, from the same readings of the clock, so the parts add up to it. Readings
    around a step would not do: between them and the clock's, a busy machine may run others for many milliseconds.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.total = 0.0
        self.draft_levels = 0  # forward passes of our own drafts
        self.running: list[str] = []
        self.since = 0.0
        self.on = False
        # Cached, because the check costs time in every part.
        self.has_gpu = torch.cuda.is_available()

    def attach(self, llm: Any) -> bool:
        """Wrap the parts of this engine's step. Returns False if they run in other processes."""
        return wrap_parts(llm, self._timed)

    def restart(self) -> None:
        self.seconds.clear()
        self.total = 0.0
        self.draft_levels = 0

    def _timed(self, function: Callable[..., Any], name: str, part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            # Attention within the draft counts as drafting.
            if not self.on or (self.running and self.running[-1].startswith("draft") and part != "draft forward"):
                return function(*args, **kwargs)
            self.draft_levels += name == "_call"
            self._charge()
            began = self.since
            self.running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                self.running.pop()
                if not self.running:
                    self.total += self.since - began

        return timed

    def _charge(self) -> None:
        """Add the time since the last change to the part that was running."""
        if self.has_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.running:
            self.seconds[self.running[-1]] += now - self.since
        self.since = now
