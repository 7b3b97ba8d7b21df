"""The requests of all rounds, and the target's answers to them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from vllm_gsd.tools.distill import generate, prompts
from vllm_gsd.tools.distill.options import Options

# The average time of a shard relative to the first one: its requests are made up, or quote long passages.
LATER_SHARD = 1.5
# Shares of the answers to requests about earlier answers, and to requests that the target made up.
SECOND_ROUND, OWN = 0.3, 0.5


def make_answers(options: Options, work: Path, minutes: float | None) -> None:
    """Generate the target's answers in ``work/answers`` and its states in ``work/states``.

    Args:
        minutes: the time limit, from which the number of answers is planned; None for no limit.
    """
    for name in ("answers", "states"):
        (work / name).mkdir(exist_ok=True)
    started: list[Any] = []

    def llm() -> Any:
        if not started:
            started.append(
                generate.start_target(
                    options.target,
                    max_model_len=options.longest + options.max_tokens,
                    batch=options.batch,
                    eager=options.eager,
                )
            )
        return started[0]

    def answer(chats: list[prompts.Chat], name: str, seed: int) -> list[str]:
        return generate.answer(llm, chats, work, name, max_tokens=options.max_tokens, seed=seed, batch=options.batch)

    if options.prompts is not None:
        answer(prompts.from_file(Path(options.prompts))[: options.answers], "file", options.seed)
        return
    count = planned_answers(options, work, minutes, llm, lambda chats: answer(chats, "first", options.seed))
    own, second = later_rounds(count)
    asked = prompts.first_round(count - own - second, options.seed)
    about = list(zip(asked, answer(asked, "first", options.seed), strict=True))
    if own:
        asked = generate.own_requests(llm, own, work / "own.json", options.batch)
        # Templates fill up what the target does not make up.
        asked += prompts.first_round(own - len(asked), options.seed + 2)
        about += zip(asked, answer(asked, "own", options.seed + 2_000_000), strict=True)
    if second:
        answer(prompts.second_round(second, options.seed + 1, about), "second", options.seed + 1_000_000)


def later_rounds(count: int) -> tuple[int, int]:
    """The numbers of answers, of ``count``, to the target's own requests and in the second round, in whole shards.

    At least one shard belongs to the first round. It is timed to plan the others.
    """
    shards = count // generate.SHARD
    own = max(0, min(round(OWN * shards), shards - 1))
    second = max(0, min(round(SECOND_ROUND * shards), shards - 1 - own))
    return own * generate.SHARD, second * generate.SHARD


def planned_answers(options: Options, work: Path, minutes: float | None, llm, answer) -> int:
    """The number of answers that the time allows, decided once. ``llm`` and ``answer``: see ``make_answers``."""
    plan = work / "answers.json"
    if minutes is None:
        return options.answers
    if not plan.is_file():
        together = generate.wave(options.batch)
        first = prompts.first_round(min(options.answers, together * generate.SHARD), options.seed)
        # A shard that a killed run left would take no time.
        for number in range(together):
            generate.shard_path(work / "answers", "first", number).unlink(missing_ok=True)
        begun = time.perf_counter()
        llm()
        ready = time.perf_counter()
        answer(first)
        now = time.perf_counter()
        left = 60 * minutes - (now - begun)
        shards = together * (1 + max(0, int(left / (LATER_SHARD * (now - ready)))))
        plan.write_text(json.dumps({"answers": min(options.answers, shards * generate.SHARD)}))
    return int(json.loads(plan.read_text())["answers"])
