"""The acceptance of real requests, from the trace that an engine wrote of their steps."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.inspect.trace import depths, read_traces

# Share of the verified graphs with an accepted node at depth 1, 2, ..., and mean number of their nodes.
Observed = tuple[list[float], float]


def observed(path: Path) -> Observed:
    """The acceptance in a trace.

    Raises:
        ToolError: the file is no trace, or has no verified graph.
    """
    accepted: Counter[int] = Counter()
    graphs = rows = 0
    for step in _steps(path):
        verified = step["verified"]
        graphs += bool(verified["parent"])
        rows += len(verified["parent"])
        for depth, taken in zip(depths(verified), verified["accepted"], strict=True):
            accepted[depth] += bool(taken)
    if not +accepted:
        raise ToolError(f"The trace {path} has no accepted node, so the gain of a graph cannot be estimated.")
    return [accepted[depth] / graphs for depth in range(1, max(+accepted) + 1)], rows / graphs


def children(path: Path) -> list[float]:
    """The draft's average probabilities of the best, second best... child of the nodes in a trace's graphs.

    Raises:
        ToolError: the file is no trace.
    """
    totals: dict[int, float] = defaultdict(float)
    counts: Counter[int] = Counter()
    for step in _steps(path):
        below: dict[int, list[float]] = defaultdict(list)
        for parent, prob in zip(step["graph"]["parent"], step["graph"]["prob"], strict=True):
            below[parent].append(prob)
        for parent, probs in below.items():
            for place, prob in enumerate(sorted(probs, reverse=True) if parent >= 0 else ()):
                totals[place] += prob
                counts[place] += 1
    # A node has fewer children than asked for where the draft gave them too little; these count as 0.
    return [totals[place] / max(1, counts[0]) for place in range(len(counts))]


def _steps(path: Path) -> list[dict[str, Any]]:
    return [step for trace in read_traces(path).values() for step in trace.steps]
