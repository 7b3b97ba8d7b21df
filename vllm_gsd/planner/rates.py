"""The planner's sums: tokens per millisecond by what is drafted and verified. Sums run best node first, one by one."""

import numpy as np

# Milliseconds: the target's and the draft's forwards by rows (float64 [n]), attention of a row to a token of context,
# what a node takes beyond the forward, and what a draft level does.
Tables = tuple[np.ndarray, np.ndarray, float, float, float]


def read(table: np.ndarray, rows: np.ndarray | float) -> np.ndarray:
    """Milliseconds at ``rows`` (whole or not) of a table by number of rows; beyond it its last slope goes on."""
    last = len(table) - 1
    low = np.minimum(np.asarray(rows).astype(np.int64), last - 1)
    return table[low] + (rows - low) * (table[low + 1] - table[low])


def drafts_ms(tables: Tables, rows: np.ndarray, share: np.ndarray) -> float:
    """Milliseconds of draft levels over ``rows`` float64 [n] rows, each run in that ``share`` [n] of steps."""
    total = 0.0
    for level in range(len(rows)):
        total += float(share[level] * (read(tables[1], rows[level]) + tables[4]))
    return total


def best_rate(tables: Tables, num_requests: int, context: float, spent: float, chances: np.ndarray) -> float:
    """Most tokens per millisecond over the numbers of nodes to verify, best first; 0 without nodes.

    Args:
        tables: of ``Costs``, and what a node and a draft level take beyond them.
        context: tokens of all requests together.
        spent: milliseconds of the step beside the target's forward.
        chances: float64 [n] of the nodes, in any order.
    """
    target, _, attention, node_ms, _ = tables
    tokens = _added_up(num_requests, np.sort(chances)[::-1])[1:]
    count = np.arange(1, len(chances) + 1)
    attended = context * (1.0 + count / num_requests)
    took = spent + read(target, num_requests + count) + node_ms * count + attention * attended
    return float((tokens / took).max(initial=0.0))


def drafts_rate(
    tables: Tables,
    num_requests: int,
    context: float,
    spent: float,
    found: np.ndarray,
    left: float,
    num_drafted: int,
    worth: np.ndarray,
    levels: np.ndarray,
    share: np.ndarray,
) -> float:
    """``best_rate`` after drafting as it usually goes.

    Args:
        tables, num_requests, context, spent: as for ``best_rate``, without the draft levels.
        found: float64 [n], chances of the nodes that are there without a draft.
        left: mean chance that the target leaves those at the root.
        num_drafted: requests to draft for.
        worth: of ``level_size``; levels, share: float64 [n], rows of each level for each of those requests, and in how
            many of the steps it is run.
    """
    spent += drafts_ms(tables, num_drafted * levels, share)
    chances = np.concatenate((found, np.repeat(left * worth, num_drafted)))
    return best_rate(tables, num_requests, context, spent, chances)


def follow_children(children: np.ndarray, probs: np.ndarray, weight: float) -> None:
    """Let ``children`` float64 [k] follow the mean over rows of ``probs`` float [rows, k], by the newest's weight."""
    children += weight * (_sum_of_rows(probs) / len(probs) - children)


def follow_graphs(
    worth: np.ndarray,
    levels: np.ndarray,
    share: np.ndarray,
    values: np.ndarray,
    size: np.ndarray,
    chosen: np.ndarray,
    rows: np.ndarray,
    num_drafted: int,
    weight: float,
) -> None:
    """Let what is known of drafted graphs follow those of this step.

    Args:
        worth, levels, share: updated; as for ``drafts_rate``.
        values, size: as for ``best_nodes``; chosen: bool [num_graphs], the drafted ones, at least one.
        rows: int64 [levels run], rows of each; num_drafted: requests drafted for.
        weight: of the newest.
    """
    seen = np.zeros((len(size), len(worth)))
    width = min(seen.shape[1], values.shape[1])
    seen[:, :width] = np.where(np.arange(width) < size[:, None], values[:, :width], 0.0)
    worth += weight * (_sum_of_rows(seen[chosen]) / np.count_nonzero(chosen) - worth)
    rows = rows[: len(levels)]
    run = np.arange(len(levels)) < len(rows)
    if len(rows):
        levels[run] += weight * (rows / num_drafted - levels[run])
    share[run] += weight * (1.0 - share[run])
    share[~run] -= weight * share[~run]


def level_size(
    tables: Tables,
    num_requests: int,
    context: float,
    plain: float,
    spent: float,
    worth: np.ndarray,
    num_drafted: int,
    values: np.ndarray,
    children: np.ndarray,
) -> int:
    """How many nodes to draft from, best first; 0 if the level would bring less than the rest of the step for its time.

    Args:
        tables, num_requests, context, spent: as for ``best_rate``, without the level.
        plain: tokens per millisecond without speculation.
        worth: float64 [num_nodes], chances of the best, second best... node of a drafted request's graph.
        num_drafted: requests drafted for.
        values: float64 [n >= 1], chances of the nodes; children: float64 [k], those of a node's children.
    """
    target, draft, attention, node_ms, level_ms = tables
    rate = max(plain, best_rate(tables, num_requests, context, spent, np.repeat(worth, num_drafted)))
    more = min(len(values) * len(children), max(1, num_drafted) * len(worth))
    # Verifying a child costs its row; children below that are not verified.
    row_ms = (read(target, num_requests + more) - read(target, num_requests)) / more
    row_ms += node_ms + attention * context / num_requests
    surplus = np.maximum(np.outer(np.sort(values)[::-1], children) - rate * row_ms, 0.0)
    gain = _added_up(0.0, surplus.ravel())[len(children) :: len(children)]
    gain -= rate * (read(draft, np.arange(1, len(values) + 1)) + level_ms)
    best = int(gain.argmax())
    return best + 1 if gain[best] >= 0.0 else 0


def best_nodes(
    tables: Tables,
    num_requests: int,
    total: float,
    values: np.ndarray,
    size: np.ndarray,
    context: np.ndarray,
    spent: float,
    graph: float,
) -> np.ndarray:
    """The number of nodes of each graph that gives the most tokens per millisecond, over the whole batch.

    Args:
        tables, num_requests: as for ``best_rate``; total: tokens of all requests together.
        values: float32 [num_graphs, max_nodes], chances, falling along a row.
        size: int32 [num_graphs], nodes there are.
        context: int64 [num_graphs], tokens of each graph's request.
        spent: milliseconds of the step beside the target's forward; graph: more of them with nodes.

    Returns:
        int32 [num_graphs].
    """
    target, _, attention, node_ms, _ = tables
    owner, place = np.nonzero(np.arange(values.shape[1]) < size[:, None])
    chances = values[owner, place].astype(np.float64)
    order = np.argsort(-chances, kind="stable")
    owner, chances = owner[order], chances[order]
    count = np.arange(len(chances) + 1)
    tokens = _added_up(num_requests, chances)
    attended = _added_up(total, context[owner])
    forward = read(target, num_requests + count) + node_ms * count + attention * attended
    rate = tokens / (spent + forward + graph * (count > 0))
    return np.bincount(owner[: rate.argmax()], minlength=len(size)).astype(np.int32)


def _added_up(first: float, values: np.ndarray) -> np.ndarray:
    """``first``, and what it is after each of the n values has been added, float64 [n + 1]."""
    return np.cumsum(np.concatenate(([first], values)), dtype=np.float64)


def _sum_of_rows(values: np.ndarray) -> np.ndarray:
    """Sum over the rows of ``values`` [rows >= 1, k], one after the other, float64 [k]."""
    return np.cumsum(values, axis=0, dtype=np.float64)[-1]
