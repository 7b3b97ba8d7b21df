"""The inspector's page."""

from pathlib import Path
from typing import Any

from vllm_gsd.tools.inspect.summary import KINDS, summarise
from vllm_gsd.tools.inspect.trace import Trace
from vllm_gsd.tools.page import render

# What the page says about the plan of a step, by the record's ``plan``.
PLANS = {
    "fixed": "a fixed number of levels and nodes",
    "copies": "copies only, no draft model",
    "drafts": "drafting pays",
    "rests": "a plain step now and then, to learn what it takes",
    "probes": "drafting does not pay; a few requests try it",
    "pauses": "drafting does not pay",
}


def inspect_page(trace: Trace) -> str:
    """The HTML page of one traced request."""
    summary = summarise(trace.steps)
    data: dict[str, Any] = {"steps": trace.steps, "summary": summary, "kinds": KINDS, "plans": PLANS}
    model, draft = trace.request["target"], trace.request["gsd"]["model"]
    return render(
        "inspect",
        data,
        request=trace.request,
        target=Path(model).name,
        draft=draft and Path(draft).name,
        summary=summary,
    )
