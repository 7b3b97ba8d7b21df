"""One engine in a process of its own: reads jobs from standard input, a JSON object a line, and answers each.

Started by ``turns.Engine`` as ``python -m vllm_gsd.bench.engine``. The first line describes the engine, each further
one a run over requests. The engine's core stays in this process, where its parts can be timed and nothing polls.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import deque
from typing import Any

from vllm_gsd.bench.contexts import with_context
from vllm_gsd.bench.forms import FormSwitch
from vllm_gsd.bench.parts import PartsClock
from vllm_gsd.prompt_file import token_ids_of
from vllm_gsd.upstream.parts import runner_of


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    def answer(values: dict[str, Any]) -> None:
        print(json.dumps(values), file=answers, flush=True)

    llm = LLM(**json.loads(sys.stdin.readline()), disable_log_stats=False)
    clock = PartsClock()
    has_parts = clock.attach(llm)
    forms: FormSwitch | None = None
    answer({"ready": True, "peak_mb": peak_mb()})
    for line in sys.stdin:
        job = json.loads(line)
        if (form := job.pop("form", None)) is not None:
            forms = forms or FormSwitch(runner_of(llm))
            forms.to(form)
        answer(run(llm, clock if has_parts else None, **job))
    llm.llm_engine.engine_core.shutdown()


def run(
    llm: Any,
    clock: PartsClock | None,
    *,
    chats: list[list[dict[str, str]]],
    concurrency: int,
    max_tokens: int,
    with_parts: bool = False,
    ignore_eos: bool = False,
    context: int | None = None,
    behind: list[list[dict[str, str]]] | None = None,
) -> dict[str, Any]:
    """Answer the chats greedily, at most ``concurrency`` at a time.

    Args:
        with_parts: with the clock over the parts of a step.
        context: so many tokens each, of the chats that it is ``behind`` and the chat itself; None: as they come.

    Returns:
        ``seconds``; per chat ``tokens``, ``latency`` and ``ttft`` (seconds), and its own ``counters`` where parts are
        asked for and chats come one by one; ``counters`` of vLLM's metrics;
        ``decode``: ``steps`` in which no prompt was read, their ``seconds``, and, if asked for, ``parts``, seconds by
        part, and ``draft_levels``, our draft's forward passes; ``peak_mb`` and ``cudagraphs_captured`` so far.
    """
    from vllm import SamplingParams
    from vllm.compilation.counter import compilation_counter

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    tokenizer = llm.get_tokenizer()
    prompts = [token_ids_of(tokenizer, chat) for chat in chats]
    if context is not None:
        others = [token_ids_of(tokenizer, chat) for chat in behind or []]
        prompts = [with_context(ids, others, context) for ids in prompts]
    waiting = deque(enumerate(prompts))
    begun: dict[str, float] = {}
    seen: list[dict[str, Any]] = [{"tokens": 0, "latency": 0.0, "ttft": 0.0} for _ in chats]
    before = since_request = counters_of(llm)
    forget_responses(runner_of(llm))
    decode: dict[str, Any] = {"steps": 0, "seconds": 0.0}
    if clock is not None:
        clock.restart()
    start = time.perf_counter()
    while waiting or begun:
        while waiting and len(begun) < concurrency:
            index, ids = waiting.popleft()
            begun[str(index)] = time.perf_counter()
            engine.add_request(str(index), {"prompt_token_ids": ids}, params)
        # A prompt takes as long as many steps: mixed in, it would hide what a step of decoding takes.
        decodes = all(seen[int(request)]["tokens"] for request in begun)
        if clock is not None:
            clock.on = with_parts and decodes
        since = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        decode["steps"] += decodes
        decode["seconds"] += decodes * (now - since)
        for output in outputs:
            row = seen[int(output.request_id)]
            waited = now - begun[output.request_id]
            row["tokens"] = len(output.outputs[0].token_ids)
            row["ttft"] = row["ttft"] or waited
            if output.finished:
                row["latency"] = waited
                del begun[output.request_id]
                if with_parts and concurrency == 1:
                    counters = counters_of(llm)
                    row["counters"] = gained(since_request, counters)
                    since_request = counters
    seconds = time.perf_counter() - start
    result: dict[str, Any] = {"seconds": seconds, "requests": seen, "decode": decode, "peak_mb": peak_mb()}
    result["cudagraphs_captured"] = compilation_counter.num_cudagraph_captured
    result["counters"] = gained(before, counters_of(llm))
    if clock is not None:
        clock.on = False
        if with_parts:
            decode["parts"] = dict(clock.seconds)
            decode["draft_levels"] = clock.draft_levels
    return result


def forget_responses(runner: Any) -> None:
    """Drop finished responses that a method copies from: with the same prompts again it would copy the answers."""
    drafter = getattr(runner, "drafter", None)
    if (cache := getattr(drafter, "suffix_cache", None)) is not None:  # vLLM's
        for request_id in list(cache.cached_requests):
            cache.evict_cached_response(request_id)
    ours = getattr(getattr(runner, "speculator", None), "speculation", drafter)  # on Model Runner V2, and on V1
    if (shared := getattr(ours, "shared", None)) is not None:
        shared.clear()


def counters_of(llm: Any) -> dict[str, float]:
    """Counters of the engine by name; those by depth as ``name[depth]``, fallbacks as ``name[reason]``."""
    values: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "values"):
            for place, value in enumerate(metric.values, start=1):
                values[f"{metric.name}[{place}]"] = float(value)
        elif hasattr(metric, "value"):
            reason = metric.labels.get("reason")
            name = f"{metric.name}[{reason}]" if reason else metric.name
            values[name] = values.get(name, 0.0) + float(metric.value)
    return values


def gained(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What counters rose by."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def peak_mb() -> float:
    """Most memory this process had, MiB: of the GPU where there is one."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
