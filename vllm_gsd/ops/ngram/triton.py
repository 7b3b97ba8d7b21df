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
)

COPIED, AGREED = tl.constexpr(constants.ORIGIN_NGRAM), tl.constexpr(constants.ORIGIN_AGREED)
MAX_MATCH = tl.constexpr(constants.MAX_MATCH)


@triton.jit
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
def _copy_token(node, copied, chance, lane, count, capacity, tokens, parents, depths, probs, survivals, origins, BLOCK):
    """One step of a copy: agree with the child of ``node`` that carries the token, or add one if there is room."""
    child = tl.min(tl.where((parents == node) & (tokens == copied), lane, BLOCK), 0)
    missing = child == BLOCK
    # A token that the draft proposed too is wrong only if both are wrong. A new token gets the chance that its surest
    # copied sibling leaves.
    agreed = (lane == child) & (origins == DRAFT)
    probs = tl.where(agreed, probs + chance * (1.0 - probs), probs)
    origins = tl.where(agreed, AGREED, origins)
    if missing:
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
        origins = tl.where(new, COPIED, origins)
        child = count
        count = tl.minimum(count + 1, capacity)
    return child, count, tokens, parents, depths, probs, survivals, origins


@triton.jit
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
    size = tl.load(state + SIZE)
    real = lane < size
    tokens = tl.load(nodes + TOKEN * capacity + lane, mask=real, other=-1)
    parents = tl.load(nodes + PARENT * capacity + lane, mask=real, other=-1)
    depths = tl.load(nodes + DEPTH * capacity + lane, mask=real, other=0)
    origins = tl.load(nodes + ORIGIN * capacity + lane, mask=real, other=0)
    targets = tl.load(nodes + TARGET * capacity + lane, mask=real, other=-1)
    probs = tl.load(chances + lane, mask=real, other=0.0)
    survivals = tl.load(chances + capacity + lane, mask=real, other=0.0)
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
            child, size, tokens, parents, depths, probs, survivals, origins = _copy_token(
                node, tl.load(text + start + step), chance, lane, size, capacity, tokens, parents, depths, probs,
                survivals, origins, BLOCK,
            )  # fmt: skip
            # A merged edge continues as its target. Where a node found no room, the copy ends.
            target = tl.sum(tl.where(lane == child, targets, 0), 0)
            node = tl.where(target == -1, child, target)
            step = tl.where(child < capacity, step + 1, steps)
    real = lane < size
    tl.store(nodes + TOKEN * capacity + lane, tokens, mask=real)
    tl.store(nodes + PARENT * capacity + lane, parents, mask=real)
    tl.store(nodes + DEPTH * capacity + lane, depths, mask=real)
    tl.store(nodes + ORIGIN * capacity + lane, origins, mask=real)
    tl.store(nodes + TARGET * capacity + lane, targets, mask=real)
    tl.store(chances + lane, probs, mask=real)
    tl.store(chances + capacity + lane, survivals, mask=real)
    tl.store(state + SIZE, size)
