"""The checks after a soak, one verdict each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .load_server import Outcome
from .loads import kinds

# The smallest leak to detect, in bytes per request. A leaked request keeps at least its prompt's tokens, about 200 here
# with 8 bytes each in a list, and the object that holds them.
LEAK_BYTES = 2048
# Readings vary by this much without any leak, because of large temporary buffers.
NOISE_MIB = 4.0
# Shorter soaks consist only of warm-up.
LEAST_SECONDS = 180


@dataclass(frozen=True)
class Verdict:
    """Whether a check held. ``held`` is None if the soak was too short to tell."""

    check: str
    held: bool | None
    detail: str


def judge(
    outcomes: Sequence[Outcome],
    series: list[dict[str, Any]],
    metrics: dict[str, float],
    busy: dict[str, float | None],
    lost: str | None,
    lora: bool,
) -> list[Verdict]:
    """All verdicts.

    Args:
        series: readings in order of time, with the memory in "mib" and the finished "requests".
        metrics: the last metrics.
        busy: metrics that should be 0 but are not.
        lost: how the server died, or None.
        lora: whether the server had adapters.
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


def _memory(series: list[dict[str, Any]]) -> Verdict:
    """Distinguish a leak from filling caches and growing buffers.

    A leak grows at the same rate in both quarters of the second half. A cache grows less in the last quarter than in
    the one before, and a buffer grows in only one of them. So the smaller of the two rates counts.
    """
    name = "memory does not grow in the second half"
    took = series[-1]["seconds"] - series[0]["seconds"] if series else 0
    if took < LEAST_SECONDS:
        return Verdict(name, None, f"{took:.0f} seconds are too short to tell")
    quarter = len(series) // 4
    half = series[-2 * quarter :]
    rates = [_bytes_per_request(part) for part in (half[:quarter], half[quarter:])]
    requests = half[-1]["requests"] - half[0]["requests"]
    allowed = max(LEAK_BYTES, NOISE_MIB * 2**20 / max(1, requests))
    detail = (
        f"{half[0]['mib']:.0f} MiB, and {half[-1]['mib']:.0f} MiB after {requests} more requests: "
        f"{rates[0]:.0f} bytes per request in the third quarter, {rates[1]:.0f} in the last; "
        f"a leak has more than {allowed:.0f} in both"
    )
    return Verdict(name, min(rates) <= allowed, detail)


def _bytes_per_request(part: list[dict[str, Any]]) -> float:
    """The growth of memory: the median slope between all pairs of readings (Theil-Sen estimator)."""
    requests, mib = (np.array([one[name] for one in part], float) for name in ("requests", "mib"))
    more = requests[None, :] - requests[:, None]
    slopes = (mib[None, :] - mib[:, None])[more > 0] / more[more > 0]
    return float(np.median(slopes)) * 2**20 if slopes.size else 0.0
