"""The page of a bench report."""

from pathlib import PurePath
from typing import Any

from vllm_gsd.tools.bench.methods import OFF
from vllm_gsd.tools.bench.parts import PARTS
from vllm_gsd.tools.page import render

# The engines that a reader compares first, and what the page calls them.
COLUMNS = {"plain": "plain vLLM", OFF: "our engine without a graph", "gsd": "with the graph"}


def bench_page(report: dict[str, Any]) -> str:
    """The HTML page of a report; see ``report.make_report`` and ``run.bench``."""
    optional = dict.fromkeys(("contexts", "forms_in_turns", "analyses"))
    names = {role: report["settings"].get(role) for role in ("target", "draft")}
    shown = {role: name and PurePath(name).name for role, name in names.items()}
    report = {**report, "settings": {**report["settings"], **shown}}
    data = {**optional, **report, "columns": COLUMNS, "parts": PARTS}
    return render("bench", data, bounded=_bounded, columns=COLUMNS, **{**optional, **report})


def _bounded(ratio: dict[str, float | None]) -> str:
    """A mean, and its bounds if they are known."""
    if ratio["low"] is None:
        return f"{ratio['mean']:.3f}"
    return f"{ratio['mean']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})"
