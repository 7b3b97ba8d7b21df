"""Tokens per second of plain decoding, a chain and a graph, by the planner's own arithmetic."""

from dataclasses import dataclass

import numpy as np

from vllm_gsd.planner.rates import best_rate
from vllm_gsd.tools.plan.acceptance import Acceptance, level_rows
from vllm_gsd.tools.plan.machine import Machine


@dataclass(frozen=True)
class Workload:
    """Mean tokens of a prompt and of its answer."""

    prompt: float
    answer: float

    @property
    def context(self) -> float:
        """Mean tokens of context while the answer is written."""
        return self.prompt + self.answer / 2


@dataclass(frozen=True)
class Form:
    """Limits of a graph, in the names of gsd.json; ``top_k`` 1 is a chain."""

    top_k: int
    max_depth: int
    num_speculative_tokens: int


@dataclass(frozen=True)
class Model:
    """Predicts a machine's speed at a workload."""

    machine: Machine
    acceptance: Acceptance
    workload: Workload
    block: int | None = None  # rows of the one forward of a draft of whole blocks; None if every level has its own

    def speculating(self, requests: float, form: Form) -> float:
        """Tokens per millisecond of decoding if every step drafts, with the best number of levels and nodes."""
        machine, count = self.machine, max(1, round(requests))
        context = count * self.workload.context
        target, draft, attention = machine.costs.tables
        tables = target, draft, attention, machine.node_ms, machine.level_ms
        # What a step takes besides the forward that ``best_rate`` adds.
        spent = machine.off(count) - machine.costs.target_ms(count, context) + machine.graph_ms + machine.draft_ms
        best = 0.0
        for levels in range(1, min(form.max_depth, len(self.acceptance.depth)) + 1):
            chances, depths = self.acceptance.graph(form.top_k, levels, form.num_speculative_tokens)
            rows = count * (level_rows(depths, levels) if self.block is None else np.array([self.block]))
            drafting = sum(machine.costs.draft_ms(level) + machine.level_ms for level in rows)
            best = max(best, best_rate(tables, count, context, spent + drafting, np.repeat(chances, count)))
        return best * requests / count

    def decoding(self, requests: float, form: Form | None) -> float:
        """Tokens per millisecond of decoding: our engine, which drafts where that pays; plain vLLM for None."""
        if form is None:
            return requests / self.machine.plain(requests)
        return max(requests / self.machine.off(requests), self.speculating(requests, form))

    def pays(self, requests: float, form: Form) -> bool:
        """Whether speculation is faster than our engine without it."""
        return self.speculating(requests, form) > requests / self.machine.off(requests)

    def request_ms(self, requests: float, form: Form | None, off: bool = False) -> float:
        """Milliseconds of the engine for a whole request, prompt included, with ``requests`` running."""
        off = off or (form is not None and not self.pays(requests, form))
        rate = requests / self.machine.off(requests) if off else self.decoding(requests, form)
        method = "off" if off else "plain" if form is None else "gsd"
        return self.machine.prompt_ms[method](requests) + self.workload.answer / rate

    def tokens_per_second(self, requests: float, form: Form | None, off: bool = False) -> float:
        """Answers' tokens per second, prompts included; ``off`` is our engine without speculation."""
        return 1e3 * self.workload.answer / self.request_ms(requests, form, off)

    def turns_off(self, form: Form, most: int) -> int | None:
        """The smallest number of requests from which on speculation does not pay; None if it pays at ``most``."""
        pays = [requests for requests in _tried(most) if self.pays(requests, form)]
        last = max(pays, default=0)
        return None if last >= most else next(requests for requests in _tried(most) if requests > last)

    def best_form(self, requests: float, limits: Form) -> Form:
        """The smallest graph within 1% of the fastest one at this number of requests."""
        most = limits.num_speculative_tokens
        least = self.block or 0  # fewer nodes would shorten the block
        sizes = [size for size in (4, 8, 12, 16, 24, 32, 48, 64) if least <= size < most]
        forms = [Form(limits.top_k, depth, size) for size in [*sizes, most] for depth in range(1, limits.max_depth + 1)]
        rates = [self.speculating(requests, form) for form in forms]
        return next(form for form, rate in zip(forms, rates, strict=True) if rate >= 0.99 * max(rates))


def _tried(most: int) -> list[int]:
    """Numbers of requests, every one up to 32 and then in steps of 3%."""
    tried = [1]
    while tried[-1] < most:
        tried.append(min(most, max(tried[-1] + 1, round(tried[-1] * 1.03))))
    return tried
