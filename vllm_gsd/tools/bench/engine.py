"""One engine in its own process. It reads jobs from standard input, one JSON object per line, and answers each.

``turns.Engine`` starts it as ``python -m vllm_gsd.tools.bench.engine``. The first line of input describes the engine,
and each further line is one job. The engine core runs in this process, so its parts can be timed and nothing polls.
"""

import json
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from vllm_gsd.tools.bench.contexts import with_context
from vllm_gsd.tools.bench.forms import FormSwitch
from vllm_gsd.tools.bench.parts import PartsClock
from vllm_gsd.tools.process import end_with_parent
from vllm_gsd.tools.prompt_file import Prompt, token_ids_of
from vllm_gsd.upstream import wire
from vllm_gsd.upstream.parts import runner_of


def main() -> None:
    """Answer jobs until standard input ends."""
    end_with_parent()  # a job takes minutes, and input is read only after it
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
    chats: list[Prompt],
    concurrency: int,
    max_tokens: int,
    opted_out: bool = False,
    with_parts: bool = False,
    ignore_eos: bool = False,
    context: int | None = None,
    behind: list[Prompt] | None = None,
    later: list[Prompt] | None = None,
) -> dict[str, Any]:
    """Answer the chats greedily, at most ``concurrency`` at a time.

    Args:
        clock: the clock over the parts of a step, or None if they run in other processes.
        opted_out: whether the requests opt out of the graph.
        with_parts: whether the clock runs.
        context: the number of prompt tokens, None to leave prompts as they are.
        behind: chats that fill the context before a shorter chat.
        later: chats of later jobs, which must not be too long either.

    Returns:
        ``seconds``; ``requests``, per chat ``prompt`` and ``tokens`` (their numbers), the ``steps`` that gave tokens,
        ``latency`` and ``ttft`` (seconds), and, with parts at concurrency 1, its own ``counters``; ``counters`` of
        vLLM's metrics; ``decode``: the ``steps`` without a prefill, their ``seconds``, the ``running`` requests summed
        over them and, with parts, ``parts`` (seconds by part, which add up to ``seconds``) and ``draft_levels`` (our
        draft's forward passes); ``planner``, see ``planner_of``; ``peak_mb`` and ``cudagraphs_captured`` so far.
    """
    from vllm import SamplingParams
    from vllm.compilation.counter import compilation_counter

    extra_args = wire.opting_out() if opted_out else None
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos, extra_args=extra_args)
    prompts = _prompts(llm, chats, context, behind or [], later or [])
    forget_responses(runner_of(llm))
    before = counters_of(llm)
    timed_run = TimedRun(
        llm, params, clock if with_parts else None, before if with_parts and concurrency == 1 else None
    )
    start = time.perf_counter()
    with untaught(runner_of(llm)) if opted_out else nullcontext():
        timed_run.answer(prompts, concurrency)
    return {
        "seconds": time.perf_counter() - start,
        "requests": timed_run.requests,
        "decode": timed_run.decode,
        "planner": planner_of(runner_of(llm)),
        "peak_mb": peak_mb(),
        "cudagraphs_captured": compilation_counter.num_cudagraph_captured,
        "counters": gained(before, counters_of(llm)),
    }


def _prompts(
    llm: Any, chats: list[Prompt], context: int | None, behind: list[Prompt], later: list[Prompt]
) -> list[list[int]]:
    """The token ids of the chats; arguments as for ``run``."""
    tokenizer = llm.get_tokenizer()
    prompts, others, future = ([token_ids_of(tokenizer, chat) for chat in some] for some in (chats, behind, later))
    most = llm.llm_engine.model_config.max_model_len
    if (length := max(map(len, future), default=0)) >= most:  # it leaves no room for a token
        raise ValueError(f"a prompt has {length} tokens, but --max-model-len is {most}")
    return prompts if context is None else [with_context(ids, others, context) for ids in prompts]


class TimedRun:
    """Drives the engine step by step and times its requests and its steps without a prefill.

    Args:
        clock: the clock over the parts of a step, None to leave it off.
        counters: the engine's counters now, to give each request its own; None where requests overlap.
    """

    def __init__(self, llm: Any, params: Any, clock: PartsClock | None, counters: dict[str, float] | None):
        self.llm, self.params, self.clock, self.counters = llm, params, clock, counters
        self.begun: dict[str, float] = {}
        self.requests: list[dict[str, Any]] = []
        self.decode: dict[str, Any] = {"steps": 0, "seconds": 0.0, "running": 0}

    def answer(self, prompts: list[list[int]], concurrency: int) -> None:
        """Run all prompts (token ids), at most ``concurrency`` at a time."""
        self.requests = [{"prompt": len(ids), "tokens": 0, "steps": 0, "latency": 0.0, "ttft": 0.0} for ids in prompts]
        if self.clock is not None:
            self.clock.restart()
        waiting = deque(enumerate(prompts))
        while waiting or self.begun:
            while waiting and len(self.begun) < concurrency:
                index, ids = waiting.popleft()
                self.begun[str(index)] = time.perf_counter()
                self.llm.llm_engine.add_request(str(index), {"prompt_token_ids": ids}, self.params)
            self._step()
        if self.clock is not None:
            self.clock.on = False
            self.decode |= {
                "seconds": self.clock.total,
                "parts": dict(self.clock.seconds),
                "draft_levels": self.clock.draft_levels,
            }

    def _step(self) -> None:
        # A prefill takes as long as many decoding steps and would hide their cost.
        decodes = all(self.requests[int(request)]["tokens"] for request in self.begun)
        if self.clock is not None:
            self.clock.on = decodes
        self.decode["running"] += decodes * len(self.begun)
        since = time.perf_counter()
        outputs = self.llm.llm_engine.step()
        now = time.perf_counter()
        self.decode["steps"] += decodes
        self.decode["seconds"] += decodes * (now - since)
        for output in outputs:
            self._record(output, now)

    def _record(self, output: Any, now: float) -> None:
        row = self.requests[int(output.request_id)]
        waited = now - self.begun[output.request_id]
        row["tokens"] = len(output.outputs[0].token_ids)
        row["steps"] += 1
        row["ttft"] = row["ttft"] or waited
        if output.finished:
            row["latency"] = waited
            del self.begun[output.request_id]
            if self.counters is not None:
                before, self.counters = self.counters, counters_of(self.llm)
                row["counters"] = gained(before, self.counters)


def forget_responses(runner: Any) -> None:
    """Drop the finished responses that methods copy from. Otherwise repeated prompts would copy their own answers."""
    if (cache := getattr(getattr(runner, "drafter", None), "suffix_cache", None)) is not None:  # vLLM's suffix method
        for request_id in list(cache.cached_requests):
            cache.evict_cached_response(request_id)
    if (ours := getattr(runner, "speculation", None)) is not None:
        ours.copies.clear()


@contextmanager
def untaught(runner: Any) -> Iterator[None]:
    """Let our planner forget what it learns inside this context.

    The turns of ``gsd-off`` and ``gsd`` share an engine. A server of graphs never sees so many plain steps.
    """
    planner = getattr(getattr(runner, "speculation", None), "planner", None)
    with nullcontext() if planner is None else planner.unlearned():
        yield


def planner_of(runner: Any) -> dict[str, Any] | None:
    """What our planner has measured and learned, in its own names, as ``vllm-gsd plan`` reads it; None without one."""
    planner: Any = getattr(getattr(runner, "speculation", None), "planner", None)
    if getattr(planner, "costs", None) is None or planner.costs.by_level:  # the latter are those of Model Runner V2
        return None
    costs, overhead, calibration = planner.costs, planner.overhead, planner.calibration
    return {
        "costs": {name: getattr(costs, name).tolist() for name in ("rows", "target", "draft")}
        | {"attention": costs.attention},
        "overhead": {name: getattr(overhead, name).weights.tolist() for name in ("step", "draft")},
        "first_level": calibration.first_level,
        **{name: getattr(planner, name).tolist() for name in ("children", "worth", "levels", "level_share")},
    }


def counters_of(llm: Any) -> dict[str, float]:
    """The engine's counters by name. Counters by depth are ``name[depth]``, fallbacks ``name[reason]``."""
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
    """The increase of each counter."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def peak_mb() -> float:
    """Peak memory in MiB, of the GPU if there is one, else of this process."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
