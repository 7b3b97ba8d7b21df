"""The checks after a soak, one verdict each."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .load_server import Outcome
from .loads import kinds

# Growth of memory in the last quarter that allocators and caches explain: a constant and a share of the total.
SLACK_MIB = 8.0
SLACK_SHARE = 0.01
# Shorter soaks consist only of warm-up.
LEAST_SECONDS = 180


@dataclass(frozen=True)
class Verdict:
    """Whether a check held, or None if the soak was too short to tell."""

    check: str
    held: bool | None
    detail: str


def judge(
    outcomes: Sequence[Outcome],
    series: list[dict[str, float]],
    metrics: dict[str, float],
    busy: dict[str, float | None],
    lost: str | None,
    lora: bool,
) -> list[Verdict]:
    """All verdicts.

    Args:
        series: readings in order of time, with the memory in "mib".
        metrics: the last metrics.
        busy: those of them that should be 0 and are not.
        lost: how the server died, or None.
        lora: whether it had adapters.
    """
    ended = {name: sum(one.ended == name for one in outcomes) for name in ("server error", "refused", "hung")}
    wrong = [one for one in outcomes if one.ended == "answered" and one.faults]
    answered = {one.load.kind for one in outcomes if one.ended == "answered"}
    unanswered = [kind for kind in kinds(lora) if kind not in answered]
    preempted = metrics.get("vllm:num_preemptions_total", 0)
    accepted = metrics.get("vllm:spec_decode_num_accepted_tokens_total", 0)
    kv, tables = busy.get("vllm:kv_cache_usage_perc", 0), busy.get("vllm:gsd_tracked_requests", 0)
    others = {name: value for name, value in busy.items() if name.startswith("vllm:num_requests")}
    return [
        Verdict("no server errors", not ended["server error"], f"{ended['server error']} of {len(outcomes)}"),
        Verdict("the server ran to the end", lost is None, lost or "yes"),
        Verdict("no refusals", not ended["refused"], f"{ended['refused']} of {len(outcomes)}"),
        Verdict("no hangs", not ended["hung"], f"{ended['hung']} of {len(outcomes)}"),
        Verdict("answers keep to their requests", not wrong, f"{len(wrong)} do not"),
        Verdict("no request left", not others, str(others or "none")),
        Verdict("all KV blocks free", kv == 0, f"share in use: {kv}"),
        Verdict("tables by request empty", tables == 0, f"entries: {tables}"),
        _memory(series),
        Verdict("some requests were preempted", preempted > 0, f"{preempted:.0f} preemptions"),
        Verdict("drafts were accepted", accepted > 0, f"{accepted:.0f} tokens"),
        Verdict("every kind was answered", unanswered == [], ", ".join(unanswered) or "all of them"),
    ]


def _memory(series: list[dict[str, float]]) -> Verdict:
    name = "memory does not grow in the second half"
    took = series[-1]["seconds"] - series[0]["seconds"] if series else 0
    if took < LEAST_SECONDS:
        return Verdict(name, None, f"{took:.0f} seconds are too few to tell")
    quarter = len(series) // 4
    third, last = (
        statistics.median(one["mib"] for one in part) for part in (series[-2 * quarter : -quarter], series[-quarter:])
    )
    slack = SLACK_MIB + SLACK_SHARE * third
    detail = f"{third:.0f} MiB in the third quarter, {last:.0f} MiB in the last; {slack:.0f} MiB more are allowed"
    return Verdict(name, last - third <= slack, detail)
