"""The cost table of this machine, measured once the models are loaded; takes a few seconds."""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_gsd.engine.attention.tree_rows import TreeRows
from vllm_gsd.engine.parallel.ranks import from_first_rank
from vllm_gsd.planner.costs import Costs, convex

logger = init_logger("vllm.gsd")

# Rows at which the forwards are timed, as far as a step of the engine can have them.
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256)
# The table is cut short on a machine that takes longer for it.
MOST_SECONDS = 6.0
# Rows at which the target's attention is timed, and a short and a long context.
TREE_SIZE, CONTEXTS = 9, (32, 1024)
# Draft levels that are timed together: the first of a step finds none of the draft's weights in the caches.
LEVELS = 2


@torch.inference_mode()
def measure_costs(runner, drafter) -> Costs:
    """Time target forwards, draft levels and tree attention.

    Args:
        runner: the model runner, its KV cache allocated.
        drafter: the ``Drafter``, or None.
    """
    most = max(2, min(runner.max_num_tokens, runner.max_num_reqs * (runner.drafter.num_nodes + 1)))
    rows = sorted({*(count for count in ROWS if count < most), min(most, ROWS[-1])})
    target: list[float] = []
    draft: list[float] = []
    started = time.perf_counter()
    for count in rows:
        # In turns, as a step runs them: levels find the caches full of the target's weights, and a machine whose speed
        # drifts is at one speed for both.
        runs: list[Callable[[], object]] = [partial(_target_forward, runner, count)]
        if drafter is not None:
            runs.append(partial(_draft_levels, drafter, count))
        took_target, *took_levels = _usual_ms(runs, count)
        target.append(took_target)
        draft.append(took_levels[0] / LEVELS if took_levels else 0.0)
        took = from_first_rank(np.array([time.perf_counter() - started]))[0]
        if len(target) > 1 and took > MOST_SECONDS:
            rows = rows[: len(target)]  # beyond them ``Costs`` goes on with the last slope
            break
    costs = Costs(
        rows=np.array(rows, np.int64),
        target=from_first_rank(convex(np.array(rows), np.array(target))),
        draft=from_first_rank(convex(np.array(rows), np.array(draft))),
        attention=float(from_first_rank(np.array([_attention_ms(runner)]))[0]),
    )
    last = len(rows) - 1
    logger.info(
        "gsd: a target step takes %.1f ms for 1 row and %.1f ms for %d, a draft level %.1f and %.1f ms; "
        "attending 1,000 tokens takes a row %.2f ms.",
        *(target[0], target[last], rows[last], draft[0], draft[last], 1000 * costs.attention),
    )
    return costs


def _draft_levels(drafter, num_rows: int) -> None:
    for _ in range(LEVELS):
        drafter.model.candidates(drafter.model.run_idle(num_rows), drafter.config.top_k)


def _target_forward(runner, num_rows: int) -> None:
    """What a step runs of the target: the idle run has no attention."""
    runner.run_idle(num_rows)
    attend = _attention(runner, min(num_rows, runner.drafter.num_nodes + 1), CONTEXTS[0])
    # Requests of a batch attend apart, and take about as long as many.
    for _ in range(len(runner.target_kv.layers) * -(-num_rows // (runner.drafter.num_nodes + 1))):
        attend()


def _attention_ms(runner) -> float:
    """Milliseconds that one row's attention to one further token of context takes, over all target layers."""
    layer = runner.target_kv.layers[0]
    room = layer.kv_cache.shape[2] * layer.kv_cache.shape[0]
    short, long = (min(context, room - TREE_SIZE, runner.max_model_len - TREE_SIZE) for context in CONTEXTS)
    if long <= short:
        return 0.0
    times = _usual_ms([_attention(runner, TREE_SIZE, context) for context in (short, long)])
    return max(0.0, times[1] - times[0]) * len(runner.target_kv.layers) / (TREE_SIZE * (long - short))


def _attention(runner, num_rows: int, context: int) -> Callable[[], None]:
    """One layer's attention of ``num_rows`` rows of a request to ``context`` tokens, to be run."""
    layer = runner.target_kv.layers[0]
    block_size = layer.kv_cache.shape[2]
    num_blocks = -(-(context + num_rows) // block_size)
    tree = TreeRows(
        query_start_loc=torch.tensor([0, num_rows], dtype=torch.int32),
        prefix_lens=torch.tensor([context], dtype=torch.int32),
        block_table=(torch.arange(num_blocks, dtype=torch.int32) % layer.kv_cache.shape[0])[None],
        positions=torch.full((num_rows,), context, dtype=torch.int64),
        mask=torch.ones((num_rows, -(-num_rows // 64)), dtype=torch.int64),
        rows=None,
    )
    query = torch.zeros((num_rows, layer.num_heads, layer.head_size), dtype=layer.kv_cache.dtype)
    return partial(layer.impl._tree, layer, query, layer.kv_cache, tree, torch.empty_like(query))


def _usual_ms(runs: list[Callable[[], object]], rows: int = 1) -> list[float]:
    """Milliseconds that each takes, in turns: the lower quartile, as whatever else runs on a machine only adds."""
    times = 8 if rows <= 32 else 4
    seconds = np.empty((times + 1, len(runs)))
    for turn in seconds:
        for index, run in enumerate(runs):
            start = time.perf_counter()
            run()
            turn[index] = time.perf_counter() - start
    return [1e3 * float(value) for value in np.quantile(seconds[1:], 0.25, axis=0)]  # the first warms caches
