"""Triton kernels of ``ops.growth``, ``ops.ngram`` and ``ops.flatten``: the steps that visit nodes one after the other.

A program holds one graph. Its lanes hold the nodes, so that one instruction compares all of them.
"""

import triton
import triton.language as tl


@triton.jit
def merge_nodes_kernel(
    merged, above, candidate, parent, node, num_candidates, capacity, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (graphs). Turn new nodes into merged edges in their order; see ``ops.growth.api._merge_reference``."""
    graph = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < capacity
    merged += graph * (capacity + 1)
    above += graph * (capacity + 1) * WORDS
    native = tl.load(merged + lane, mask=inside, other=0) == -1
    for place in range(0, num_candidates):
        line = graph * num_candidates + place
        own = tl.load(node + line)
        source = tl.load(parent + line)
        fits = native & (tl.load(candidate + line * capacity + lane, mask=inside, other=0) != 0)
        if tl.max(fits.to(tl.int32), 0) > 0:
            words = tl.load(above + source * WORDS + lane // 64, mask=inside, other=0)
            fits = fits & ((words >> (lane % 64)) & 1 == 0)
            target = tl.min(tl.where(fits, lane, BLOCK), 0)
            if target < BLOCK:
                tl.store(merged + own, target.to(tl.int64))
                native = native & (lane != own)
                # The source and its ancestors now reach everything that the target reaches.
                word = tl.load(above + lane * WORDS + target // 64, mask=inside, other=0)
                joined = inside & ((word >> (target % 64)) & 1 != 0)
                for index in range(0, WORDS):
                    more = tl.load(above + source * WORDS + index)
                    old = tl.load(above + lane * WORDS + index, mask=joined, other=0)
                    tl.debug_barrier()  # the stores may write the source's own row
                    tl.store(above + lane * WORDS + index, old | more, mask=joined)
                tl.debug_barrier()


@triton.jit
def _copy_token(
    node, copied, chance, walking, lane, count, capacity, tokens, parents, depths, probs, survivals, origins,
    NGRAM, DRAFT, AGREED, BLOCK,
):  # fmt: skip
    """One step of a copy's walk: agree with the child of ``node`` that carries the token, or add one."""
    child = tl.min(tl.where((parents == node) & (tokens == copied), lane, BLOCK), 0).to(tl.int64)
    missing = child == BLOCK
    adds = walking & missing & (count < capacity)
    walking = walking & ((child < BLOCK) | adds)
    # A token that the draft proposed too is wrong only if both are wrong. A new token gets the chance that its surest
    # copied sibling leaves.
    agreed = walking & (lane == child) & (origins == DRAFT)
    chance *= 1.0 - tl.max(tl.where((parents == node) & (origins != DRAFT) & missing, probs, 0.0), 0)
    probs = tl.where(agreed, probs + chance * (1.0 - probs), probs)
    origins = tl.where(agreed, AGREED, origins)
    likely = tl.sum(tl.where(lane == node, survivals, 0.0), 0) * chance
    level = tl.sum(tl.where(lane == node, depths, 0), 0) + 1
    new = adds & (lane == count)
    tokens = tl.where(new, copied, tokens)
    parents = tl.where(new, node, parents)
    depths = tl.where(new, level, depths)
    survivals = tl.where(new, likely, survivals)
    probs = tl.where(new, chance, probs)
    origins = tl.where(new, NGRAM, origins)
    child = tl.where(missing, count, child)
    count = count + adds.to(tl.int64)
    return child, walking, count, tokens, parents, depths, probs, survivals, origins


@triton.jit
def graft_kernel(
    token, parent, depth, prob, survival, origin, merged, size, texts, text_row, length, starts, matched, max_depth,
    match_probs, num_matches, capacity, NGRAM: tl.constexpr, DRAFT: tl.constexpr, AGREED: tl.constexpr,
    MAX_MATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (graphs). The copies walk down from the root one after the other and add missing nodes."""
    graph = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    row = graph * (capacity + 1)
    inside = lane < capacity
    tokens = tl.load(token + row + lane, mask=inside, other=-1)
    parents = tl.load(parent + row + lane, mask=inside, other=-1)
    depths = tl.load(depth + row + lane, mask=inside, other=0)
    survivals = tl.load(survival + row + lane, mask=inside, other=0.0)
    targets = tl.load(merged + row + lane, mask=inside, other=-1)
    probs = tl.load(prob + row + lane, mask=inside, other=0.0)
    origins = tl.load(origin + row + lane, mask=inside, other=0)
    count = tl.load(size + graph)
    text_length = tl.load(length + graph)
    most = tl.load(max_depth + graph)
    for match in range(0, num_matches):
        start = tl.load(starts + graph * num_matches + match)
        agreeing = tl.load(matched + graph * num_matches + match)
        walking = agreeing > 0
        node = start * 0
        steps = tl.where(walking, tl.minimum(most, text_length - start), 0)
        for i in range(0, steps):
            copied = tl.load(texts + graph * text_row + start + i).to(tl.int64)
            chance = tl.load(match_probs + tl.minimum(agreeing + i, MAX_MATCH))
            child, walking, count, tokens, parents, depths, probs, survivals, origins = _copy_token(
                node, copied, chance, walking, lane, count, capacity, tokens, parents, depths, probs, survivals,
                origins, NGRAM, DRAFT, AGREED, BLOCK,
            )  # fmt: skip
            # A merged edge continues as its target.
            target = tl.sum(tl.where(lane == child, targets, 0), 0)
            node = tl.where(target == -1, child, target)
    inside = lane < count
    tl.store(token + row + lane, tokens, mask=inside)
    tl.store(parent + row + lane, parents, mask=inside)
    tl.store(depth + row + lane, depths, mask=inside)
    tl.store(survival + row + lane, survivals, mask=inside)
    tl.store(prob + row + lane, probs, mask=inside)
    tl.store(origin + row + lane, origins, mask=inside)
    tl.store(size + graph, count)


@triton.jit
def _worth(likely, chance, crossed, level, probs, targets, kinds, trust, factor, DEPTHS: tl.constexpr):
    """Calibrated survival that each node would have as a child of a place; as ``method.cells.calibrated``."""
    below = likely * probs
    cell = (below <= 0.5).to(tl.int32) + (below <= 0.25).to(tl.int32) + (below <= 0.125).to(tl.int32)
    cell += (below <= 0.0625).to(tl.int32) + (below <= 0.03125).to(tl.int32)
    cell += (below <= 0.015625).to(tl.int32) + (below <= 0.0078125).to(tl.int32)
    own = tl.where(crossed | (targets != -1), 1, 0)
    kind = tl.where(kinds == -1, own, kinds)
    index = (kind * DEPTHS + tl.minimum(level, DEPTHS) - 1) * 8 + cell
    value = tl.load(trust + kind) * tl.minimum(below * tl.load(factor + index), 1.0)
    return tl.minimum(value, chance)


@triton.jit
def _kinds(origins, NGRAM, SHARED, AGREED, NGRAM_KIND, SHARED_KIND, AGREED_KIND):
    """The source of copied nodes; -1 for drafted ones, whose source depends on the path."""
    kinds = tl.where(origins == NGRAM, NGRAM_KIND, tl.where(origins == SHARED, SHARED_KIND, -1))
    return tl.where(origins == AGREED, AGREED_KIND, kinds)


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
def _store_place(
    line, row, child, parent, level, crossed, survival, value, token, origin, merged,
    out_token, out_parent, out_depth, out_origin, out_crossed, out_survival, out_value,
):  # fmt: skip
    tl.store(out_token + line, tl.load(token + row + child))
    tl.store(out_parent + line, parent.to(tl.int64))
    tl.store(out_depth + line, level.to(tl.int64))
    tl.store(out_origin + line, tl.load(origin + row + child))
    tl.store(out_crossed + line, crossed | (tl.load(merged + row + child) != -1))
    tl.store(out_survival + line, survival)
    tl.store(out_value + line, value)


@triton.jit
def flatten_kernel(
    out_token, out_parent, out_depth, out_origin, out_crossed, out_survival, out_value, out_size,
    token, parent, prob, origin, merged, size, num_nodes, max_depth, factor, trust, trust_row, num_places, capacity,
    NGRAM: tl.constexpr, SHARED: tl.constexpr, AGREED: tl.constexpr, NGRAM_KIND: tl.constexpr,
    SHARED_KIND: tl.constexpr, AGREED_KIND: tl.constexpr, DEPTHS: tl.constexpr, PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (graphs). Every place keeps its best child that is not taken; each step takes the best of these."""
    graph = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    place = tl.arange(0, PLACES)
    row = graph * (capacity + 1)
    real = lane < tl.load(size + graph)
    parents = tl.load(parent + row + lane, mask=real, other=-1)
    probs = tl.load(prob + row + lane, mask=real, other=0.0)
    targets = tl.load(merged + row + lane, mask=real, other=-1)
    origins = tl.load(origin + row + lane, mask=real, other=0)
    kinds = _kinds(origins, NGRAM, SHARED, AGREED, NGRAM_KIND, SHARED_KIND, AGREED_KIND)
    most = tl.load(num_nodes + graph)
    deepest = tl.load(max_depth + graph)
    trust += graph * trust_row
    # One entry per place, the root's first: the node it continues as, depth, whether the path crosses a merged edge,
    # survival, value, and the best child that is not taken with its value.
    source = tl.full([PLACES], 0, tl.int64)
    depth = tl.full([PLACES], 0, tl.int32)
    over = tl.full([PLACES], 0, tl.int32)
    likely = tl.full([PLACES], 1.0, tl.float32)
    chance = tl.full([PLACES], 1.0, tl.float32)
    best = tl.full([PLACES], float("-inf"), tl.float32)
    heir = tl.full([PLACES], 0, tl.int32)
    count = 0
    going = True
    for step in range(0, num_places):
        going = going & (step < most)
        if going:
            # Expand the newest place.
            here = place == step
            node, level, crossed, own, above = _place(here, source, depth, over, likely, chance)
            target = tl.load(merged + row + node)
            crossed = crossed | (target != -1)
            node = tl.where(target == -1, node, target)
            source = tl.where(here, node, source)
            over = tl.where(here, crossed.to(tl.int32), over)
            value = _worth(own, above, crossed, level + 1, probs, targets, kinds, trust, factor, DEPTHS)
            highest, first = _best_child(value, real & (parents == node) & (level < deepest), lane, BLOCK)
            best = tl.where(here, highest, best)
            heir = tl.where(here, first, heir)
            # Ties go to the place expanded first, then to the node added first.
            highest = tl.max(best, 0)
            going = highest > float("-inf")
            if going:
                chosen = tl.min(tl.where(best == highest, place, PLACES), 0)
                there = place == chosen
                child = tl.sum(tl.where(there, heir, 0), 0)
                node, level, crossed, own, above = _place(there, source, depth, over, likely, chance)
                survival = own * tl.load(prob + row + child)
                _store_place(
                    graph * num_places + step, row, child, chosen - 1, level + 1, crossed, survival, highest, token,
                    origin, merged, out_token, out_parent, out_depth, out_origin, out_crossed, out_survival, out_value,
                )  # fmt: skip
                # Find the parent's next best child.
                value = _worth(own, above, crossed, level + 1, probs, targets, kinds, trust, factor, DEPTHS)
                left = real & (parents == node) & ((value < highest) | ((value == highest) & (lane > child)))
                following, first = _best_child(value, left, lane, BLOCK)
                best = tl.where(there, following, best)
                heir = tl.where(there, first, heir)
                new = place == step + 1
                source = tl.where(new, child.to(tl.int64), source)
                depth = tl.where(new, level + 1, depth)
                over = tl.where(new, crossed.to(tl.int32), over)
                likely = tl.where(new, survival, likely)
                chance = tl.where(new, highest, chance)
                count += 1
    tl.store(out_size + graph, count)
