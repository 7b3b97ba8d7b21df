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

PARTS = ("draft forward", "draft", "target forward", "attention", "walk", "compaction", "scheduler", "other")


def runner_of(llm: Any) -> Any:
    """An engine's model runner; None where it is in another process."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    worker = getattr(getattr(core, "model_executor", None), "driver_worker", None)
    return getattr(getattr(worker, "worker", None), "model_runner", None)


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
        runner = runner_of(llm)
        if runner is None:
            return False
        core = llm.llm_engine.engine_core.engine_core
        self._wrap(llm.llm_engine, "step", "other")
        for name in ("schedule", "update_from_output", "get_grammar_bitmask", "update_draft_token_ids"):
            self._wrap(core.scheduler, name, "scheduler")
        self._wrap(runner, "_model_forward", "target forward")
        self._wrap(runner.model, "compute_logits", "target forward")
        self._wrap(runner, "propose_draft_token_ids", "draft")
        # Of our own drafting, what the draft model takes; upstream's proposers are "draft" as a whole.
        draft_model = getattr(getattr(getattr(runner, "drafter", None), "drafter", None), "model", None)
        self._wrap(draft_model, "_call", "draft forward")
        self._wrap(draft_model, "most_probable", "draft forward")
        self._wrap(runner, "_sample", "walk")
        self._wrap(runner, "_compact", "compaction")
        for layer in runner.compilation_config.static_forward_context.values():
            if hasattr(layer, "impl"):
                self._wrap(layer.impl, "forward", "attention")
        return True

    def restart(self) -> None:
        """Start again from zero."""
        self.seconds.clear()
        self.draft_levels = 0

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] | None = getattr(owner, name, None)
        if function is None:
            return  # this engine's step has no such part

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

        setattr(owner, name, timed)

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
