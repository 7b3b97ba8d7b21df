"""Engines that take turns. Each method's best setting is chosen first, then all repeat the same work interleaved.

This treats all methods alike on a machine whose speed drifts. The engines stay alive between their turns, each in its
own process. With ``apart`` they are started anew for each turn, in case memory cannot hold them all.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_gsd.tools.bench.methods import Setting
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.prompt_file import Request

# Requests and tokens that warm an engine before it is timed.
WARM_REQUESTS, WARM_TOKENS = 3, 24


@dataclass(frozen=True)
class Work:
    """What every engine does."""

    requests: list[Request]  # the prompts, which repeat in a batch that is larger
    batch_sizes: list[int]
    repeats: int
    max_tokens: int
    engine_args: dict[str, Any]  # arguments of vLLM's ``LLM``, without the speculative config and the mode
    logs: Path
    apart: bool = False
    choose_with: int = 4  # requests used to choose the best settings

    @property
    def repeats_answers(self) -> bool:
        """Whether a method that copies from other requests' answers would find the answers on which it is timed.

        It does if a run repeats a prompt. It also does from the second turn on if the answers of a turn cannot be
        dropped, because the workers run in other processes.
        """
        return (
            any(len(self.job(batch)["chats"]) > len(self.requests) for batch in self.batch_sizes)
            or self.engine_args.get("tensor_parallel_size", 1) != 1
        )

    def job(self, batch: int, limit: int | None = None) -> dict[str, Any]:
        """One run at a batch size: every request once, or as many as fill the batch twice (with a limit, once).

        A batch that nothing refills is as slow as its longest answer, however fast the others are.
        """
        chats = [request.chat for request in self.requests][:limit]
        count = max(len(chats), batch if limit or batch == 1 else 2 * batch)
        chosen = [chats[i % len(chats)] for i in range(count)]
        return {"chats": chosen, "concurrency": batch, "max_tokens": self.max_tokens}


class Engine:
    """A process with one engine. ``run`` sends it a job and waits for the result."""

    def __init__(self, setting: Setting, work: Work):
        self.setting = setting
        work.logs.mkdir(parents=True, exist_ok=True)
        self.log = work.logs / f"{setting.name.replace(' ', '-')}.log"
        arguments = {
            **work.engine_args,
            "max_num_seqs": max(work.batch_sizes),
            "speculative_config": setting.speculative,
            "enforce_eager": not setting.compiled,
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm_gsd.tools.bench.engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # The command may run in a folder with other modules of these names, such as a clone of vLLM.
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )
        self._ask(arguments)
        # The first engine refuses prompts that are too long, even if they come only after hours.
        later = {"later": [request.chat for request in work.requests]}
        for batch in work.batch_sizes:
            warm = work.job(batch, WARM_REQUESTS)
            self._ask({**warm, "max_tokens": min(WARM_TOKENS, work.max_tokens), **later})

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """The result of a job, as ``engine.run`` describes it."""
        return self._ask({"opted_out": self.setting.opted_out, **job})

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died between two jobs
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.process.wait()
            lines = self.log.read_text(errors="replace").splitlines()
            last = next((text for text in reversed(lines) if "Error" in text), "")
            raise ToolError(f"The engine of {self.setting.name!r} died: {last.strip() or 'see its log'} ({self.log}).")
        answer: dict[str, Any] = json.loads(line)
        return answer


def running(setting: Setting, work: Work) -> closing[Engine]:
    """An engine that runs until the context ends."""
    return closing(Engine(setting, work))


class Engines(ExitStack):
    """Engines by setting, each started when first needed. A context manager that stops those that are alive."""

    def __init__(self, work: Work):
        super().__init__()
        self.work = work
        self.alive: dict[str, Engine] = {}

    @contextmanager
    def turn(self, setting: Setting) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
        """What runs jobs during a turn of a setting: an engine that stays alive, or with ``apart`` its own."""
        if self.work.apart:
            with running(setting, self.work) as engine:
                yield engine.run
            return
        name = setting.engine.name
        if name not in self.alive:
            self.alive[name] = self.enter_context(running(setting.engine, self.work))
        engine = self.alive[name]
        yield lambda job: engine.run({**job, "opted_out": setting.opted_out})


def choose(candidates: dict[str, list[Setting]], work: Work, tick: Callable[[str], None]) -> dict[str, dict[int, Any]]:
    """Choose each method's fastest setting at each batch size by a short run of all its settings.

    Returns:
        ``[method][batch]``: the chosen ``setting``, and ``tried``, tokens/s by setting name (empty for a single one).
    """
    chosen: dict[str, dict[int, Any]] = {}
    for method, settings in candidates.items():
        speeds: dict[int, dict[str, float]] = {batch: {} for batch in work.batch_sizes}
        for setting in settings if len(settings) > 1 else []:
            with running(setting, work) as engine:
                for batch in work.batch_sizes:
                    speeds[batch][setting.name] = tokens_per_second(engine.run(work.job(batch, work.choose_with)))
            tick(f"choosing: {setting.name}")
        by_name = {setting.name: setting for setting in settings}
        chosen[method] = {
            batch: {
                "setting": by_name[max(tried, key=lambda name: tried[name])] if tried else settings[0],
                "tried": tried,
            }
            for batch, tried in speeds.items()
        }
    return chosen


class Runs(NamedTuple):
    """Results: ``timed[method][batch]`` has one per repeat, ``parts[method][batch]`` one with the clock on."""

    timed: dict[str, dict[int, list[dict[str, Any]]]]
    parts: dict[str, dict[int, dict[str, Any]]]


def take_turns(chosen: dict[str, dict[int, Any]], engines: Engines, tick: Callable[[str], None]) -> Runs:
    """Run every method at every batch size ``repeats`` times, and once more with the clock over the parts."""
    work = engines.work
    runs = Runs(
        {method: {batch: [] for batch in work.batch_sizes} for method in chosen}, {method: {} for method in chosen}
    )
    for turn in range(work.repeats + 1):
        last = turn == work.repeats
        for batch in work.batch_sizes:
            for method in rotated(list(chosen), turn):
                with engines.turn(chosen[method][batch]["setting"]) as run:
                    result = run({**work.job(batch), "with_parts": last})
                if last:
                    runs.parts[method][batch] = result
                else:
                    runs.timed[method][batch].append(result)
                tick(f"turn {turn + 1}: {method}, batch {batch}")
    return runs


def rotated(items: list[Any], turn: int) -> list[Any]:
    """The items, beginning at another one each turn."""
    return items[turn % len(items) :] + items[: turn % len(items)]


def tokens_per_second(result: dict[str, Any]) -> float:
    """Generated tokens per second of a run."""
    return sum(request["tokens"] for request in result["requests"]) / result["seconds"]
