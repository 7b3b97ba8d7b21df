"""Measures what a step costs on Model Runner V2: the target's forward by rows, and the draft phase by requests.

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
    """Time the target's forward pass and the draft phase.

    The draft phase counts as one level whose rows are requests. Attention to the context is left to the planner's
    overhead, which has a term for it: the rows of a request read its keys and values together.

    Args:
        runner: the V2 model runner; its KV cache is allocated, and its CUDA graphs are captured.
    """
    width, drafter = runner.decode_query_len, runner.speculation.drafter
    most = max(2, min(runner.max_num_tokens, runner.max_num_reqs * width, ROWS[-1]))
    # Whole graphs of a few requests too, because full CUDA graphs hold these.
    whole = [width * count for count in ROWS]
    rows = sorted({*(count for count in (*ROWS, *whole) if count < most), most})
    rows, target, draft = time_by_rows(
        rows, partial(_target_forward, runner), None if drafter is None else partial(_draft, runner)
    )
    # Padding makes steps of the times, so they only rise.
    fitted = [from_first_rank(rising(np.array(rows), of)) for of in (target, draft)]
    logger.info(
        "gsd: a target step takes %.1f ms for 1 row and %.1f ms for %d rows, drafting %.1f ms for 1 request.",
        *(target[0], target[-1], rows[-1], draft[0]),
    )
    return Costs(np.array(rows, np.int64), target=fitted[0], draft=fitted[1], attention=0.0)


def _target_forward(runner: GraphModelRunner, num_rows: int) -> None:
    uniform = num_rows % runner.decode_query_len == 0
    hidden, _ = runner._dummy_run(num_rows, uniform_decode=uniform, randomize_inputs=True, skip_eplb=True)
    assert hidden is not None
    # With LoRA, logits read the adapter of each row.
    rows, lora = np.ones(num_rows, np.int32), runner.lora_config
    with runner.maybe_dummy_run_with_lora(lora, rows, rows, num_active_loras=lora.max_loras if lora else 0):
        runner.model.compute_logits(hidden[:num_rows])
    _wait(runner)


def _draft(runner: GraphModelRunner, count: int) -> None:
    drafting = runner.speculator.drafting
    assert drafting is not None
    drafting.run_idle(count)
    _wait(runner)


def _wait(runner: GraphModelRunner) -> None:
    if runner.device.type != "cpu":
        torch.accelerator.synchronize()
