"""Reads a server's metrics and the memory of its processes."""

from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

IDLE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gsd_tracked_requests",
)


async def read_metrics(http: httpx.AsyncClient) -> dict[str, float]:
    """All samples of ``/metrics`` by name, summed over labels."""
    answer = await http.get("/metrics")
    answer.raise_for_status()
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def not_idle(metrics: dict[str, float]) -> dict[str, float | None]:
    """The metrics of ``IDLE`` that are missing or not 0."""
    return {name: metrics.get(name) for name in IDLE if metrics.get(name) != 0}


def memory_mib(pid: int) -> float:
    """Memory of a process and all its children. Shared pages count once."""
    total = 0
    for process in _family(pid):
        try:
            total += process.memory_full_info().pss
        except (
            psutil.NoSuchProcess,
            psutil.AccessDenied,
            AttributeError,
        ):  # the process has just ended, or this is not Linux
            total += _resident(process)
    return total / 2**20


def _family(pid: int) -> list[Any]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _resident(process: Any) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0
