"""Triton kernels of ``ops.ngram``: occurrences of a text's last tokens, and the copies of what followed them."""

import triton
import triton.language as tl

from vllm_gsd.method import constants
from vllm_gsd.ops.growth.triton import (
    COPIES,
    DEPTH,
    DRAFT,
    LENGTH,
    ORIGIN,
    PARENT,
    SIZE,
    SLOT,
    STATES,
    TARGET,
    TOKEN,
    store_nodes,
)

COPIED, AGREED = tl.constexpr(constants.ORIGIN_NGRAM), tl.constexpr(constants.ORIGIN_AGREED)
SHARED = tl.constexpr(constants.ORIGIN_SHARED)
MAX_MATCH = tl.constexpr(constants.MAX_MATCH)


@triton.jit(do_not_specialize=["text_row", "min_match", "count"])
def match_kernel(
    ranks, state, texts, text_row, min_match, count, COUNT: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (graphs, parts of a text). A part's best occurrences, in no order; see ``ops.ngram.api``."""
    graph, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    state += graph * STATES
    length = tl.load(state + LENGTH)
    text = texts + tl.maximum(tl.load(state + SLOT), 0).to(tl.int64) * text_row
    place = tl.arange(0, COUNT)
    kept = tl.zeros([COUNT], tl.int64)
    size = tl.cdiv(length, PARTS)
    end = tl.where(tl.load(state + COPIES) > 0, tl.minimum((part + 1) * size, length - 1), 0)
    for start in range(part * size, end, BLOCK):
        last = start + tl.arange(0, BLOCK)
        alive = last < end
        matched = tl.zeros([BLOCK], tl.int64)
        back = 0
        while (back < MAX_MATCH) & (tl.max(alive.to(tl.int32), 0) > 0):
            alive = alive & (last >= back)
            ours = tl.load(text + length - 1 - back, mask=back < length, other=-1)
            alive = alive & (tl.load(text + last - back, mask=alive, other=-1) == ours)
            matched += alive.to(tl.int64)
            back += 1
        # Longer matches come first, and among equal ones later occurrences. No two ranks are equal.
        rank = tl.where(matched >= min_match, (matched << 32) + last + 1, 0)
        best = tl.max(rank, 0)
        weakest = tl.min(tl.where(place < count, kept, 1 << 62), 0)
        while best > weakest:
            first = tl.min(tl.where((kept == weakest) & (place < count), place, COUNT), 0)
            kept = tl.where(place == first, best, kept)
            rank = tl.where(rank == best, 0, rank)
            best = tl.max(rank, 0)
            weakest = tl.min(tl.where(place < count, kept, 1 << 62), 0)
    tl.store(ranks + (graph * PARTS + part) * count + place, kept, mask=place < count)


@triton.jit
def _load_graph(nodes, chances, lane, size, capacity):
    """Token, parent, depth, origin, probability and survival of a graph's nodes.

    The targets of merged edges stay in memory, since registers are scarce in the largest graphs.
    """
    real = lane < size
    return (
        tl.load(nodes + TOKEN * capacity + lane, mask=real, other=-1),
        tl.load(nodes + PARENT * capacity + lane, mask=real, other=-1),
        tl.load(nodes + DEPTH * capacity + lane, mask=real, other=0),
        tl.load(nodes + ORIGIN * capacity + lane, mask=real, other=0),
        tl.load(chances + lane, mask=real, other=0.0),
        tl.load(chances + capacity + lane, mask=real, other=0.0),
    )


@triton.jit
def _copy_token(
    node, copied, chance, lane, count, capacity, targets, old, tokens, parents, depths, origins, probs, survivals,
    BLOCK, SOURCE: tl.constexpr,
):  # fmt: skip
    """One step of a copy: agree with the child of ``node`` that carries the token, or add one if there is room.

    ``targets`` points to those of the ``old`` nodes. Returns where the copy goes on, -1 without room, and what has
    changed.
    """
    child = tl.min(tl.where((parents == node) & (tokens == copied), lane, BLOCK), 0)
    missing = child == BLOCK
    # A token that the draft proposed too is wrong only if both are wrong. A new token from the request's own text gets
    # the chance that its surest copied sibling leaves.
    agreed = (lane == child) & (origins == DRAFT)
    probs = tl.where(agreed, probs + chance * (1.0 - probs), probs)
    origins = tl.where(agreed, AGREED, origins)
    if missing:
        if SOURCE == COPIED:
            chance *= 1.0 - tl.max(tl.where((parents == node) & (origins != DRAFT), probs, 0.0), 0)
        above = lane == node
        likely = tl.sum(tl.where(above, survivals, 0.0), 0) * chance
        level = tl.sum(tl.where(above, depths, 0), 0) + 1
        new = (lane == count) & (count < capacity)
        tokens = tl.where(new, copied, tokens)
        parents = tl.where(new, node, parents)
        depths = tl.where(new, level, depths)
        survivals = tl.where(new, likely, survivals)
        probs = tl.where(new, chance, probs)
        origins = tl.where(new, SOURCE, origins)
        child = count
        count = tl.minimum(count + 1, capacity)
    target = tl.load(targets + child, mask=child < old, other=-1)  # a merged edge continues as its target
    following = tl.where(child == capacity, -1, tl.where(target == -1, child, target))
    return following, count, tokens, parents, depths, origins, probs, survivals


@triton.jit(do_not_specialize=["text_row", "num_ranks", "count", "capacity"])
def graft_kernel(
    nodes, chances, state, ranks, texts, text_row, match_probs, num_ranks, count, capacity, RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (graphs). The copies walk down from the root one after the other and add missing nodes."""
    graph = tl.program_id(0).to(tl.int64)
    state += graph * STATES
    nodes += graph * 6 * capacity
    chances += graph * 2 * capacity
    lane, place = tl.arange(0, BLOCK), tl.arange(0, RANKS)
    targets = nodes + TARGET * capacity
    old = tl.load(state + SIZE)
    size = old
    tokens, parents, depths, origins, probs, survivals = _load_graph(nodes, chances, lane, size, capacity)
    length, most = tl.load(state + LENGTH), tl.load(state + COPIES)
    text = texts + tl.maximum(tl.load(state + SLOT), 0).to(tl.int64) * text_row
    rank = tl.load(ranks + graph * num_ranks + place, mask=place < num_ranks, other=0)
    for _ in range(0, tl.where(most > 0, count, 0)):
        best = tl.max(rank, 0)
        rank = tl.where(rank == best, 0, rank)
        start, matched = (best & 0xFFFFFFFF).to(tl.int32), (best >> 32).to(tl.int32)
        steps = tl.where(best > 0, tl.minimum(most, length - start), 0)
        node, step = start * 0, 0
        while step < steps:
            chance = tl.load(match_probs + tl.minimum(matched + step, MAX_MATCH))
            node, size, tokens, parents, depths, origins, probs, survivals = _copy_token(
                node, tl.load(text + start + step), chance, lane, size, capacity, targets, old, tokens, parents, depths,
                origins, probs, survivals, BLOCK, COPIED,
            )  # fmt: skip
            step = tl.where(node >= 0, step + 1, steps)
    target = tl.load(targets + lane, mask=lane < old, other=-1)
    store_nodes(nodes, chances, capacity, lane, lane < size, tokens, parents, depths, origins, target, probs, survivals)
    tl.store(state + SIZE, size)


@triton.jit(do_not_specialize=["text_row", "places", "capacity"], do_not_specialize_on_alignment=["trees"])
def graft_tree_kernel(
    nodes, chances, state, trees, texts, text_row, match_probs, places, capacity, PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (graphs). The tree below the node that the text has reached since the look-up; see ``ops.ngram.api``."""
    graph = tl.program_id(0).to(tl.int64)
    state += graph * STATES
    nodes += graph * 6 * capacity
    chances += graph * 2 * capacity
    trees += graph * (3 + 3 * places)
    lane, place = tl.arange(0, BLOCK), tl.arange(0, PLACES)
    count, known, matched = tl.minimum(tl.load(trees), places), tl.load(trees + 1), tl.load(trees + 2)
    listed, parent_of, share_of = trees + 3, trees + 3 + places, trees + 3 + 2 * places
    copied = tl.load(listed + place, mask=place < count, other=-1)
    above = tl.load(parent_of + place, mask=place < count, other=PLACES)
    text = texts + tl.maximum(tl.load(state + SLOT), 0).to(tl.int64) * text_row
    length = tl.where(count > 0, tl.load(state + LENGTH), known)
    reached, at = count * 0, known
    while at < length:
        found = tl.min(tl.where((above == reached) & (copied == tl.load(text + at)), place, PLACES), 0)
        at = tl.where(found < PLACES, at + 1, length)
        reached = tl.where(found < PLACES, found, PLACES + 1)  # a place that nothing is below
    targets = nodes + TARGET * capacity
    old = tl.load(state + SIZE)
    size = old
    tokens, parents, depths, origins, probs, survivals = _load_graph(nodes, chances, lane, size, capacity)
    held = tl.full([PLACES], -1, tl.int32)  # the graph's node for each place of the tree
    for number in range(1, count):
        parent = tl.load(parent_of + number)
        node = tl.where(parent == reached, 0, tl.max(tl.where(place == parent, held, -1), 0))
        if node >= 0:
            share = tl.load(share_of + number).to(tl.float32, bitcast=True)
            before = tl.load(share_of + parent).to(tl.float32, bitcast=True)
            level = tl.sum(tl.where(lane == node, depths, 0), 0)
            sure = tl.load(match_probs + tl.minimum(matched + length - known + level, MAX_MATCH))
            chance = tl.div_rn(sure * share, before)
            following, size, tokens, parents, depths, origins, probs, survivals = _copy_token(
                node, tl.load(listed + number), chance, lane, size, capacity, targets, old, tokens, parents, depths,
                origins, probs, survivals, BLOCK, SHARED,
            )  # fmt: skip
            held = tl.where(place == number, following, held)
    target = tl.load(targets + lane, mask=lane < old, other=-1)
    store_nodes(nodes, chances, capacity, lane, lane < size, tokens, parents, depths, origins, target, probs, survivals)
    tl.store(state + SIZE, size)
