"""The paper's analyses: n-grams that recur (figure 3), ablations (figure 5), and the graph against the tree.

Each run drafts with the draft model alone and as deep as it may, and verifies every node, so that the planner has no
influence.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_gsd.config.draft_check import kind_of_model
from vllm_gsd.config.draft_kind import BLOCK_KINDS
from vllm_gsd.tools.bench.methods import FORMS, Setting
from vllm_gsd.tools.bench.report import tokens_per_step
from vllm_gsd.tools.bench.turns import Work, running, tokens_per_second

# The values to try of each key, with the other keys as given. The paper calls them k, depth, t + 1, theta_prob and
# theta_sib.
ABLATIONS: dict[str, list[Any]] = {
    "top_k": [1, 2, 3, 4, 6, 8],
    "max_depth": [1, 2, 3, 4, 6, 8],
    "merge_ngram": [0, 1, 2, 3, 4],
    "theta_prob": [0.0, 0.02, 0.05, 0.1, 0.2, 0.4],
    "theta_sib": [0.0, 0.05, 0.1, 0.3, 0.5],
}
BASE = {"top_k": 4, "merge_ngram": 2, "theta_prob": 0.05, "theta_sib": 0.1}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
# The numbers of verified nodes at which the forms of the graph are compared.
NODES = [8, 16, 32]
# Drafts whose rows per step differ by less than this factor draft alike; how many steps draft differs by chance.
SAME_COST = 1.05


def ablations_of(draft: str) -> dict[str, list[Any]]:
    """``ABLATIONS``; of a draft of whole blocks, equal tokens of a depth are merged or not."""
    if kind_of_model(draft) not in BLOCK_KINDS:
        return ABLATIONS
    return {**ABLATIONS, "merge_ngram": [n for n in ABLATIONS["merge_ngram"] if n <= 1]}


def num_runs(draft: str) -> int:
    """The number of ticks of ``analyse``."""
    return sum(len(values) for values in ablations_of(draft).values()) + len(FORMS) * len(NODES)


def analyse(draft: str, gsd: dict[str, Any], compiled: bool, work: Work, tick: Callable[[str], None]) -> dict[str, Any]:
    """Run every ablation once, one request at a time.

    Returns:
        ``ablations[key]``: a row per value, see ``_row``; ``recurring_ngrams[n]``: the share of all nodes whose last n
        tokens had occurred before, in their graph or shortly before it (empty for drafts of whole blocks);
        ``forms[form]``: a row per number of ``nodes``; and ``graph_over_tree``, see ``_graph_over_tree``.
    """
    work = replace(work, batch_sizes=[1])
    base = {} if gsd.get("preset") else BASE  # BASE would hide the preset's values
    known: dict[tuple[Any, ...], dict[str, float]] = {}

    def row(name: str, **keys: Any) -> dict[str, float]:
        config = {"method": "gsd", "model": draft, **base, **gsd, "sources": ["draft"], **keys}
        config["budget"] = config.get("num_speculative_tokens", 16)
        same = tuple(sorted((key, str(given)) for key, given in config.items()))
        if same not in known:
            with running(Setting("gsd", name, config, compiled), work) as engine:
                known[same] = _row(engine.run(work.job(1)))
        tick(name)
        return known[same]

    ablations = {
        key: [{"value": value, **row(f"{key}={value}", **{key: value})} for value in values]
        for key, values in ablations_of(draft).items()
    }
    forms = {
        form: [{"nodes": n, **row(f"{form} nodes={n}", num_speculative_tokens=n, **keys)} for n in NODES]
        for form, keys in FORMS.items()
    }
    merges = [] if kind_of_model(draft) in BLOCK_KINDS else ablations["merge_ngram"]
    recurring = {str(row["value"]): row["merged_share"] for row in merges if row["value"]}
    return {
        "ablations": ablations,
        "recurring_ngrams": recurring,
        "forms": forms,
        "graph_over_tree": _graph_over_tree(forms["gsd"], forms["gsd-tree"]),
    }


def _row(result: dict[str, Any]) -> dict[str, float]:
    """What one run shows.

    Returns:
        ``tokens_per_step`` and ``tokens_per_second``; ``tokens_per_draft_forward``; ``verified_per_step``, the
        nodes that the target verified; ``draft_rows_per_step``, the rows of the draft's forwards per target step;
        ``drafted_per_accepted``, the same per accepted token;
        ``merged_share``, the share of merged edges among all edges; and ``accepted_merged_share``, that of accepted
        nodes that were reached through a merged edge.
    """
    counters = result["counters"]
    generated, steps = (sum(request[name] for request in result["requests"]) for name in ("tokens", "steps"))
    accepted, rows = counters[ACCEPTED], counters["vllm:gsd_draft_rows"]
    return {
        "tokens_per_step": tokens_per_step(result),
        "tokens_per_second": tokens_per_second(result),
        "tokens_per_draft_forward": generated / max(1.0, counters["vllm:gsd_draft_forwards"]),
        "verified_per_step": counters["vllm:gsd_nodes_verified"] / steps,
        "draft_rows_per_step": rows / steps,
        "drafted_per_accepted": rows / max(1.0, accepted),
        "merged_share": counters["vllm:gsd_nodes_merged"] / max(1.0, counters["vllm:gsd_nodes_added"]),
        "accepted_merged_share": counters["vllm:gsd_nodes_accepted_merged"] / max(1.0, accepted),
    }


def _graph_over_tree(graph: list[dict[str, float]], tree: list[dict[str, float]]) -> list[dict[str, float]]:
    """How many more tokens a step the graph gives than the tree without merging.

    Returns:
        by number of ``nodes`` of the graph, the ratio of tokens per step ``at_equal_nodes``, where the tree has as many
        verified nodes per step, and ``at_equal_cost``, where its drafting takes as many rows per step. The tree is
        interpolated between those that ran, and nowhere beyond them. A block takes the same rows whatever becomes of
        it, so its cost is equal where its nodes are.
    """
    rows = [row["draft_rows_per_step"] for row in tree]
    cost = "draft_rows_per_step" if max(rows) > SAME_COST * min(rows) else "verified_per_step"

    def ratio(row: dict[str, float], name: str) -> float:
        numbers, tokens = zip(*sorted((t[name], t["tokens_per_step"]) for t in tree), strict=True)
        return row["tokens_per_step"] / float(np.interp(row[name], numbers, tokens))

    return [
        {"nodes": row["nodes"], "at_equal_nodes": ratio(row, "verified_per_step"), "at_equal_cost": ratio(row, cost)}
        for row in graph
    ]
