"""Reads a report of ``vllm-gsd bench``: the machine that it measured, the draft's acceptance, the workload."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from vllm_gsd.config import GSDConfig
from vllm_gsd.config.draft_check import kind_of_model
from vllm_gsd.config.draft_kind import MTP
from vllm_gsd.config.source import with_underscores
from vllm_gsd.planner.costs import Costs
from vllm_gsd.planner.overhead import LEAST_GRAPH_MS
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.plan.acceptance import Acceptance, fitted
from vllm_gsd.tools.plan.machine import Curve, Machine, curve
from vllm_gsd.tools.plan.model import Form, Workload
from vllm_gsd.tools.plan.trace import Observed

METHODS = {"plain": "plain", "off": "gsd-off", "gsd": "gsd"}


class Report:
    """A ``bench.json``, of which only some batch sizes are looked at if ``batches`` are given.

    Raises:
        ToolError: the file is no report, or lacks a method, a batch size or a draft, or the draft is an MTP module.
    """

    def __init__(self, path: Path, batches: list[int] | None = None):
        try:
            report: dict[str, Any] = json.loads(path.read_text())
            self.all: dict[int, dict[str, Any]] = {int(batch): rows for batch, rows in report["batches"].items()}
            settings: dict[str, Any] = report["settings"]
            draft: str | None = settings["draft"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ToolError(f"{path} cannot be read as the bench.json of vllm-gsd bench ({error!r}).") from error
        if draft is None:
            raise ToolError(f"{path} was measured without a draft model, which plans need; give bench a --draft.")
        self.draft = draft
        self.kind = checked_kind(draft, settings.get("draft_kind"))
        self.batches = sorted(batches or self.all)
        for batch in self.batches:
            rows = self.all.get(batch, {})
            for method in METHODS.values():
                if "planner" not in rows.get(method, {}):
                    raise ToolError(
                        f'{path} has no "{method}" at batch size {batch}; run vllm-gsd bench --methods '
                        f"{','.join(METHODS.values())} --batch-sizes {','.join(map(str, self.batches))}."
                    )
        self.first = self.all[self.batches[0]]["gsd"]
        if not self.first["planner"]:
            raise ToolError(f'In {path}, gsd measured no costs; run vllm-gsd bench with "budget": "auto" on CPUs.')
        if not self.first.get("acceptance_by_depth"):
            first = self.batches[0]
            raise ToolError(f"In {path}, gsd did not draft at batch size {first}, so its gain cannot be estimated.")
        limits = ("top_k", "max_depth", "num_speculative_tokens")
        try:
            # The keys of gsd.json that were given to the benchmark, besides "model".
            self.keys = with_underscores(json.loads(settings["gsd"]), "the report")
            given = {name: self.keys[name] for name in (*limits, "preset") if name in self.keys}
            config = GSDConfig.load({"method": "gsd", "model": None, **given}, "the report")
        except (ValueError, KeyError) as error:
            raise ToolError(f"The report's settings have no usable keys of gsd ({error}).") from None
        self.form = Form(*(getattr(config, name) for name in limits))

        try:  # all that plans need
            self.acceptance(), self.machine(self.workload())
        except (LookupError, TypeError, ValueError) as error:
            raise ToolError(f"{path} cannot be read as the bench.json of vllm-gsd bench ({error!r}).") from error

    def acceptance(self, observed: Observed | None = None) -> Acceptance:
        """From what was observed; by default at the smallest batch size, where the planner cuts the least."""
        form, children = self.form, np.array(self.first["planner"]["children"])
        by_depth, nodes = observed or (self.first["acceptance_by_depth"], self.first["decode"]["nodes"])
        return fitted(by_depth[: form.max_depth], children, form.top_k, max(1, round(nodes)))

    def workload(self) -> Workload:
        answers = self.first["answers"]
        return Workload(answers["prompt"], answers["tokens"])

    def running(self, batch: int) -> float:
        """Mean requests that really ran, since answers end at different times."""
        return float(self.all[batch]["plain"]["decode"]["requests"])

    def machine(self, workload: Workload) -> Machine:
        planner, own = self.first["planner"], self.workload()
        longer = planner["costs"]["attention"] * (workload.context - own.context)
        prompt = workload.prompt / own.prompt
        rows, target, draft = (np.array(planner["costs"][name]) for name in ("rows", "target", "draft"))
        step, drafting = planner["overhead"]["step"], planner["overhead"]["draft"]
        return Machine(
            costs=Costs(rows, target, draft, planner["costs"]["attention"]),
            plain=self._steps("plain", longer),
            off=self._steps("gsd-off", longer),
            graph_ms=max(LEAST_GRAPH_MS, step[3]),  # both as the engine's planner takes them
            node_ms=max(0.0, step[4]),
            draft_ms=drafting[0],
            level_ms=drafting[1],
            prompt_ms={name: self._prompts(method, prompt) for name, method in METHODS.items()},
            most=None,
            assumptions=[
                f"Machine, models and texts are those of the report, learned at batch sizes {self.batches}.",
                "A prompt takes time in proportion to its tokens, and a step's attention to the tokens of context.",
                "Times are linear between measured batch sizes; beyond the last one they grow as between the last two.",
            ],
        )

    def _steps(self, method: str, longer: float) -> Curve:
        """A step in which every request attends ``longer`` milliseconds longer than in the report."""
        rows = [self.all[batch][method]["decode"] for batch in self.batches]
        return curve([(row["requests"], row["step_ms"] + row["requests"] * longer) for row in rows])

    def _prompts(self, method: str, prompt: float) -> Curve:
        """A request's time outside of decoding steps, chiefly its prompt, which is ``prompt`` times the report's."""
        points = []
        for batch in self.batches:
            row = self.all[batch][method]
            decode, tokens = row["decode"], row["answers"]["tokens"]
            rate = decode["requests"] * row["tokens_per_step"]["median"] / decode["step_ms"]
            whole = 1e3 * tokens / row["tokens_per_second"]["median"]
            points.append((self.running(batch), prompt * max(0.0, whole - tokens / rate)))
        return curve([*points, (1e9, points[-1][1])])


def checked_kind(draft: str, kind: str | None = None) -> str:
    """The kind of a draft. Refuses MTP modules.

    ``kind`` is the draft's kind, if it was found on the machine that has the draft.
    """
    if (kind := kind or kind_of_model(draft)) == MTP:
        raise ToolError(f"{draft} is of kind {kind}, but plans are for drafts in a folder of their own.")
    return kind
