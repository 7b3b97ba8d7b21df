"""Reads a server's metrics and the memory of its processes."""

import contextlib
from pathlib import Path
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


def memory_mib(pid: int) -> dict[str, float]:
    """Anonymous and shared memory of a process and all its children, by name and id. Shared pages count once.

    Pages of files are not counted, because they are shared with all programs that map the same libraries.
    """
    took = {}
    for process in _family(pid):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):  # it has just ended
            took[f"{process.name()} {process.pid}"] = round(_anonymous(process) / 2**20, 1)
    return took


def _family(pid: int) -> list[Any]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _anonymous(process: Any) -> int:
    if not psutil.LINUX:
        return process.memory_info().rss
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text("utf-8").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
