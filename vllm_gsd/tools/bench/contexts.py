"""How a decoding step grows with its context: the same questions after shorter and longer texts."""

from collections.abc import Callable
from itertools import chain, cycle, islice
from statistics import mean, median
from typing import Any

from vllm_gsd.tools.bench.bounds import mean_with_bounds
from vllm_gsd.tools.bench.methods import Setting
from vllm_gsd.tools.bench.turns import Engines, Work, rotated
from vllm_gsd.tools.errors import ToolError


def check(work: Work, lengths: list[int]) -> None:
    """Whether ``measure`` can run.

    Raises:
        ToolError: there are fewer than two prompts, answers have fewer than two tokens, or a context is too long.
    """
    if len(work.requests) < 2 or work.max_tokens < 2:
        raise ToolError("--contexts needs two prompts, one as context for the other, and --max-tokens of 2 or more.")
    longest = work.engine_args["max_model_len"]
    if not isinstance(longest, int) or longest < 0:
        return  # vLLM chooses it, or refuses it when it starts
    if lengths[-1] > (most := longest - work.max_tokens):
        raise ToolError(f"--contexts has {lengths[-1]}, but --max-model-len and --max-tokens allow at most {most}.")


def measure(
    settings: dict[str, Setting], engines: Engines, lengths: list[int], tick: Callable[[str], None]
) -> dict[str, Any]:
    """Run every prompt after each of these lengths of text, in tokens, one request at a time, in turns.

    Returns:
        by method: ``step_ms`` and ``tokens_per_step`` by length, means over the prompts of medians over the turns;
        ``growth``, the ratio of a step at the longest to one at the shortest, see ``mean_with_bounds``.
    """
    work = engines.work
    steps: dict[tuple[str, int], list[list[tuple[float, float]]]] = {
        (method, length): [[] for _ in work.requests] for method in settings for length in lengths
    }
    # With ignore_eos, every length has the same number of steps.
    job = {"concurrency": 1, "max_tokens": work.max_tokens, "ignore_eos": True}
    for turn in range(work.repeats):
        for method in rotated(list(settings), turn):
            with engines.turn(settings[method]) as run:
                for prompt, request in enumerate(work.requests):
                    behind = [other.chat for other in work.requests[prompt + 1 :] + work.requests[:prompt]]
                    for length in rotated(lengths, turn):
                        result = run({**job, "chats": [request.chat], "behind": behind, "context": length})
                        steps[method, length][prompt].append(_step(result))
            for length in lengths:
                tick(f"contexts, turn {turn + 1}: {method}, {length} tokens")
    report = {}
    for method in settings:
        # By length, for each prompt: milliseconds and tokens of a step.
        usual = {
            length: [[median(values) for values in zip(*turns, strict=True)] for turns in steps[method, length]]
            for length in lengths
        }
        growth = [long[0] / short[0] for short, long in zip(usual[lengths[0]], usual[lengths[-1]], strict=True)]
        report[method] = {
            "step_ms": {str(length): mean(ms for ms, _ in rows) for length, rows in usual.items()},
            "tokens_per_step": {str(length): mean(tokens for _, tokens in rows) for length, rows in usual.items()},
            "growth": mean_with_bounds(growth),
        }
    return report


def _step(result: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds and tokens of a decoding step. The prefill yields the first token."""
    decode, tokens = result["decode"], result["requests"][0]["tokens"] - 1
    return 1e3 * decode["seconds"] / decode["steps"], tokens / decode["steps"]


def with_context(ids: list[int], others: list[list[int]], length: int) -> list[int]:
    """The last ``length`` tokens of a prompt after the others, which repeat as often as needed."""
    missing = length - len(ids)
    if missing <= 0 or not any(others):
        return ids[-length:]
    text = list(islice(cycle(chain.from_iterable(others)), missing))
    return text + ids
