"""The gain of a draft in the real engine: tokens per target step, and speed over plain vLLM and over our own engine."""

from pathlib import Path
from typing import Any, cast

from vllm_gsd.config.draft_kind import positions_of
from vllm_gsd.tools.bench.methods import Setting
from vllm_gsd.tools.bench.report import tokens_per_step
from vllm_gsd.tools.bench.turns import Work, running, tokens_per_second
from vllm_gsd.tools.prompt_file import Request


def compare(
    target: Path, draft: Path, prompts: list[list[int]], max_tokens: int, eager: bool, logs: Path
) -> dict[str, float]:
    """Decode prompts (token ids) greedily, one at a time, with the draft, without its graph, and in plain vLLM.

    Returns:
        ``tokens_per_step`` of the draft alone if 16 nodes are always verified; the speed of the default configuration
        over plain vLLM's, ``ratio_to_plain``, and over the same engine's with all requests opted out, ``ratio_to_off``.

    Raises:
        ToolError: an engine died.
    """
    longest = max(map(len, prompts))
    work = Work(
        requests=[Request(cast(Any, ids)) for ids in prompts],  # an engine accepts token ids in place of a chat
        batch_sizes=[1],
        repeats=1,
        max_tokens=max_tokens,
        engine_args={
            "model": str(target),
            "dtype": "bfloat16",
            # vLLM refuses more positions than the target has. The longest answers are shorter then.
            "max_model_len": max(longest + 1, positions_of(target, longest + max_tokens)),
            "kv_cache_memory_bytes": 1 << 30,
            "enable_prefix_caching": False,
        },
        logs=logs,
    )
    gsd = {"method": "gsd", "model": str(draft)}
    configs = {"plain": None, "every node": {**gsd, "sources": ["draft"], "budget": 16}, "auto": gsd}
    results = {}
    for name, config in configs.items():
        with running(Setting(name, "", config, compiled=not eager), work) as engine:
            results[name] = engine.run(work.job(1))
            if name == "auto":
                results["off"] = engine.run({**work.job(1), "opted_out": True})
    speed = {name: tokens_per_second(result) for name, result in results.items()}
    return {
        "tokens_per_step": tokens_per_step(results["every node"]),
        "ratio_to_plain": speed["auto"] / speed["plain"],
        "ratio_to_off": speed["auto"] / speed["off"],
    }
