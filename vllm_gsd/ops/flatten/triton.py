"""Triton kernel of ``ops.flatten``: a program unrolls one graph, best place first."""

import triton
import triton.language as tl

from vllm_gsd.method import constants
from vllm_gsd.ops.growth.triton import MAX_DEPTH, NUM_NODES, ORIGIN, PARENT, SIZE, SLOT, SOURCES, STATES, TARGET, TOKEN

COPIED, SHARED = tl.constexpr(constants.ORIGIN_NGRAM), tl.constexpr(constants.ORIGIN_SHARED)
AGREED, DEPTHS = tl.constexpr(constants.ORIGIN_AGREED), tl.constexpr(constants.NUM_DEPTHS)
BINS, MERGED_KIND = tl.constexpr(constants.NUM_BINS), tl.constexpr(constants.MERGED)
NGRAM_KIND, SHARED_KIND = tl.constexpr(constants.NGRAM), tl.constexpr(constants.SHARED)
AGREED_KIND, NATIVE_KIND = tl.constexpr(constants.AGREED), tl.constexpr(constants.NATIVE)


@triton.jit
def _kinds(origins):
    """The source of copied nodes; -1 for drafted ones, whose source depends on the path."""
    kinds = tl.where(origins == COPIED, NGRAM_KIND, tl.where(origins == SHARED, SHARED_KIND, -1))
    return tl.where(origins == AGREED, AGREED_KIND, kinds)


@triton.jit
def _beyond(node, nodes, capacity):
    """Where the paths of a node go on: a merged edge continues as its target."""
    target = tl.load(nodes + TARGET * capacity + node)
    return tl.where(target == -1, node, target)


@triton.jit
def _worth(likely, chance, crossed, level, probs, targets, kinds, trust, factor):
    """Calibrated survival that each node would have as a child of a place; as ``method.cells.calibrated``."""
    below = likely * probs
    cell = tl.zeros(below.shape, tl.int32)
    edge = 1.0
    for _ in tl.static_range(1, BINS):
        edge *= 0.5
        cell += (below <= edge).to(tl.int32)
    kind = tl.where(kinds == -1, tl.where(crossed | (targets != -1), MERGED_KIND, NATIVE_KIND), kinds)
    index = (kind * DEPTHS + tl.minimum(level, DEPTHS) - 1) * BINS + cell
    value = tl.load(trust + kind) * tl.minimum(below * tl.load(factor + index), 1.0)
    return tl.minimum(value, chance)


@triton.jit
def _best_child(value, candidate, lane, BLOCK):
    """The highest value among the candidates, -inf without any, and the first node that has it."""
    value = tl.where(candidate, value, float("-inf"))
    highest = tl.max(value, 0)
    return highest, tl.min(tl.where(value == highest, lane, BLOCK), 0)


@triton.jit
def _place(here, source, depth, over, likely, chance):
    """The node, depth, crossing, survival and value of the place that the mask ``here`` names."""
    node = tl.sum(tl.where(here, source, 0), 0)
    level = tl.sum(tl.where(here, depth, 0), 0)
    crossed = tl.sum(tl.where(here, over, 0), 0) != 0
    return node, level, crossed, tl.sum(tl.where(here, likely, 0.0), 0), tl.sum(tl.where(here, chance, 0.0), 0)


@triton.jit
def _store(
    token, parent, depth, origin, via_merge, survival, value, out, place, size, num_places, nodes, capacity, node,
    above, level, over, likely, chance,
):  # fmt: skip
    """Write all places; those that are not in use get zeros, and NONE as parent."""
    inside, real = place < num_places, place <= size
    line = out * num_places + place
    chosen = inside & real
    known = tl.load(nodes + TOKEN * capacity + node, mask=chosen, other=0)
    tl.store(token + line, known.to(tl.int64), mask=inside)
    tl.store(parent + line, tl.where(real, above, -1).to(tl.int64), mask=inside)
    tl.store(depth + line, tl.where(real, level, 0).to(tl.int64), mask=inside)
    known = tl.load(nodes + ORIGIN * capacity + node, mask=chosen, other=0)
    tl.store(origin + line, known.to(tl.int64), mask=inside)
    tl.store(via_merge + line, real & (over != 0), mask=inside)
    tl.store(survival + line, tl.where(real, likely, 0.0), mask=inside)
    tl.store(value + line, tl.where(real, chance, 0.0), mask=inside)


@triton.jit(do_not_specialize=["num_places", "capacity"], do_not_specialize_on_alignment=["trust"])
def flatten_kernel(
    out_token, out_parent, out_depth, out_origin, out_crossed, out_survival, out_value, out_size, nodes, chances, state,
    factor, trust, num_places, capacity, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (graphs). Every place keeps its best child that is not taken; each step takes the best of these."""
    graph = tl.program_id(0).to(tl.int64)
    lane, place = tl.arange(0, BLOCK), tl.arange(0, PLACES)
    nodes, chances = nodes + graph * 6 * capacity, chances + graph * 2 * capacity
    state, trust = state + graph * STATES, trust + graph * SOURCES
    real = lane < tl.load(state + SIZE)
    parents = tl.load(nodes + PARENT * capacity + lane, mask=real, other=-1)
    probs = tl.load(chances + lane, mask=real, other=0.0)
    targets = tl.load(nodes + TARGET * capacity + lane, mask=real, other=-1)
    kinds = _kinds(tl.load(nodes + ORIGIN * capacity + lane, mask=real, other=0))
    most, deepest = tl.minimum(tl.load(state + NUM_NODES), num_places - 1), tl.load(state + MAX_DEPTH)
    # One entry per place, the root's first: its node, parent, depth, whether the path crosses a merged edge, survival,
    # value, and the best child that is not taken with its value.
    node, above, depth = tl.full([PLACES], 0, tl.int32), tl.full([PLACES], -1, tl.int32), tl.full([PLACES], 0, tl.int32)
    over, heir = tl.full([PLACES], 0, tl.int32), tl.full([PLACES], 0, tl.int32)
    likely, chance = tl.full([PLACES], 1.0, tl.float32), tl.full([PLACES], 1.0, tl.float32)
    best = tl.full([PLACES], float("-inf"), tl.float32)
    size = 0
    going = most > 0
    while going:
        # Expand the newest place.
        here = place == size
        source, level, crossed, own, worth = _place(here, node, depth, over, likely, chance)
        source = _beyond(source, nodes, capacity)
        value = _worth(own, worth, crossed, level + 1, probs, targets, kinds, trust, factor)
        highest, first = _best_child(value, real & (parents == source) & (level < deepest), lane, BLOCK)
        best, heir = tl.where(here, highest, best), tl.where(here, first, heir)
        # Ties go to the place expanded first, then to the node added first.
        highest = tl.max(best, 0)
        going = highest > float("-inf")
        if going:
            chosen = tl.min(tl.where(best == highest, place, PLACES), 0)
            there = place == chosen
            child = tl.sum(tl.where(there, heir, 0), 0)
            source, level, crossed, own, worth = _place(there, node, depth, over, likely, chance)
            source = _beyond(source, nodes, capacity)
            # Find the parent's next best child.
            value = _worth(own, worth, crossed, level + 1, probs, targets, kinds, trust, factor)
            left = real & (parents == source) & ((value < highest) | ((value == highest) & (lane > child)))
            following, first = _best_child(value, left, lane, BLOCK)
            best, heir = tl.where(there, following, best), tl.where(there, first, heir)
            size += 1
            new = place == size
            target = tl.load(nodes + TARGET * capacity + child)
            node, above = tl.where(new, child, node), tl.where(new, chosen, above)
            depth = tl.where(new, level + 1, depth)
            over = tl.where(new, (crossed | (target != -1)).to(tl.int32), over)
            likely = tl.where(new, own * tl.load(chances + child), likely)
            chance = tl.where(new, highest, chance)
            going = size < most
    slot = tl.load(state + SLOT)
    if slot >= 0:
        _store(out_token, out_parent, out_depth, out_origin, out_crossed, out_survival, out_value, slot.to(tl.int64),
               place, size, num_places, nodes, capacity, node, above, depth, over, likely, chance)  # fmt: skip
        tl.store(out_size + slot, tl.full([], 0, tl.int64) + size)
