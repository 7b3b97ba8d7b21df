"""A soak from start to finish."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx

from .load_server import Soak
from .report import make_report
from .server import Setting, soaked_server
from .verdicts import judge
from .watch import read_metrics

# Maximum tokens of an answer, maximum words of a prompt, and least seconds after which a request counts as hung.
LONGEST = {"v1": 96, "v2": 10}
WORDS = {"v1": 64, "v2": 24}  # about five tokens each
PATIENCE = {"v1": 180.0, "v2": 1200.0}


def soak(setting: Setting, seconds: float, seed: int, folder: Path, progress: Any = lambda soak, now: None) -> dict:
    """Start a server, load it, and return the report.

    Args:
        folder: the folder for the models and the server's log.
        progress: called regularly with the ``Soak`` and the seconds since its start.
    """
    start = time.monotonic()
    with soaked_server(setting, folder) as (server, adapters, ends):
        started = time.monotonic() - start
        load = Soak(
            url=server.url,
            pid=server.process.pid,
            seconds=seconds,
            concurrency=setting.concurrency,
            patience=PATIENCE[setting.runner],
            longest=LONGEST[setting.runner],
            words=WORDS[setting.runner],
            seed=seed,
            adapters=adapters,
            ends=ends,
        )
        try:
            busy = asyncio.run(load.run(progress))
            metrics = asyncio.run(_metrics(server.url))
            lost = None if server.process.poll() is None else "the server ended"
        except httpx.HTTPError as error:
            busy, metrics, lost = {}, {}, f"no metrics: {type(error).__name__} {error}"
    settings = {
        **{name: str(value) if isinstance(value, Path) else value for name, value in vars(setting).items()},
        "kv_blocks": setting.kv_blocks,
        "seconds": seconds,
        "seed": seed,
        "started_after_s": round(started, 1),
    }
    verdicts = judge(load.outcomes, load.series, metrics, busy, lost, bool(adapters))
    return make_report(settings, load.outcomes, load.series, metrics, verdicts)


async def _metrics(url: str) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        return await read_metrics(http)
