"""The acceptance of real requests, from the trace that an engine wrote of their steps."""

from collections import Counter
from pathlib import Path

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
    for step in (step for trace in read_traces(path).values() for step in trace.steps):
        verified = step["verified"]
        graphs += bool(verified["parent"])
        rows += len(verified["parent"])
        for depth, taken in zip(depths(verified), verified["accepted"], strict=True):
            accepted[depth] += bool(taken)
    if not +accepted:
        raise ToolError(f"The trace {path} has no accepted node, so the gain of a graph cannot be estimated.")
    return [accepted[depth] / graphs for depth in range(1, max(+accepted) + 1)], rows / graphs
