"""Measures this machine's cost table for the planner, in a few seconds after the models are loaded."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_gsd.engine.attention.layers import window_of
from vllm_gsd.engine.attention.tree_rows import TreeRows
from vllm_gsd.engine.parallel.ranks import from_first_rank
from vllm_gsd.planner.costs import Costs, convex, rising

if TYPE_CHECKING:
    from vllm.config import ModelConfig

    from vllm_gsd.engine.draft.drafter import Drafter
    from vllm_gsd.engine.v1.model_runner import GraphModelRunner

logger = init_logger("vllm.gsd")

# Numbers of rows at which forward passes are timed, up to the most rows of a step.
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256)
# The measurement stops early if it has taken this long.
MOST_SECONDS = 6.0
# Functions are timed at least this often, and more often if all of them together take less than this long.
LEAST_TURNS, LONG_SECONDS = 2, 0.1
# The number of rows, and the short and the long context, with which the target's attention is timed.
TREE_SIZE, CONTEXTS = 9, (32, 1024)
# Draft levels that are timed together, because the first level of a step finds the draft's weights in no cache.
LEVELS = 2
# Idle rows take tokens of the vocabulary that are this far apart: a prime, so that tokens repeat late.
TOKEN_STRIDE = 7919


@torch.inference_mode()
def measure_costs(runner: GraphModelRunner, drafter: Drafter | None) -> Costs:
    """Time the target's forward pass, a draft level and tree attention, once the KV cache is allocated."""
    most = max(2, min(runner.max_num_tokens, runner.max_num_reqs * (runner.speculation.num_nodes + 1)))
    # A draft of whole blocks has this many rows for one request. Others have one.
    known = {*ROWS, runner.speculation.planner.first_rows}
    rows = sorted({*(count for count in known if count < most), min(most, ROWS[-1])})
    levels = [] if drafter is None else [partial(_draft_levels, drafter)]
    rows, (target, *drafts) = time_by_rows(rows, partial(_target_forward, runner), *levels)
    draft = drafts[0] / LEVELS if drafts else np.zeros_like(target)
    costs = Costs(
        rows=np.array(rows, np.int64),
        target=from_first_rank(_fit(runner.model_config)(np.array(rows), target)),
        draft=from_first_rank(_fit(drafter and drafter.model.model_config)(np.array(rows), draft)),
        attention=float(from_first_rank(np.array([_attention_ms(runner)]))[0]),
    )
    last = len(rows) - 1
    logger.info(
        "gsd: a target step takes %.1f ms for 1 row and %.1f ms for %d rows, a draft level %.1f and %.1f ms; "
        "attention to 1,000 tokens takes %.2f ms per row.",
        *(target[0], target[last], rows[last], draft[0], draft[last], 1000 * costs.attention),
    )
    return costs


def idle_tokens(count: int, vocab_size: int, turn: int) -> torch.Tensor:
    """Different tokens for the rows of an idle run, and others in the next turn, int32 [count].

    A mixture of experts reads the weights of the experts that its tokens choose, so equal tokens would look cheap.
    """
    return ((torch.arange(count) + turn * count) * TOKEN_STRIDE % vocab_size).to(torch.int32)


def _fit(model: ModelConfig | None) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """How the times of a model are fitted."""
    return rising if model is not None and model.is_moe else convex


def _draft_levels(drafter: Drafter, num_rows: int) -> None:
    for _ in range(LEVELS):
        drafter.idle_level(num_rows)


def _target_forward(runner: GraphModelRunner, num_rows: int) -> None:
    """Run the target as a step does: the idle run lacks attention, which is added here."""
    runner.run_idle(num_rows)
    attend = _attention(runner.target_kv.layers[0], min(num_rows, runner.speculation.num_nodes + 1), CONTEXTS[0])
    # The requests of a batch attend separately, so their times add up.
    for _ in range(len(runner.target_kv.layers) * -(-num_rows // (runner.speculation.num_nodes + 1))):
        attend()


def _attention_ms(runner: GraphModelRunner) -> float:
    """Milliseconds that one more token of context costs one row, over all target layers."""
    layers = runner.target_kv.layers
    room = layers[0].kv_cache.shape[2] * layers[0].kv_cache.shape[0]
    short, long = (min(context, room - TREE_SIZE, runner.max_model_len - TREE_SIZE) for context in CONTEXTS)
    if long <= short:
        return 0.0
    # Layers with a sliding window read less of a long context than others.
    windows, added = [window_of(layer.impl) for layer in layers], 0.0
    for window in dict.fromkeys(windows):
        layer = layers[windows.index(window)]
        times = usual_ms([_attention(layer, TREE_SIZE, context) for context in (short, long)])
        added += max(0.0, times[1] - times[0]) * windows.count(window)
    return added / (TREE_SIZE * (long - short))


def _attention(layer: Any, num_rows: int, context: int) -> Callable[[], None]:
    """A function that runs a layer's attention for ``num_rows`` rows of a request with ``context`` tokens."""
    block_size = layer.kv_cache.shape[2]
    num_blocks = -(-(context + num_rows) // block_size)
    tree = TreeRows(
        query_start_loc=torch.tensor([0, num_rows], dtype=torch.int32),
        prefix_lens=torch.tensor([context], dtype=torch.int32),
        block_table=(torch.arange(num_blocks, dtype=torch.int32) % layer.kv_cache.shape[0])[None],
        positions=torch.full((num_rows,), context, dtype=torch.int64),
        mask=torch.ones((num_rows, -(-num_rows // 64)), dtype=torch.int64),
    )
    query = torch.zeros((num_rows, layer.num_heads, layer.head_size), dtype=layer.kv_cache.dtype)
    return partial(layer.impl._tree, layer, query, layer.kv_cache, tree, torch.empty_like(query))


def time_by_rows(rows: list[int], *runs: Callable[[int], object]) -> tuple[list[int], np.ndarray]:
    """Time functions over rising numbers of rows, until ``MOST_SECONDS`` are over.

    They take turns, as in a step: a draft then finds the target's weights in the caches, and drifts of the clock speed
    affect all alike.

    Returns:
        the numbers of rows that were timed, at least two, since ``Costs`` extrapolates with the last slope; the times
        in milliseconds, float64 [len(runs), len(rows)].
    """
    times = np.zeros((len(runs), len(rows)))
    started = time.perf_counter()
    for place, count in enumerate(rows):
        times[:, place] = usual_ms([partial(run, count) for run in runs], count)
        spent = from_first_rank(np.array([time.perf_counter() - started]))[0]
        if place > 0 and spent > MOST_SECONDS:
            return rows[: place + 1], times[:, : place + 1]
    return rows, times


def usual_ms(runs: list[Callable[[], object]], rows: int = 1) -> list[float]:
    """The lower quartile of each function's time in milliseconds; other load on the machine only adds to a time."""
    turns: list[list[float]] = []
    while len(turns) < 1 + (8 if rows <= 32 else 4):
        turn = []
        for run in runs:
            start = time.perf_counter()
            run()
            turn.append(time.perf_counter() - start)
        turns.append(turn)
        # What takes long varies less, and a table of a few numbers of rows says little about the others.
        if len(turns) > LEAST_TURNS and from_first_rank(np.array([sum(turn)]))[0] > LONG_SECONDS:
            break
    return [1e3 * float(value) for value in np.quantile(turns[1:], 0.25, axis=0)]  # the first turn warms the caches
