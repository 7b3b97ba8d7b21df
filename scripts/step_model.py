"""What a decode step takes on a GPU, part by part: plain decoding, a chain of EAGLE's kind, and graphs.

A smooth roofline: the time of a forward is the 3-norm of the time to read its weights and the time to multiply by them,
as in the tables of four CPUs (docs/cpu-kernels.md, each within 15%). What is read of the KV cache, launches for which
the host waits, and all-reduces between tensor-parallel GPUs come on top. A few steps on an
H200 have been compared with what it predicts (``gpus.COMPARED``).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gpu_e2e_plan import eagle_head, llama

from vllm_gsd.tools.inspect.trace import read_traces
from vllm_gsd.tools.plan.acceptance import Acceptance, fitted, level_rows
from vllm_gsd.tools.plan.gpus import ARITHMETIC, BANDWIDTH, COMPARED, GPUS, LEVEL_MS, STEP_MS
from vllm_gsd.tools.plan.model import Form, Workload
from vllm_gsd.tools.plan.shapes import Shapes, shapes_of
from vllm_gsd.tools.plan.trace import observed

# Milliseconds that a decode step with graphs adds beside its forwards: about 45 launches outside CUDA graphs
# (``scripts/count_launches``) of 4 microseconds each.
GRAPH_MS = 0.18
# Milliseconds of one all-reduce of a few rows between GPUs of a node; a layer needs two.
ALL_REDUCE_MS = 0.012
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WORKLOAD = Workload(prompt=1000, answer=500)
# A chain as vLLM's EAGLE-3 drafts by default in its recipes, and the default graph of a gsd.json.
FORMS = {"plain": Form(1, 0, 0), "eagle": Form(1, 5, 5), "gsd": Form(8, 6, 16)}
RECORDED = Path(__file__).parent / "recorded_acceptance.json"

#: Targets, and tensor-parallel GPUs.
MODELS = {"8b": (llama(4096, 14336, 32, 32, 8, 128256), 1), "70b": (llama(8192, 28672, 80, 64, 8, 128256), 8)}


@dataclass(frozen=True)
class Gpu:
    """One of some tensor-parallel GPUs: bytes and operations per millisecond that kernels reach."""

    read: float
    compute: float
    count: int = 1

    @classmethod
    def named(cls, name: str, count: int = 1) -> Gpu:
        tflops, bandwidth, _ = GPUS[name]
        return cls(bandwidth * 1e6 * BANDWIDTH, tflops * 1e9 * ARITHMETIC, count)

    def forward(self, shapes: Shapes, rows: float) -> dict[str, float]:
        """Milliseconds of a forward without attention: "weights" or "arithmetic", whichever binds, and "links"."""
        parameters = shapes.parameters / self.count
        weights, arithmetic = 2 * parameters / self.read, 2 * parameters * rows / self.compute
        links = 2 * shapes.layers * ALL_REDUCE_MS if self.count > 1 else 0.0
        bound = "weights" if weights >= arithmetic else "arithmetic"
        return {bound: float(np.hypot(weights**1.5, arithmetic**1.5) ** (2 / 3)), "links": links}


@dataclass(frozen=True)
class Simulation:
    """Steps of a target and a draft on a GPU with graphs of an acceptance."""

    gpu: Gpu
    target: Shapes
    draft: Shapes
    acceptance: Acceptance
    workload: Workload = WORKLOAD

    def step(self, requests: int, nodes: int, levels: np.ndarray) -> dict[str, float]:
        """Milliseconds of a step's parts, for graphs of so many nodes whose levels run so many rows a request."""
        parts = self.gpu.forward(self.target, requests * (1 + nodes))
        parts["KV cache"] = requests * self.workload.context * self.target.kv_bytes / self.gpu.count / self.gpu.read
        parts["launches"] = STEP_MS + (GRAPH_MS if nodes else 0.0)
        parts["drafting"] = sum(
            LEVEL_MS + sum(self.gpu.forward(self.draft, requests * rows).values()) for rows in levels
        )
        return parts

    def best(self, requests: int, limits: Form) -> dict[str, Any]:
        """The fastest number of levels and nodes within limits: ``tokens_per_second``, what binds, and the parts."""
        found = self._row(requests, 0, np.zeros(0), 0.0)
        for count in range(1, limits.max_depth + 1):
            chances, depths = self.acceptance.graph(limits.top_k, count, limits.num_speculative_tokens)
            levels = level_rows(depths, count)
            rows = [
                self._row(requests, nodes, levels, float(chances[:nodes].sum())) for nodes in range(1, len(chances) + 1)
            ]
            found = max(found, *rows, key=lambda row: row["tokens_per_second"])
        return found

    def _row(self, requests: int, nodes: int, levels: np.ndarray, accepted: float) -> dict[str, Any]:
        parts = self.step(requests, nodes, levels)
        took = sum(parts.values())
        return {
            "tokens_per_second": 1e3 * requests * (1 + accepted) / took, "step_ms": took, "tokens_a_step": 1 + accepted,
            "nodes": nodes, "levels": len(levels), "binds": max(parts, key=lambda name: parts[name]), "parts_ms": parts,
        }  # fmt: skip


def recorded_acceptance(trace: Path | None = None) -> Acceptance:
    """The acceptance in a trace, or of an early EAGLE head for the built-in target as it was recorded.

    Raises:
        ToolError: the file is no trace, or nothing was accepted in it.
    """
    known = json.loads(RECORDED.read_text()) if trace is None else reduced(trace)
    return fitted(known["by_depth"], np.array(known["children"]), known["top_k"], max(1, round(known["nodes"])))


def reduced(trace: Path) -> dict[str, Any]:
    """What of a trace ``recorded_acceptance`` needs."""
    (by_depth, nodes), probabilities = observed(trace), children(trace)
    return {"by_depth": by_depth, "nodes": nodes, "children": probabilities, "top_k": len(probabilities)}


def children(path: Path) -> list[float]:
    """The draft's average probabilities of the best, second best... child of the nodes in a trace's graphs.

    Raises:
        ToolError: the file is no trace.
    """
    totals: dict[int, float] = defaultdict(float)
    counts: Counter[int] = Counter()
    for step in (step for trace in read_traces(path).values() for step in trace.steps):
        below: dict[int, list[float]] = defaultdict(list)
        for parent, prob in zip(step["graph"]["parent"], step["graph"]["prob"], strict=True):
            below[parent].append(prob)
        for parent, probs in below.items():
            for place, prob in enumerate(sorted(probs, reverse=True) if parent >= 0 else ()):
                totals[place] += prob
                counts[place] += 1
    # A node has fewer children than asked for where the draft gave them too little; these count as 0.
    return [totals[place] / max(1, counts[0]) for place in range(len(counts))]


def simulate(gpus: list[str], models: list[str], batches: list[int], acceptance: Acceptance) -> dict[str, Any]:
    """Tokens per second of every GPU, model, method and batch size, with what was assumed."""
    rows = []
    for name in gpus:
        for model in models:
            target, ranks = MODELS[model]
            head = {**eagle_head(target), "vocab_size": 32000}
            one = Simulation(Gpu.named(name, ranks), shapes_of(target), shapes_of(head), acceptance)
            rows += [
                {"gpu": name, "model": model, "ranks": ranks, "method": method, "batch": batch, **one.best(batch, form)}
                for method, form in FORMS.items() for batch in batches
            ]  # fmt: skip
    return {"assumptions": assumptions(gpus), "workload": asdict(WORKLOAD), "rows": rows}


def assumptions(gpus: list[str]) -> list[str]:
    """One sentence each."""
    sheets = ", ".join(
        f"{name.upper()} {GPUS[name][0]} dense bfloat16 TFLOPS and {GPUS[name][1]} GB/s" for name in gpus
    )
    return [
        f"Data sheets: {sheets}.",
        f"Kernels reach {BANDWIDTH:.0%} of the bandwidth and {ARITHMETIC:.0%} of the arithmetic.",
        f"A step takes {STEP_MS} ms beside its forwards, a draft level {LEVEL_MS} ms, and graphs {GRAPH_MS} ms.",
        f"An all-reduce between GPUs takes {ALL_REDUCE_MS} ms; a layer has two.",
        "Targets have the shapes of Llama 3.1, and both methods the same draft of EAGLE's kind with one layer.",
        "Acceptance is that of a trace, the same for all models; every request's graph is the average one.",
        "Every method drafts as many levels and verifies as many nodes as are fastest, none included.",
        "Weights, keys and values have two bytes per number. Prompts are left out.",
        COMPARED,
    ]


def draw(found: dict[str, Any], file: Path) -> None:
    """Speed over plain decoding by batch size, a plot for every GPU and model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = sorted({(row["model"], row["gpu"]) for row in found["rows"]})
    figure, axes = plt.subplots(1, len(kinds), figsize=(4 * len(kinds), 3.5), sharey=True, squeeze=False)
    for kind, plot in zip(kinds, axes[0], strict=True):
        for method in FORMS:
            of = [row for row in found["rows"] if (row["model"], row["gpu"]) == kind and row["method"] == method]
            plot.plot([row["batch"] for row in of], [row["tokens_per_second"] for row in of], marker="o", label=method)
        plot.set(title=" ".join(kind), xscale="log", yscale="log", xlabel="requests at once")
        plot.grid(alpha=0.3)
    axes[0][0].set_ylabel("tokens per second")
    axes[0][0].legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")
    plt.close(figure)
