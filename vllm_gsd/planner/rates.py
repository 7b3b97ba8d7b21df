"""The planner's sums, compiled: they are made several times a step, over all nodes of the batch."""

import numpy as np

from vllm_gsd.method.compiled import compiled


@compiled
def read(table, rows):
    """Milliseconds at ``rows`` (whole or not) of a table by number of rows; beyond it its last slope goes on."""
    last = len(table) - 1
    low = min(int(rows), last - 1)
    return table[low] + (rows - low) * (table[low + 1] - table[low])


@compiled
def drafts_ms(tables, rows, share):
    """Milliseconds of draft levels over ``rows`` float64 [n] rows, each run in that ``share`` [n] of steps."""
    total = 0.0
    for level in range(len(rows)):
        total += share[level] * (read(tables[1], rows[level]) + tables[4])
    return total


@compiled
def best_rate(tables, num_requests, context, spent, chances):
    """Most tokens per millisecond over the numbers of nodes to verify, best first; 0 without nodes.

    Args:
        tables: of ``Costs``, and what a node and a draft level take beyond them, milliseconds.
        context: tokens of all requests together.
        spent: milliseconds of the step beside the target's forward.
        chances: float64 [n] of the nodes, in any order.
    """
    target, _, attention, node_ms, _ = tables
    best, tokens = 0.0, float(num_requests)
    falling = np.sort(chances)[::-1]
    for count in range(1, len(falling) + 1):
        tokens += falling[count - 1]
        attended = context * (1.0 + count / num_requests)
        took = spent + read(target, num_requests + count) + node_ms * count + attention * attended
        best = max(best, tokens / took)
    return best


@compiled
def drafts_rate(tables, num_requests, context, spent, found, left, num_drafted, worth, levels, share):
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


@compiled
def follow_children(children, probs, weight):
    """Let ``children`` float64 [k] follow the mean over rows of ``probs`` float [rows, k], by the newest's weight."""
    for child in range(len(children)):
        total = 0.0
        for row in range(len(probs)):
            total += probs[row, child]
        children[child] += weight * (total / len(probs) - children[child])


@compiled
def follow_graphs(worth, levels, share, values, size, chosen, rows, num_drafted, weight):
    """Let what is known of drafted graphs follow those of this step.

    Args:
        worth, levels, share: updated; as for ``drafts_rate``.
        values, size: as for ``best_nodes``; chosen: bool [num_graphs], the drafted ones, at least one.
        rows: int64 [levels run], rows of each; num_drafted: requests drafted for.
        weight: of the newest.
    """
    count = 0
    for graph in range(len(size)):
        count += chosen[graph]
    for place in range(len(worth)):
        total = 0.0
        for graph in range(len(size)):
            if chosen[graph] and place < size[graph]:
                total += values[graph, place]
        worth[place] += weight * (total / count - worth[place])
    for level in range(len(levels)):
        if level < len(rows):
            levels[level] += weight * (rows[level] / num_drafted - levels[level])
            share[level] += weight * (1.0 - share[level])
        else:
            share[level] -= weight * share[level]


@compiled
def level_size(tables, num_requests, context, plain, spent, worth, num_drafted, values, children):
    """How many nodes to draft from, best first; 0 if the level would bring less than the rest of the step for its time.

    Args:
        tables, num_requests, context, spent: as for ``best_rate``, without the level.
        plain: tokens per millisecond without speculation.
        worth: float64 [num_nodes], chances of the best, second best... node of a drafted request's graph.
        num_drafted: requests drafted for.
        values: float64 [n], chances of the nodes; children: float64 [k], those of a node's children.
    """
    target, draft, attention, node_ms, level_ms = tables
    rate = max(plain, best_rate(tables, num_requests, context, spent, np.repeat(worth, num_drafted)))
    falling = np.sort(values)[::-1]
    more = min(len(values) * len(children), max(1, num_drafted) * len(worth))
    # Verifying a child costs its row; children below that are not verified.
    row_ms = (read(target, num_requests + more) - read(target, num_requests)) / more
    row_ms += node_ms + attention * context / num_requests
    best, size, surplus = 0.0, 0, 0.0
    for count in range(1, len(falling) + 1):
        for child in children:
            surplus += max(falling[count - 1] * child - rate * row_ms, 0.0)
        gain = surplus - rate * (read(draft, count) + level_ms)
        if gain > best or (size == 0 and gain == best):
            best, size = gain, count
    return size


@compiled
def best_nodes(tables, num_requests, total, values, size, context, spent, graph):
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
    chances = np.empty(size.sum(), np.float64)
    owner = np.empty(len(chances), np.int64)
    filled = 0
    for graph_index in range(len(size)):
        for place in range(size[graph_index]):
            chances[filled] = values[graph_index, place]
            owner[filled] = graph_index
            filled += 1
    order = np.argsort(-chances, kind="mergesort")
    tokens, attended = float(num_requests), float(total)
    forward = read(target, num_requests) + attention * attended
    best, best_count = tokens / (spent + forward), 0
    for count in range(1, len(order) + 1):
        node = order[count - 1]
        tokens += chances[node]
        attended += context[owner[node]]
        forward = read(target, num_requests + count) + node_ms * count + attention * attended
        rate = tokens / (spent + forward + graph)
        if rate > best:
            best, best_count = rate, count
    chosen = np.zeros(len(size), np.int32)
    for node in order[:best_count]:
        chosen[owner[node]] += 1
    return chosen
