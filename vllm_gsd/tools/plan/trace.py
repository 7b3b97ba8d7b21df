"""The acceptance of real requests, from the trace that an engine wrote of their steps."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from vllm_gsd.tools.plan.machine import PlanError

# Share of the verified graphs with an accepted node at depth 1, 2, ..., and mean number of their nodes.
Observed = tuple[list[float], float]


def observed(path: Path) -> Observed:
    """The acceptance in a trace.

    Raises:
        PlanError: the file is no trace, or has no verified graph.
    """
    accepted: Counter[int] = Counter()
    graphs = rows = 0
    try:
        for line in path.read_bytes().split(b"\n")[:-1]:  # an engine may be writing the last line
            record = json.loads(line)
            verified = record["verified"] if record["event"] == "step" else {"parent": [], "accepted": []}
            graphs += bool(verified["parent"])
            rows += len(verified["parent"])
            depths: list[int] = []
            for parent, taken in zip(verified["parent"], verified["accepted"], strict=True):
                depths.append(0 if parent < 0 else depths[parent] + 1)
                accepted[depths[-1]] += bool(taken)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise PlanError(f"{path} cannot be read as a trace ({error!r}).") from error
    if not +accepted:
        raise PlanError(f"The trace {path} has no accepted node, so nothing tells what a graph would gain.")
    return [accepted[depth] / graphs for depth in range(max(+accepted) + 1)], rows / graphs
