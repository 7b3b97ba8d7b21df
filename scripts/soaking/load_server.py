"""The load: concurrent clients until the time is up, and a task that reads the server's metrics and memory."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from .answers import Answer, faults
from .client import ask, vanish
from .loads import Load, draw_load
from .server import NAME
from .watch import memory_mib, not_idle, read_metrics

# The server closes idle connections, which would lose a request that is being sent.
CLOSING = {"Connection": "close"}
# The soak stops after this many server errors.
MOST_SERVER_ERRORS = 100
# A request counts as hung if it takes this many times as long as recent ones.
HANGS = 30


@dataclass
class Outcome:
    """The outcome of one request."""

    load: Load
    ended: str  # "answered", "aborted", "vanished", "refused", "server error" or "hung"
    seconds: float
    answer: Answer | None = None
    faults: list[str] = field(default_factory=list)


@dataclass
class Soak:
    """A running soak.

    Args:
        seconds: how long to send new requests.
        patience: least seconds after which an unanswered request counts as hung.
        longest: maximum tokens of an answer.
        words: maximum words of a prompt.
        adapters, ends: see ``server.soaked_server``.
    """

    url: str
    pid: int
    seconds: float
    concurrency: int
    patience: float
    longest: int
    words: int
    seed: int
    adapters: list[str]
    ends: set[int]
    outcomes: list[Outcome] = field(default_factory=list)
    series: list[dict[str, Any]] = field(default_factory=list)
    numbers: int = 0  # requests sent so far
    server_errors: int = 0
    usual: float = 1.0  # recent mean of the seconds of an answer

    async def run(self, progress: Any = lambda soak, seconds: None) -> dict[str, float | None]:
        """Load the server, wait until it is idle, and return the metrics of ``watch.IDLE`` that are not 0.

        Raises:
            httpx.HTTPError: the metrics cannot be read.
        """
        start = time.monotonic()
        async with (
            openai.AsyncOpenAI(
                base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=None, default_headers=CLOSING
            ) as client,
            httpx.AsyncClient(base_url=self.url, timeout=self.patience, headers=CLOSING) as http,
        ):
            watching = asyncio.create_task(self._watch(http, start, progress))
            await asyncio.gather(*[self._keep_asking(client, start + self.seconds) for _ in range(self.concurrency)])
            if watching.done():
                watching.result()  # raises the error that ended it
            watching.cancel()
            return await self._rest(http)

    async def _keep_asking(self, client: openai.AsyncOpenAI, until: float) -> None:
        while time.monotonic() < until and self.server_errors < MOST_SERVER_ERRORS:
            self.numbers += 1
            load = draw_load(self.seed, self.numbers, NAME, self.adapters, self.longest, self.words)
            start = time.perf_counter()
            outcome = await self._ask(client, load)
            outcome.seconds = time.perf_counter() - start
            if outcome.ended == "answered":
                self.usual += 0.05 * (outcome.seconds - self.usual)
            self.server_errors += outcome.ended == "server error"
            self.outcomes.append(outcome)

    async def _ask(self, client: openai.AsyncOpenAI, load: Load) -> Outcome:
        gives_up = load.patience * self.usual
        try:
            if load.fate == "vanished":
                await vanish(self.url, load, gives_up)
                return Outcome(load, "vanished", 0)
            wait = gives_up if load.fate == "aborted" else self._patience()
            answer = await asyncio.wait_for(ask(client, load), wait)
        except TimeoutError:
            hung = load.fate != "aborted"
            return Outcome(load, "hung" if hung else "aborted", 0, faults=["no answer arrived in time"] if hung else [])
        except openai.APIStatusError as error:
            ended = "server error" if error.status_code >= 500 else "refused"
            return Outcome(load, ended, 0, faults=[f"status {error.status_code}: {error.message}"])
        except (openai.APIError, OSError) as error:  # an error inside a stream, or a broken connection
            return Outcome(load, "server error", 0, faults=[f"{type(error).__name__}: {error}"])
        return Outcome(load, "answered", 0, answer, faults(load, answer, self.ends))

    def _patience(self) -> float:
        """Seconds to wait for an answer. If all answers are slow, a slow one is not a hang."""
        return max(self.patience, HANGS * self.usual)

    async def _watch(self, http: httpx.AsyncClient, start: float, progress: Any) -> None:
        every = min(10.0, max(0.5, self.seconds / 60))
        while True:
            metrics = await read_metrics(http)
            now = time.monotonic() - start
            names = {"running": "vllm:num_requests_running", "kv_usage": "vllm:kv_cache_usage_perc"}
            names["tracked"] = "vllm:gsd_tracked_requests"
            seen = {name: metrics.get(metric, 0.0) for name, metric in names.items()}
            processes = memory_mib(self.pid)
            reading = {"seconds": round(now, 1), "requests": len(self.outcomes), **seen}
            self.series.append({**reading, "mib": round(sum(processes.values()), 1), "processes": processes})
            progress(self, now)
            await asyncio.sleep(every)

    async def _rest(self, http: httpx.AsyncClient) -> dict[str, float | None]:
        until = time.monotonic() + self.patience
        while (busy := not_idle(await read_metrics(http))) and time.monotonic() < until:
            await asyncio.sleep(0.5)
        return busy
