"""Tokens per millisecond as a function of drafted and verified nodes. Sums add node by node, best first."""

import numpy as np

# Milliseconds: forwards of the target and of the draft by rows (float64 [n]), attention of a row to a token of context,
# and the overheads of a node and of a draft level.
Tables = tuple[np.ndarray, np.ndarray, float, float, float]


def read(table: np.ndarray, rows: np.ndarray | float) -> np.ndarray:
    """Interpolate a table of milliseconds at ``rows``; extrapolate with its last slope."""
    last = len(table) - 1
    low = np.minimum(np.asarray(rows).astype(np.int64), last - 1)
    return table[low] + (rows - low) * (table[low + 1] - table[low])


def drafts_ms(tables: Tables, rows: np.ndarray, share: np.ndarray) -> float:
    """Expected milliseconds of draft levels with ``rows`` float64 [n], each run in a ``share`` [n] of steps."""
    total = 0.0
    for level in range(len(rows)):
        total += float(share[level] * (read(tables[1], rows[level]) + tables[4]))
    return total


def best_rate(tables: Tables, num_requests: int, context: float, spent: float, chances: np.ndarray) -> float:
    """The maximum of tokens per millisecond over the number of nodes to verify, best first; 0 without nodes.

    Args:
        tables: see ``Tables``.
        context: total number of tokens of all requests.
        spent: milliseconds of the step without the target's forward.
        chances: float64 [n], probabilities of the nodes, in any order.
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
    """``best_rate`` after an average drafting.

    Args:
        tables, num_requests, context, spent: as for ``best_rate``, without the draft levels.
        found: float64 [n], probabilities of the nodes that other sources have found.
        left: mean probability that the target accepts none of these nodes.
        num_drafted: number of requests to draft for.
        worth: as for ``level_size``.
        levels, share: float64 [n], rows of each level per drafted request, and share of steps that run the level.
    """
    spent += drafts_ms(tables, num_drafted * levels, share)
    chances = np.concatenate((found, np.repeat(left * worth, num_drafted)))
    return best_rate(tables, num_requests, context, spent, chances)


def follow_children(children: np.ndarray, probs: np.ndarray, weight: float) -> None:
    """Update the running average ``children`` float64 [k] by the mean over rows of ``probs`` float [rows, k]."""
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
    """Update the running averages of drafted graphs by those of this step.

    Args:
        worth, levels, share: updated; as for ``drafts_rate``.
        values, size: as for ``best_nodes``.
        chosen: bool [num_graphs], the drafted graphs, at least one.
        rows: int64 [levels run], rows of each level; num_drafted: number of requests drafted for.
        weight: weight of this step.
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
    """Number of nodes to expand, best first; 0 if the level would yield fewer tokens for its time than the step.

    Args:
        tables, num_requests, context, spent: as for ``best_rate``, without the level.
        plain: tokens per millisecond without speculation.
        worth: float64 [num_nodes], probabilities of the best, second best... node of a drafted request's graph.
        num_drafted: number of requests drafted for.
        values: float64 [n >= 1], probabilities of the nodes.
        children: float64 [k], conditional probabilities of a node's children.
    """
    target, draft, attention, node_ms, level_ms = tables
    rate = max(plain, best_rate(tables, num_requests, context, spent, np.repeat(worth, num_drafted)))
    more = min(len(values) * len(children), max(1, num_drafted) * len(worth))
    # Verifying a child costs a row; children that yield less are not verified.
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
    """The number of nodes of each graph that gives the most tokens per millisecond over the whole batch.

    Args:
        tables, num_requests: as for ``best_rate``; total: total number of tokens of all requests.
        values: float32 [num_graphs, max_nodes], probabilities, descending along a row.
        size: int32 [num_graphs], number of nodes.
        context: int64 [num_graphs], tokens of each graph's request.
        spent: milliseconds of the step without the target's forward; graph: additional ones if nodes are verified.

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
    """Running sums of the n values, starting with ``first``, float64 [n + 1]."""
    return np.cumsum(np.concatenate(([first], values)), dtype=np.float64)


def _sum_of_rows(values: np.ndarray) -> np.ndarray:
    """Sum of the rows of ``values`` [rows >= 1, k], added one after the other, float64 [k]."""
    return np.cumsum(values, axis=0, dtype=np.float64)[-1]
