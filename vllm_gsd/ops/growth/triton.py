"""Triton kernels: what of growing graphs goes one node after the other.

Entries: ``ops.graph_growth``, ``ops.graph_ngram`` and ``ops.graph_flatten``. A program has a graph, and every lane one
or several of its nodes, which are compared all at once.
"""

import triton
import triton.language as tl


@triton.jit
def merge_nodes_kernel(
    merged, above, candidate, parent, node, num_candidates, capacity, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (graphs). New nodes become merged edges in their order; see ``ops.graph_growth``."""
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
                # Whatever can be reached from the target can now be reached from above the new edge.
                word = tl.load(above + lane * WORDS + target // 64, mask=inside, other=0)
                joined = inside & ((word >> (target % 64)) & 1 != 0)
                for index in range(0, WORDS):
                    more = tl.load(above + source * WORDS + index)
                    old = tl.load(above + lane * WORDS + index, mask=joined, other=0)
                    tl.debug_barrier()  # the source's own row may be among those written
                    tl.store(above + lane * WORDS + index, old | more, mask=joined)
                tl.debug_barrier()


@triton.jit
def graft_kernel(
    token,
    parent,
    depth,
    prob,
    survival,
    origin,
    merged,
    size,
    texts,
    text_row,
    length,
    starts,
    matched,
    max_depth,
    match_probs,
    num_matches,
    capacity,
    NGRAM: tl.constexpr,
    DRAFT: tl.constexpr,
    AGREED: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (graphs). Copies walk down from the root one after the other and add what is missing."""
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
            child = tl.min(tl.where((parents == node) & (tokens == copied), lane, BLOCK), 0).to(tl.int64)
            missing = child == BLOCK
            adds = walking & missing & (count < capacity)
            walking = walking & ((child < BLOCK) | adds)
            chance = tl.load(match_probs + tl.minimum(agreeing + i, MAX_MATCH))
            # Drafted too: wrong only where both are. New: what the surest of its copied siblings leaves.
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
            # A merged edge continues as the node it points to.
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
    """Calibrated survival of all nodes, were they children of a place; as ``method.cells.calibrated``."""
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
def flatten_kernel(
    out_token,
    out_parent,
    out_depth,
    out_origin,
    out_crossed,
    out_survival,
    out_value,
    out_size,
    token,
    parent,
    prob,
    origin,
    merged,
    size,
    num_nodes,
    max_depth,
    factor,
    trust,
    trust_row,
    num_places,
    capacity,
    NGRAM: tl.constexpr,
    SHARED: tl.constexpr,
    AGREED: tl.constexpr,
    NGRAM_KIND: tl.constexpr,
    SHARED_KIND: tl.constexpr,
    AGREED_KIND: tl.constexpr,
    DEPTHS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (graphs). Every place keeps its best child that is not taken; the best of those is taken next."""
    graph = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    place = tl.arange(0, PLACES)
    row = graph * (capacity + 1)
    real = lane < tl.load(size + graph)
    parents = tl.load(parent + row + lane, mask=real, other=-1)
    probs = tl.load(prob + row + lane, mask=real, other=0.0)
    targets = tl.load(merged + row + lane, mask=real, other=-1)
    origins = tl.load(origin + row + lane, mask=real, other=0)
    kinds = tl.where(origins == NGRAM, NGRAM_KIND, tl.where(origins == SHARED, SHARED_KIND, -1))
    kinds = tl.where(origins == AGREED, AGREED_KIND, kinds)
    most = tl.load(num_nodes + graph)
    deepest = tl.load(max_depth + graph)
    trust += graph * trust_row
    # By place, the root's first: where it continues, how deep it is, over a merged edge or not, how likely and worth.
    source = tl.full([PLACES], 0, tl.int64)
    depth = tl.full([PLACES], 0, tl.int32)
    over = tl.full([PLACES], 0, tl.int32)
    likely = tl.full([PLACES], 1.0, tl.float32)
    chance = tl.full([PLACES], 1.0, tl.float32)
    best = tl.full([PLACES], float("-inf"), tl.float32)
    heir = tl.full([PLACES], 0, tl.int32)
    count = 0
    fresh = 0  # place to expand
    child = 0
    going = True
    for step in range(0, num_places):
        going = going & (step < most)
        if going:
            # The newest place.
            here = place == fresh
            node = tl.sum(tl.where(here, source, 0), 0)
            target = tl.load(merged + row + node)
            crossed = (tl.sum(tl.where(here, over, 0), 0) != 0) | (target != -1)
            node = tl.where(target == -1, node, target)
            source = tl.where(here, node, source)
            over = tl.where(here, crossed.to(tl.int32), over)
            level = tl.sum(tl.where(here, depth, 0), 0)
            own, above = tl.sum(tl.where(here, likely, 0.0), 0), tl.sum(tl.where(here, chance, 0.0), 0)
            value = _worth(own, above, crossed, level + 1, probs, targets, kinds, trust, factor, DEPTHS)
            value = tl.where(real & (parents == node) & (level < deepest), value, float("-inf"))
            highest = tl.max(value, 0)
            best = tl.where(here, highest, best)
            heir = tl.where(here, tl.min(tl.where(value == highest, lane, BLOCK), 0), heir)
            # Among equals the place that was expanded first, then the node that was added first.
            highest = tl.max(best, 0)
            going = highest > float("-inf")
            if going:
                chosen = tl.min(tl.where(best == highest, place, PLACES), 0)
                there = place == chosen
                child = tl.sum(tl.where(there, heir, 0), 0)
                level = tl.sum(tl.where(there, depth, 0), 0)
                crossed = tl.sum(tl.where(there, over, 0), 0) != 0
                own, above = tl.sum(tl.where(there, likely, 0.0), 0), tl.sum(tl.where(there, chance, 0.0), 0)
                node = tl.sum(tl.where(there, source, 0), 0)
                survival = own * tl.load(prob + row + child)
                line = graph * num_places + step
                via_merge = crossed | (tl.load(merged + row + child) != -1)
                tl.store(out_token + line, tl.load(token + row + child))
                tl.store(out_parent + line, (chosen - 1).to(tl.int64))
                tl.store(out_depth + line, (level + 1).to(tl.int64))
                tl.store(out_origin + line, tl.load(origin + row + child))
                tl.store(out_crossed + line, via_merge)
                tl.store(out_survival + line, survival)
                tl.store(out_value + line, highest)
                # What is left below the parent.
                value = _worth(own, above, crossed, level + 1, probs, targets, kinds, trust, factor, DEPTHS)
                left = real & (parents == node) & ((value < highest) | ((value == highest) & (lane > child)))
                value = tl.where(left, value, float("-inf"))
                following = tl.max(value, 0)
                best = tl.where(there, following, best)
                heir = tl.where(there, tl.min(tl.where(value == following, lane, BLOCK), 0), heir)
                fresh = step + 1
                new = place == fresh
                source = tl.where(new, child.to(tl.int64), source)
                depth = tl.where(new, level + 1, depth)
                over = tl.where(new, crossed.to(tl.int32), over)
                likely = tl.where(new, survival, likely)
                chance = tl.where(new, highest, chance)
                count += 1
    tl.store(out_size + graph, count)
