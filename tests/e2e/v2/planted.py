"""Made-up cost tables for V2 engines, because interpreted kernels' durations are not realistic.

These functions run in the engine's process.
"""

import numpy as np
from engine_process import model_runner
from prometheus_client import REGISTRY


def cost_rows(llm) -> dict[str, list]:
    """The cost table of an engine."""
    costs = model_runner(llm).speculation.planner.costs
    return {name: getattr(costs, name).tolist() for name in ("rows", "target", "draft")}


def plant_costs(llm, row_ms: float | None, probe_after: int = 1 << 20, last_level_ms: float = 0.0) -> None:
    """Make the planner assume that the target's forward takes 10 ms plus ``row_ms`` for each further row.

    Args:
        row_ms: cost of a row, or None to verify every node again.
        probe_after: number of steps until the next probe.
        last_level_ms: cost of the last draft level; all others cost nothing.
    """
    from vllm_gsd.planner.costs import Costs

    planner = model_runner(llm).speculation.planner
    planner.forget()
    planner.overhead.observe_step = planner.overhead.observe_drafts = lambda *_: None  # ignore measured durations
    planner.next_probe = planner.steps + probe_after
    rows, draft = np.array([1, 2, 256]), np.zeros((len(planner.levels), 3))
    draft[-1] = last_level_ms
    planner.costs = None if row_ms is None else Costs(rows, 10 + row_ms * (rows - 1), draft, attention=0.0)


def watch_levels(llm) -> None:
    """Start to record how many levels the planner chooses for each draft phase; see ``levels_seen``."""
    planner = model_runner(llm).speculation.planner
    choose, planner.levels_seen = type(planner).num_levels.__get__(planner), []
    planner.num_levels = lambda *args: planner.levels_seen.append(choose(*args)) or planner.levels_seen[-1]


def levels_seen(llm) -> list[int]:
    return model_runner(llm).speculation.planner.levels_seen


def draft_seconds(llm) -> float:
    """The counter of seconds that drafting took, which ``LLM.get_metrics`` rounds down."""
    (family,) = (family for family in REGISTRY.collect() if family.name == "vllm:gsd_draft_seconds")
    return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))
