"""The report of a soak, as JSON and as tables."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .load_server import Outcome
from .verdicts import Verdict

MOST_FAILURES = 50


def make_report(
    settings: dict[str, Any],
    outcomes: Sequence[Outcome],
    series: list[dict[str, Any]],
    metrics: dict[str, float],
    verdicts: list[Verdict],
) -> dict[str, Any]:
    """The report, ready for JSON."""
    failed = [one for one in outcomes if one.faults]
    kinds = sorted({one.load.kind for one in outcomes})
    by_kind = {kind: _summary([one for one in outcomes if one.load.kind == kind]) for kind in kinds}
    return {
        "passed": all(verdict.held is not False for verdict in verdicts),
        "checks": [vars(verdict) for verdict in verdicts],
        "settings": settings,
        "requests": {"all": _summary(outcomes), **by_kind},
        "preemptions": metrics.get("vllm:num_preemptions_total", 0),
        "prefix_cache_hits": metrics.get("vllm:prefix_cache_hits_total", 0),
        "acceptance": _acceptance(metrics),
        "series": series,
        "failures": [
            {"request": one.load.body, "kind": one.load.kind, "ended": one.ended, "faults": one.faults}
            for one in failed[:MOST_FAILURES]
        ],
        "failures_left_out": max(0, len(failed) - MOST_FAILURES),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print the tables of a report."""
    kinds = Table("requests", "sent", "answered", "aborted", "vanished", "tokens", "p50 s", "p99 s")
    for kind, one in report["requests"].items():
        counts = [one["ended"].get(name, 0) for name in ("answered", "aborted", "vanished")]
        latency = one["latency_s"]
        times = [f"{latency[name]:.2f}" if latency else "" for name in ("p50", "p99")]
        kinds.add_row(kind, str(one["sent"]), *map(str, counts), str(one["tokens"]), *times)
    console.print(kinds)
    checks = Table("check", "held", "detail")
    words = {True: "yes", False: "[red]no[/]", None: "not judged"}
    for check in report["checks"]:
        checks.add_row(check["check"], words[check["held"]], check["detail"])
    console.print(checks)
    for failure in report["failures"][:5]:
        console.print(f"{failure['kind']}: {failure['faults'][0]}", markup=False)


def _summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    answers = [(one.seconds, one.answer) for one in outcomes if one.answer is not None]
    return {
        "sent": len(outcomes),
        "ended": dict(Counter(one.ended for one in outcomes)),
        "streamed": sum(one.load.stream for one in outcomes),
        "prompt_tokens": sum(answer.prompt_tokens for _, answer in answers),
        "tokens": sum(answer.tokens for _, answer in answers),
        "latency_s": _percentiles([seconds for seconds, _ in answers]),
        "first_piece_s": _percentiles([one.first_after for _, one in answers if one.first_after is not None]),
    }


def _percentiles(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    return {f"p{share}": round(float(np.percentile(seconds, share)), 4) for share in (50, 90, 99, 100)}


def _acceptance(metrics: dict[str, float]) -> dict[str, float]:
    walks = metrics.get("vllm:gsd_accepted_length_count", 0)
    return {
        "verified": metrics.get("vllm:gsd_nodes_verified_total", 0),
        "accepted": metrics.get("vllm:gsd_accepted_length_sum", 0),
        "accepted_a_step": metrics.get("vllm:gsd_accepted_length_sum", 0) / walks if walks else 0.0,
        "target_steps": metrics.get("vllm:gsd_target_steps_total", 0),
    }
