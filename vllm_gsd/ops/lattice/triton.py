"""Triton kernel of ``ops.lattice``: a program lays one drafted block into its graph, depth by depth."""

import triton
import triton.language as tl

from vllm_gsd.ops.growth.triton import DRAFT, FRONTIER, MAX_DEPTH, SIZE, STATES, TARGET, keep_best, store_nodes


@triton.jit
def _add_depth(
    nodes, chances, counts, tokens, probs, theta_sib, theta_prob, floor, capacity, size, level, above, likely,
    K: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Add the edges of one depth; return its nodes and their survivals by candidate, and the number of nodes."""
    lane = tl.arange(0, PLACES)
    before, after = lane[:, None], lane[None, :]
    token = tl.load(tokens + lane, mask=lane < K, other=-1).to(tl.int32)
    prob = tl.load(probs + before * K + after, mask=(before < K) & (after < K), other=0.0)
    # The same by place instead of by candidate: from columns to rows.
    parent = tl.sum(tl.where(before == after, above[None, :], 0), 1)
    reached = tl.sum(tl.where(before == after, likely[None, :], 0.0), 1)
    there = (token >= 0)[None, :]
    asked = ((parent >= 0) & (reached >= tl.maximum(floor, theta_prob)))[:, None] & there
    weakest = theta_sib * tl.max(tl.where(there, prob, 0.0), 1)
    survival = reached[:, None] * prob
    strong = asked & (prob >= weakest[:, None]) & (survival > floor)
    # The best edge into each candidate, the first of equal ones, is its native node.
    peak = tl.max(tl.where(strong, survival, -1.0), 0)
    chosen = tl.min(tl.where(strong & (survival == peak[None, :]), before, PLACES), 0)
    native = chosen < PLACES
    node = size + tl.cumsum(native.to(tl.int32), 0) - 1
    native = native & (node < capacity)
    own = before == chosen[None, :]
    store_nodes(nodes, chances, capacity, node, native, token, tl.sum(tl.where(own, parent[:, None], 0), 0), level + 1,
                DRAFT, -1, tl.sum(tl.where(own, prob, 0.0), 0), peak)  # fmt: skip
    node = tl.where(native, node, -1)
    end = size + tl.sum(native.to(tl.int32), 0)
    # The other edges, parent by parent, are merged edges to it.
    merged = strong & (before != chosen[None, :]) & native[None, :]
    of_parent = tl.sum(merged.to(tl.int32), 1)
    edge = end + (tl.cumsum(of_parent, 0) - of_parent)[:, None] + tl.cumsum(merged.to(tl.int32), 1) - 1
    merged = merged & (edge < capacity)
    store_nodes(nodes, chances, capacity, edge, merged, token[None, :], parent[:, None], level + 1, DRAFT,
                node[None, :], prob, survival)  # fmt: skip
    joined = tl.sum(tl.sum(merged.to(tl.int32), 1), 0)
    end += joined
    tl.atomic_add(counts, (end - size).to(tl.int64))
    tl.atomic_add(counts + 1, joined.to(tl.int64))
    tl.atomic_add(counts + 2, (tl.sum(tl.sum(asked.to(tl.int32), 1), 0) - (end - size)).to(tl.int64))
    return node, peak, end


@triton.jit(do_not_specialize=["num_nodes", "capacity", "depth"])
def lattice_kernel(
    nodes, chances, best, state, counts, tokens, probs, theta_sib, theta_prob, num_nodes, capacity, depth,
    K: tl.constexpr, PLACES: tl.constexpr, LEVELS: tl.constexpr, BEST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (graphs). See ``ops.lattice.api.add_lattices``."""
    graph = tl.program_id(0).to(tl.int64)
    nodes += graph * 6 * capacity
    chances += graph * 2 * capacity
    best += graph * num_nodes
    state += graph * STATES
    tokens += graph * depth * K
    probs += graph * depth * K * K
    lane, level = tl.arange(0, PLACES), tl.arange(0, LEVELS)
    drafted = tl.load(state + FRONTIER) > 0
    # A sound depth reaches its first candidate from at least one of those before.
    first = tl.load(probs + level * K * K, mask=level < depth, other=1.0)
    for before in range(1, K):
        first = tl.maximum(first, tl.load(probs + (level * K + before) * K, mask=level < depth, other=1.0))
    tl.atomic_add(counts + 4, tl.sum((drafted & (first == 0.0)).to(tl.int64), 0))
    above, likely = tl.where(lane == 0, 0, -1), tl.where(lane == 0, 1.0, 0.0)  # at first, the root alone
    size = tl.load(state + SIZE)
    deepest = tl.where(drafted, tl.minimum(depth, tl.load(state + MAX_DEPTH)), 0)
    for at in range(0, deepest):
        floor = tl.load(best + num_nodes - 1)
        above, likely, end = _add_depth(nodes, chances, counts, tokens + at * K, probs + at * K * K, theta_sib,
                                        theta_prob, floor, capacity, size, at, above, likely, K, PLACES)  # fmt: skip
        tl.debug_barrier()
        keep_best(chances + capacity, nodes + TARGET * capacity, best, size, end, num_nodes,
                  tl.arange(0, PLACES * PLACES), BEST, CHUNK)  # fmt: skip
        tl.debug_barrier()
        size = end
    tl.store(state + SIZE, size)


@triton.jit(do_not_specialize=["pool", "block_stride", "row_stride", "chance_stride"])
def best_paths_kernel(
    chosen, probs, paths, scores, chances, ids, best, pool, block_stride, row_stride, chance_stride,
    MERGE: tl.constexpr, ROWS: tl.constexpr, BEFORE: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Grid (blocks). A lane holds one of the best tokens after a candidate; see ``ops.lattice.api.best_paths``."""
    block = tl.program_id(0).to(tl.int64)
    scores, chances = scores + block * block_stride, chances + block * ROWS * chance_stride
    ids, best, probs = ids + block * ROWS * K, best + block * BEFORE, probs + block * K * K
    parent, lane = tl.arange(0, PLACES), tl.arange(0, LANES)
    # By candidate before: its row of scores, the best path to it, and what turns its scores into log-probabilities.
    there = parent < BEFORE
    row = parent if ROWS > 1 else parent * 0
    known = tl.load(best + parent, mask=there, other=float("-inf"))
    top = tl.load(scores + row * row_stride + tl.load(ids + row * K, mask=there, other=0), mask=there, other=0.0)
    shift = tl.log(tl.load(chances + row * chance_stride, mask=there, other=1.0)) - top.to(tl.float32)
    left, row = lane < ROWS * K, tl.minimum(lane // K, ROWS - 1)
    token = tl.load(ids + lane, mask=left, other=0)
    first = tl.load(scores + row * row_stride + tl.load(ids + row * K)).to(tl.float32)
    value = tl.log(tl.load(chances + row * chance_stride)) - first
    value += tl.load(scores + row * row_stride + token, mask=left, other=0.0).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))
    value += tl.load(best + row) if ROWS > 1 else tl.max(known, 0)
    value = tl.where(lane == 0, 1.0, value)  # above all logarithms of probabilities
    for place in range(0, K):
        highest = tl.max(tl.where(left, value, float("-inf")), 0)
        number = tl.minimum(tl.min(tl.where(left & (value == highest), token, 1 << 62), 0), pool - 1)
        left = left & (token != number)
        edge = tl.load(scores + (parent if ROWS > 1 else parent * 0) * row_stride + number, mask=there, other=0.0)
        edge = edge.to(tl.float32) + shift
        edge = tl.where(there & (edge == edge), edge, float("-inf"))
        path = known + edge
        peak = tl.max(path, 0)
        prob = tl.exp(edge)
        if BEFORE == 1:  # every row is the root's
            prob = tl.zeros([PLACES], tl.float32) + tl.max(prob, 0)
        elif not MERGE:
            prob = tl.where(parent == tl.min(tl.where(path == peak, parent, PLACES), 0), prob, 0.0)
        tl.store(chosen + block * K + place, number)
        tl.store(paths + block * K + place, peak)
        tl.store(probs + parent * K + place, prob, mask=parent < K)
