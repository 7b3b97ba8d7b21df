"""Compares graph, tree and chain in one engine, with the same memory and cost table, so that only the form differs.

Separate engines differ by a few percent for reasons unrelated to the form, which is as much as the forms differ.
"""

import random
from collections.abc import Callable
from statistics import median
from typing import Any

from vllm_gsd.tools.bench.bounds import mean_with_bounds
from vllm_gsd.tools.bench.methods import FORMS, Setting
from vllm_gsd.tools.bench.turns import Engines, tokens_per_second


def measure(setting: Setting, engines: Engines, tick: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Run every prompt in every form, one request at a time, in random order: a warm-up turn and ``repeats`` turns.

    Returns:
        by category ("" for all prompts): ``prompts``, their number, and for each form other than the graph the ratio of
        the graph's speed to it, see ``mean_with_bounds``.
    """
    work, order = engines.work, random.Random(0)
    speeds: list[dict[str, list[float]]] = [{form: [] for form in FORMS} for _ in work.requests]
    with engines.turn(setting) as run:  # all forms share one engine
        for turn in range(work.repeats + 1):
            runs = [(prompt, form) for prompt in range(len(work.requests)) for form in FORMS]
            for prompt, form in order.sample(runs, len(runs)):
                chats = [work.requests[prompt].chat]
                job = {"chats": chats, "concurrency": 1, "max_tokens": work.max_tokens, "form": form}
                speed = tokens_per_second(run(job))
                if turn > 0:
                    speeds[prompt][form].append(speed)
            if turn > 0:
                tick(f"forms, turn {turn}")
    graph, *others = FORMS
    by_category: dict[str, list[int]] = {"": list(range(len(work.requests)))}
    for prompt, request in enumerate(work.requests):
        if request.category:
            by_category.setdefault(request.category, []).append(prompt)
    return {
        category: {
            "prompts": len(prompts),
            **{
                form: mean_with_bounds([median(speeds[p][graph]) / median(speeds[p][form]) for p in prompts])
                for form in others
            },
        }
        for category, prompts in by_category.items()
    }


class FormSwitch:
    """Changes the form of a running engine's graphs. Each form has its own planner and learns for itself."""

    def __init__(self, runner: Any):
        if runner is None:
            raise ValueError("--forms needs the engine's worker in the engine's process (one rank)")
        if not hasattr(runner, "drafter"):
            raise ValueError("--forms needs Model Runner V1, whose graphs grow on the host")
        self.speculation, self.clock = runner.speculation, runner.drafter.clock
        self.config = self.speculation.config
        self.planners: dict[str, Any] = {}
        self.form: str | None = None

    def to(self, form: str) -> None:
        """Switch to a form, one of ``FORMS``."""
        from vllm_gsd.planner.planner import Planner

        if form == self.form:
            return
        mine = self.speculation
        config = self.config.model_copy(update=FORMS[form])
        if form not in self.planners:
            costs, rows = mine.planner.costs, mine.planner.first_rows
            self.planners[form] = Planner(config.top_k, config.max_depth, mine.num_nodes, costs, rows)
        self.form = form
        mine.copies.top_k = config.top_k
        for part in (mine, mine.drafter):
            if part is not None:
                part.config = config
        for part in (mine, mine.drafter, self.clock):
            if part is not None:
                part.planner = self.planners[form]
