"""A bench run by task category: the speed of each method, and the form of its graphs."""

from collections import Counter, defaultdict
from itertools import cycle
from statistics import median
from typing import Any

from vllm_gsd.tools.bench.methods import FORMS
from vllm_gsd.tools.bench.turns import Runs, Work

STEPS, DRAFTS = "vllm:gsd_target_steps", "vllm:spec_decode_num_drafts"
CHAINS = "vllm:gsd_chain_requests"
SOURCES = ("native", "merged", "ngram", "shared", "agreed")
ACCEPTED_FROM = {source: f"vllm:gsd_nodes_accepted_{source}" for source in SOURCES}


def speed_ratios(runs: Runs, work: Work) -> dict[str, dict[str, float]]:
    """The speed ratio to plain of each category at the smallest batch size, the median over the turns."""
    batch, names = min(work.batch_sizes), _categories(work)
    if "plain" not in runs.timed or not any(names):
        return {}
    speeds: dict[str, list[dict[str, float]]] = {}
    for method, timed in runs.timed.items():
        speeds[method] = []
        for result in timed[batch]:
            sums = _sums(names, [{key: row[key] for key in ("tokens", "latency")} for row in result["requests"]])
            speeds[method].append({name: row["tokens"] / row["latency"] for name, row in sums.items()})
    return {
        category: {
            method: median(mine[category] / plain[category] for mine, plain in zip(turns, speeds["plain"], strict=True))
            for method, turns in speeds.items()
        }
        for category in dict.fromkeys(names)
    }


def forms(runs: Runs, work: Work) -> dict[str, dict[str, dict[str, float]]]:
    """What the forms of the graph verified, by category.

    Returns:
        by category and method, of the turn with the clock: ``without`` drafts, ``chains`` and ``branched``, shares of
        the requests' steps; ``accepted_native``, ``accepted_merged``, ..., shares of the accepted nodes by source.
        Empty if requests did not come one at a time.
    """
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for method, by_batch in runs.parts.items():
        requests = by_batch.get(1, {}).get("requests", [])
        if method not in FORMS or not any(row.get("counters", {}).get(STEPS) for row in requests):
            continue
        for category, counters in _sums(_categories(work), [row["counters"] for row in requests]).items():
            found[category][method] = _form(counters)
    return dict(found)


def _form(counters: Counter) -> dict[str, float]:
    steps, drafts, chains = (counters[name] for name in (STEPS, DRAFTS, CHAINS))
    accepted = {source: counters[name] for source, name in ACCEPTED_FROM.items()}
    total = max(1.0, sum(accepted.values()))
    shares = {"without": steps - drafts, "chains": chains, "branched": drafts - chains}
    return {name: count / max(1.0, steps) for name, count in shares.items()} | {
        f"accepted_{source}": count / total for source, count in accepted.items()
    }


def _categories(work: Work) -> list[str]:
    return [request.category for request in work.requests]


def _sums(names: list[str], requests: list[dict[str, Any]]) -> dict[str, Counter]:
    """For each category, the sums of the numbers of its requests."""
    sums: dict[str, Counter] = defaultdict(Counter)
    for name, numbers in zip(cycle(names), requests, strict=False):
        sums[name].update(numbers)
    return sums
