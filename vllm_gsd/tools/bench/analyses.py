"""The paper's analyses of the graph: the share of drafted tokens that re-occur (figure 3), and ablations (figure 5).

Each run drafts every level with the draft model alone and verifies every node, so that the planner has no influence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm_gsd.tools.bench.methods import Setting
from vllm_gsd.tools.bench.report import ACCEPTED, tokens_per_step
from vllm_gsd.tools.bench.turns import Work, running, tokens_per_second

# The values to try of each key, with the other keys as given. The paper calls them k, t + 1, theta_prob and theta_sib.
ABLATIONS: dict[str, list[Any]] = {
    "top_k": [1, 2, 3, 4, 6, 8],
    "merge_ngram": [0, 1, 2, 3, 4],
    "theta_prob": [0.0, 0.02, 0.05, 0.1, 0.2, 0.4],
    "theta_sib": [0.0, 0.05, 0.1, 0.3, 0.5],
}
BASE = {"top_k": 4, "merge_ngram": 2, "theta_prob": 0.05, "theta_sib": 0.1}


def num_runs() -> int:
    """The number of ticks of ``analyse``."""
    return sum(len(values) for values in ABLATIONS.values())


def analyse(draft: str, gsd: dict[str, Any], compiled: bool, work: Work, tick: Callable[[str], None]) -> dict[str, Any]:
    """Run every ablation once, one request at a time.

    Returns:
        ``ablations[key]``: a row per value with ``tokens_per_step``, ``tokens_per_second``, ``drafted_per_accepted``
        (nodes that the draft ran per accepted token) and ``merged_share``; ``recurring_ngrams[n]``: the share of all
        nodes whose last n tokens had occurred before, in their graph or shortly before it.
    """
    work = replace(work, batch_sizes=[1])
    known: dict[tuple[Any, ...], dict[str, float]] = {}
    ablations: dict[str, list[dict[str, Any]]] = {}
    for key, values in ABLATIONS.items():
        ablations[key] = []
        for value in values:
            config = {"method": "gsd", "model": draft, **BASE, **gsd, key: value, "sources": ["draft"]}
            config["budget"] = config.get("num_speculative_tokens", 16)
            same = tuple(sorted((name, str(given)) for name, given in config.items()))
            if same not in known:
                with running(Setting("gsd", f"{key}={value}", config, compiled), work) as engine:
                    known[same] = _row(engine.run(work.job(1)))
            ablations[key].append({"value": value, **known[same]})
            tick(f"{key} {value}")
    recurring = {str(row["value"]): row["merged_share"] for row in ablations["merge_ngram"] if row["value"]}
    return {"ablations": ablations, "recurring_ngrams": recurring}


def _row(result: dict[str, Any]) -> dict[str, float]:
    counters = result["counters"]
    return {
        "tokens_per_step": tokens_per_step(result),
        "tokens_per_second": tokens_per_second(result),
        "drafted_per_accepted": counters["vllm:gsd_draft_nodes"] / max(1.0, counters[ACCEPTED]),
        "merged_share": counters["vllm:gsd_nodes_merged"] / max(1.0, counters["vllm:gsd_nodes_added"]),
    }
