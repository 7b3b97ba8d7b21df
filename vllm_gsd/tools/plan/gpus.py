"""Machines from data sheets of GPUs. Only a few steps on an H200 have been compared with the predictions."""

import numpy as np

from vllm_gsd.planner.costs import Costs
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.plan.machine import Machine, curve
from vllm_gsd.tools.plan.model import Workload
from vllm_gsd.tools.plan.shapes import Shapes

# Dense bfloat16 TFLOPS, GB/s of memory, GB of memory.
GPUS = {
    "a10": (125, 600, 24),
    "l4": (121, 300, 24),
    "l40s": (362, 864, 48),
    "a100": (312, 2039, 80),
    "h100": (989, 3350, 80),
    "h200": (989, 4800, 141),
    "b200": (2250, 8000, 180),
}
# Shares of the data sheet's numbers that kernels reach.
BANDWIDTH, ARITHMETIC = 0.75, 0.5
# Milliseconds of a step and of a draft level besides their forwards, if both replay CUDA graphs.
STEP_MS, LEVEL_MS = 1.0, 0.15
# What has been compared with measurements (docs/experiments/2026-11-26-06-on-an-h200.md).
COMPARED = "Steps of 8B at 1 and 8 requests on an H200 took 92 to 106% of this; nothing else was compared with a GPU."
# Share of the memory that vLLM uses.
MEMORY = 0.9
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def machine_of(name: str, target: Shapes, draft: Shapes, workload: Workload) -> Machine:
    """One GPU with a target and a draft in bfloat16.

    Raises:
        ToolError: the models do not fit.
    """
    tflops, bandwidth, memory = GPUS[name]
    by_second, compute = bandwidth * 1e9 * BANDWIDTH, tflops * 1e12 * ARITHMETIC

    def forwards(shapes: Shapes) -> np.ndarray:
        return 1e3 * np.array([shapes.parameters * max(2 / by_second, 2 * rows / compute) for rows in ROWS])

    free = memory * 1e9 * MEMORY - 2 * sum(model.parameters + model.embedding for model in (target, draft))
    each = (workload.prompt + workload.answer) * (target.kv_bytes + draft.kv_bytes)
    if free < each:
        raise ToolError(f"The models leave no memory for a request of {workload.prompt + workload.answer:.0f} tokens.")
    # Keys and values are read once per request, however many rows attend to them.
    context_ms = 1e3 * workload.context * target.kv_bytes / by_second
    costs = Costs(np.array(ROWS, np.int64), forwards(target), forwards(draft), attention=0.0)
    off = [(float(rows), STEP_MS + ms + rows * context_ms) for rows, ms in zip(ROWS, costs.target, strict=True)]
    prompts = 2e3 * workload.prompt * target.parameters / compute
    drafted = prompts + 2e3 * workload.prompt * draft.parameters / compute
    return Machine(
        costs=costs,
        plain=curve(off),
        off=curve(off),
        graph_ms=0.0,
        node_ms=0.0,
        draft_ms=0.0,
        level_ms=LEVEL_MS,
        prompt_ms={name: curve([(1.0, ms)]) for name, ms in (("plain", prompts), ("off", prompts), ("gsd", drafted))},
        most=int(free / each),
        assumptions=[
            f"One {name.upper()} by its data sheet: {tflops} dense bfloat16 TFLOPS, {bandwidth} GB/s, {memory} GB.",
            f"Kernels reach {BANDWIDTH:.0%} of the bandwidth and {ARITHMETIC:.0%} of the arithmetic.",
            f"A step takes {STEP_MS} ms and a draft level {LEVEL_MS} ms besides their forwards.",
            "Weights, keys and values have two bytes per number.",
            "Our engine without speculation is as fast as plain vLLM.",
            "Acceptance is that of the report; it belongs to the models and the texts, not to the machine.",
            COMPARED,
        ],
    )
