"""The requests of all rounds, and the target's answers to them."""

import random
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from vllm_gsd.tools.distill import generate, prompts
from vllm_gsd.tools.distill.options import Options
from vllm_gsd.tools.distill.stages import kept, logger
from vllm_gsd.tools.prompt_file import Chat, read_requests

# The average time of a later shard relative to the first one. Later requests are made up by the target or quote long
# passages; those of a file are alike.
LATER_SHARD, LATER_SHARD_OF_FILE = 1.5, 1.0
# Shares of the answers to requests about earlier answers, and to requests that the target made up.
SECOND_ROUND, OWN = 0.3, 0.5


def make_answers(options: Options, work: Path, minutes: float | None) -> None:
    """Generate the target's answers in ``work/answers`` and its states in ``work/states``.

    The number of answers is planned from the time limit, if there is one.

    Raises:
        ToolError: no request leaves room for an answer, the target does not start, or the file of requests is damaged.
    """
    most, max_tokens, batch = (options.value(name) for name in ("answers", "max_tokens", "batch"))
    size = generate.shard_size(batch)
    for name in ("answers", "states"):
        (work / name).mkdir(exist_ok=True)

    @cache
    def llm() -> Any:
        # A resumed run must not make up the requests again that it made up before it was killed.
        seed = options.seed + len(list(work.glob("own.*.json")))
        longest = options.longest + max_tokens
        return generate.start_target(options.target, max_model_len=longest, batch=batch, eager=options.eager, seed=seed)

    def answer(chats: list[Chat], name: str, seed: int) -> list[str]:
        return generate.answer(llm, chats, work, name, max_tokens=max_tokens, seed=seed, batch=batch)

    def planned(asked: list[Chat], name: str) -> int:
        return planned_answers(options, work, minutes, asked, llm, lambda chats: answer(chats, name, options.seed))

    if options.prompts is not None:
        given = [request.chat for request in read_requests(Path(options.prompts))]
        asked = generate.fitting(options.target, given, options.longest)
        if len(asked) < len(given):
            logger.warning(
                "%d of %d requests are left out, because they leave no room for an answer within --longest %d",
                len(given) - len(asked), len(given), options.longest,
            )  # fmt: skip
        random.Random(options.seed).shuffle(asked)  # they may be sorted, and not all of them may be answered
        asked = asked[:most]
        answer(asked[: planned(asked, "file")], "file", options.seed)
        return
    asked = prompts.first_round(min(most, size), options.seed)
    generate.fitting(options.target, asked, options.longest)
    count = planned(asked, "first")
    own, second = later_rounds(count, 1 if minutes is None else size)
    asked = prompts.first_round(count - own - second, options.seed)
    about = list(zip(asked, answer(asked, "first", options.seed), strict=True))
    if own:
        asked = generate.own_requests(llm, own, work / "own.json", batch)
        # Templates fill up what the target does not make up.
        asked += prompts.first_round(own - len(asked), options.seed + 2)
        about += zip(asked, answer(asked, "own", options.seed + 2_000_000), strict=True)
    if second:
        answer(prompts.second_round(second, options.seed + 1, about), "second", options.seed + 1_000_000)


def later_rounds(count: int, first: int) -> tuple[int, int]:
    """The numbers of answers, of ``count``, to the target's own requests and in the second round.

    At least ``first`` belong to the first round: those that were timed to plan the others are there already.
    """
    own = max(0, min(round(OWN * count), count - first))
    return own, max(0, min(round(SECOND_ROUND * count), count - first - own))


def planned_answers(
    options: Options,
    work: Path,
    minutes: float | None,
    asked: list[Chat],
    llm: Callable[[], Any],
    answer: Callable[[list[Chat]], Any],
) -> int:
    """The number of answers that the time allows, decided once.

    Args:
        asked: the requests that come first, at least a shard or all of them. The time of the first shard is measured.
        llm, answer: start the target, and answer requests of the first round.
    """
    most, size = options.value("answers"), generate.shard_size(options.value("batch"))
    if minutes is None:
        return most

    def plan() -> dict[str, int]:
        name, later = ("first", LATER_SHARD) if options.prompts is None else ("file", LATER_SHARD_OF_FILE)
        # A shard that a killed run left would be read instead of timed.
        generate.shard_path(work / "answers", name, 0).unlink(missing_ok=True)
        begun = time.perf_counter()
        llm()
        ready = time.perf_counter()
        answer(asked[:size])
        now = time.perf_counter()
        left = 60 * minutes - (now - begun)
        shards = 1 + max(0, int(left / (later * (now - ready))))
        return {"answers": min(most, shards * size)}

    return int(kept(work / "answers.json", plan)["answers"])
