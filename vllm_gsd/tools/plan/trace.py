"""The acceptance of real requests, from the trace that an engine wrote of their steps."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
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


def children(path: Path) -> list[float]:
    """The draft's average probabilities of the best, second best... child of the nodes in a trace's graphs.

    Raises:
        PlanError: the file is no trace.
    """
    totals: dict[int, float] = defaultdict(float)
    counts: Counter[int] = Counter()
    try:
        for line in path.read_bytes().split(b"\n")[:-1]:
            record = json.loads(line)
            below: dict[int, list[float]] = {}
            graph = record["graph"] if record["event"] == "step" else {"parent": [], "prob": []}
            for parent, prob in zip(graph["parent"], graph["prob"], strict=True):
                below.setdefault(parent, []).append(prob)
            for parent, probs in below.items():
                for place, prob in enumerate(sorted(probs, reverse=True) if parent >= 0 else ()):
                    totals[place] += prob
                    counts[place] += 1
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{path} cannot be read as a trace ({error!r}).") from error
    # A node has fewer children than asked for where the draft gave them too little; these count as 0.
    return [totals[place] / max(1, counts[0]) for place in range(len(counts))]
