"""The report of a bench run: medians with their spread, and ratios to plain vLLM taken turn by turn."""

from statistics import mean, median
from typing import Any

from vllm_gsd.tools.bench import categories
from vllm_gsd.tools.bench.methods import FORMS, OFF
from vllm_gsd.tools.bench.parts import PARTS
from vllm_gsd.tools.bench.turns import Runs, Work, tokens_per_second

BY_DEPTH = "vllm:spec_decode_num_accepted_tokens_per_pos"


def make_report(chosen: dict[str, dict[int, Any]], runs: Runs, work: Work, skipped: dict[str, str]) -> dict[str, Any]:
    """The report, ready for JSON.

    Returns:
        ``batches[batch][method]``, see ``_row``; ``categories[category][method]``, ratios to plain at the smallest
        batch size; ``forms[category][method]``, what the steps verified, if requests came one at a time; and
        ``skipped``, methods with the reason.
    """
    batches: dict[str, dict[str, Any]] = {}
    for batch in work.batch_sizes:
        plain, off = (runs.timed.get(method, {}).get(batch) for method in ("plain", OFF))
        batches[str(batch)] = {
            method: {
                "setting": chosen[method][batch]["setting"].name,
                "tried": chosen[method][batch]["tried"],
                **_row(runs.timed[method][batch], runs.parts[method][batch]),
                **_ratios(method, runs.timed[method][batch], plain, off),
            }
            for method in runs.timed
        }
    ratios, forms = categories.speed_ratios(runs, work), categories.forms(runs, work)
    return {"batches": batches, "categories": ratios, "forms": forms, "skipped": skipped}


def _row(results: list[dict[str, Any]], with_parts: dict[str, Any]) -> dict[str, Any]:
    """One method at one batch size.

    Returns:
        ``tokens_per_second``, ``ttft_ms``, ``tpot_ms`` and ``tokens_per_step`` (of one request, including steps without
        drafts) as median, min and max over the turns; ``acceptance_by_depth``; ``step_ms`` and ``step_parts_ms``, means
        over the steps without a prefill in the turn with the clock; ``draft_levels`` of our drafts: levels
        ``per_step``, ``forward_ms`` of one, and ``beside_ms``, the rest of drafting per level; ``decode``, the usual
        step without a prefill and without the clock; ``answers``, mean tokens of a ``prompt`` and its answer
        (``tokens``); ``planner``, see ``engine.planner_of``; ``peak_mb``; and ``cudagraphs``, if there are any.
    """
    speeds = [tokens_per_second(result) for result in results]
    decode = with_parts["decode"]
    steps = max(1, decode["steps"])
    row: dict[str, Any] = {
        "tokens_per_second": spread(speeds),
        "ttft_ms": spread([1e3 * median(r["ttft"] for r in result["requests"]) for result in results]),
        "tpot_ms": spread([_tpot_ms(result) for result in results]),
        "tokens_per_step": spread([tokens_per_step(result) for result in results]),
        "acceptance_by_depth": _by_depth(results),
        "step_ms": 1e3 * decode["seconds"] / steps,
        "decode": _decode(results),
        "answers": {
            name: mean(request[name] for result in results for request in result["requests"])
            for name in ("prompt", "tokens")
        },
        "planner": results[-1]["planner"],
        "peak_mb": max(result["peak_mb"] for result in results),
    }
    if captured := results[-1].get("cudagraphs_captured"):
        counters = results[-1]["counters"]
        hits, misses = (counters.get(f"vllm:gsd_cudagraph_{name}") for name in ("hits", "misses"))
        row["cudagraphs"] = {"captured": captured, "replayed": hits, "missed": misses}
    parts = decode.get("parts")
    row["step_parts_ms"] = parts and {part: 1e3 * parts.get(part, 0.0) / steps for part in PARTS}
    if parts and (levels := decode["draft_levels"]):
        row["draft_levels"] = {
            "per_step": levels / steps,
            "forward_ms": 1e3 * parts["draft forward"] / levels,
            "beside_ms": 1e3 * parts["draft"] / levels,
        }
    return row


def _decode(results: list[dict[str, Any]]) -> dict[str, float]:
    """A step without a prefill, medians over the turns.

    Returns:
        ``step_ms``; ``requests``; ``drafted`` requests; and ``nodes`` verified of a drafted request's graph.
    """
    rows = []
    for result in results:
        decode, counters = result["decode"], result["counters"]
        steps = max(1, decode["steps"])
        drafts = counters.get(categories.DRAFTS, 0.0)
        # Every request's first step is a prefill, which verifies nothing.
        drafted = drafts / max(1, sum(request["steps"] - 1 for request in result["requests"]))
        nodes = counters.get("vllm:gsd_nodes_verified", 0.0) / max(1.0, drafts)
        rows.append((1e3 * decode["seconds"] / steps, decode["running"] / steps, drafted, nodes))
    step_ms, requests, share, nodes = (median(values) for values in zip(*rows, strict=True))
    return {"step_ms": step_ms, "requests": requests, "drafted": share * requests, "nodes": nodes}


def _ratios(
    method: str, results: list[dict[str, Any]], plain: list[dict[str, Any]] | None, off: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """Ratios of a method's speed to plain vLLM's, and to our engine's with every request opted out, turn by turn.

    Returns:
        ``ratio_to_plain``, what a user gains, and ``ratio_to_off``, what the graph itself gains, as median, min and
        max; ``efficiency``, what speculation itself gains (for vLLM's own methods the gain over plain vLLM) divided by
        the tokens per step.
    """
    ratios: dict[str, Any] = {}
    gain = "ratio_to_off" if method in FORMS else "ratio_to_plain"
    for name, others in (("ratio_to_plain", plain), ("ratio_to_off", off if method in FORMS else None)):
        if others is not None:
            pairs = zip(results, others, strict=True)
            ratios[name] = spread([tokens_per_second(ours) / tokens_per_second(other) for ours, other in pairs])
    if gain in ratios and method not in ("plain", OFF):
        ratios["efficiency"] = ratios[gain]["median"] / median(tokens_per_step(result) for result in results)
    return ratios


def spread(values: list[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def tokens_per_step(result: dict[str, Any]) -> float:
    """Tokens per target step of a request.

    The steps are counted, as vLLM's drafters also count accepted tokens that lie behind the end of an answer.
    """
    tokens, steps = (sum(request[name] for request in result["requests"]) for name in ("tokens", "steps"))
    return tokens / steps


def _tpot_ms(result: dict[str, Any]) -> float:
    """Time per token after the first, the median over the requests."""
    times = [
        (request["latency"] - request["ttft"]) / (request["tokens"] - 1)
        for request in result["requests"]
        if request["tokens"] > 1
    ]
    return 1e3 * median(times) if times else 0.0


def _by_depth(results: list[dict[str, Any]]) -> list[float]:
    """Share of drafts with an accepted token at depth 1, 2, ... Empty without drafts."""
    counters = results[-1]["counters"]
    drafts = counters.get(categories.DRAFTS, 0.0)
    if not drafts:
        return []
    shares: list[float] = []
    while (name := f"{BY_DEPTH}[{len(shares) + 1}]") in counters:
        shares.append(counters[name] / drafts)
    while shares and shares[-1] == 0:
        shares.pop()
    return shares
