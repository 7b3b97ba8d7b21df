"""Measures what a step costs on Model Runner V2: the target's forward by rows, and draft levels by requests.

Both run as they do while the engine serves: with the CUDA graphs that were captured, and their padding.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_gsd.engine.observe.measure import ROWS, time_by_rows
from vllm_gsd.engine.parallel.ranks import from_first_rank
from vllm_gsd.planner.costs import Costs, rising

if TYPE_CHECKING:
    from vllm_gsd.engine.v2.model_runner import GraphModelRunner

logger = init_logger("vllm.gsd")


@torch.inference_mode()
def measure_costs(runner: GraphModelRunner) -> Costs:
    """Time the target's forward pass and draft phases.

    Attention to the context is left to the planner's overhead, which has a term for it: the rows of a request read its
    keys and values together.

    Args:
        runner: the V2 model runner; its KV cache is allocated, its CUDA graphs are captured, and with LoRA it has dummy
            adapters.
    """
    width, drafting = runner.decode_query_len, runner.speculator.drafting
    most = max(2, min(runner.max_num_tokens, runner.max_num_reqs * width, ROWS[-1]))
    # Whole graphs of a few requests too, because full CUDA graphs hold these.
    whole = [width * count for count in ROWS]
    rows = sorted({*(count for count in (*ROWS, *whole) if count < most), most})
    levels = drafting.variants if drafting.drafter is not None else []
    for count in runner.speculator.plan.levels if levels else []:  # compiles what a plan may choose
        drafting.run_idle(1, count)
    phases = [partial(_draft, runner, count) for count in levels]
    rows, times = time_by_rows(rows, partial(_target_forward, runner), *phases)
    # Padding makes steps of the times, so they only rise.
    target, *drafts = (from_first_rank(rising(np.array(rows), measured)) for measured in times)
    logger.info(
        "gsd: a target step takes %.1f ms for 1 row and %.1f ms for %d rows, drafting %.1f ms for 1 request.",
        *(times[0, 0], times[0, -1], rows[-1], times[-1, 0] if drafts else 0),
    )
    draft = by_level(levels, np.array(drafts)) if drafts else np.zeros((1, len(rows)))
    return Costs(np.array(rows, np.int64), target=target, draft=draft, attention=0.0)


def by_level(levels: list[int], phases: np.ndarray) -> np.ndarray:
    """What each level adds to a draft phase, the same for all levels between two numbers of them.

    Args:
        levels: numbers of levels, ascending.
        phases: float64 [len(levels), n], times of draft phases with these numbers of levels.

    Returns:
        float64 [levels[-1], n].
    """
    more = np.diff(levels, prepend=0)
    added = np.maximum(np.diff(phases, axis=0, prepend=0.0), 0.0) / more[:, None]
    return added.repeat(more, axis=0)


def _target_forward(runner: GraphModelRunner, num_rows: int) -> None:
    uniform = num_rows % runner.decode_query_len == 0
    hidden, _ = runner._dummy_run(num_rows, uniform_decode=uniform, randomize_inputs=True, skip_eplb=True)
    assert hidden is not None
    # With LoRA, logits read the adapter of each row; the dummy run selects those of one row per request.
    rows, lora = np.ones(num_rows, np.int32), runner.lora_config
    with runner.maybe_select_dummy_loras(lora, rows, num_active_loras=lora.max_loras if lora else 0):
        runner.model.compute_logits(hidden[:num_rows])
    _wait(runner)


def _draft(runner: GraphModelRunner, levels: int, count: int) -> None:
    drafting = runner.speculator.drafting
    drafting.run_idle(min(count, runner.max_num_reqs), levels)
    _wait(runner)


def _wait(runner: GraphModelRunner) -> None:
    if runner.device.type != "cpu":
        torch.accelerator.synchronize()
