"""Triton kernels of ``ops.growth``: a program holds one graph, and its lanes hold candidates or nodes."""

import triton
import triton.language as tl

from vllm_gsd.method import constants
from vllm_gsd.ops.growth import state as columns

SIZE, USED, FRONTIER = tl.constexpr(columns.SIZE), tl.constexpr(columns.USED), tl.constexpr(columns.FRONTIER)
LENGTH, BASE, DEEPEST = tl.constexpr(columns.LENGTH), tl.constexpr(columns.BASE), tl.constexpr(columns.DEEPEST)
ROOM, MERGES, MAX_DEPTH = tl.constexpr(columns.ROOM), tl.constexpr(columns.MERGES), tl.constexpr(columns.MAX_DEPTH)
NUM_NODES, COPIES, SLOT = tl.constexpr(columns.NUM_NODES), tl.constexpr(columns.COPIES), tl.constexpr(columns.SLOT)
STATES = tl.constexpr(12)
TOKEN, PARENT, DEPTH = tl.constexpr(columns.TOKEN), tl.constexpr(columns.PARENT), tl.constexpr(columns.DEPTH)
ORIGIN, TARGET, LINE = tl.constexpr(columns.ORIGIN), tl.constexpr(columns.MERGED), tl.constexpr(columns.LINE)
DRAFT, ROOT = tl.constexpr(constants.ORIGIN_DRAFT), tl.constexpr(constants.ORIGIN_ROOT)
SOURCES, NGRAM = tl.constexpr(constants.NUM_SOURCES), tl.constexpr(constants.NGRAM)
MERGED, OFF_BELOW = tl.constexpr(constants.MERGED), tl.constexpr(constants.OFF_BELOW)


@triton.jit
def _physical(block_table, index, block_size):
    """The KV slots of logical indices of one request."""
    block = tl.load(block_table + index // block_size).to(tl.int64)
    return block * block_size + index % block_size


@triton.jit
def store_nodes(nodes, chances, capacity, node, mask, token, parent, depth, origin, target, prob, survival):
    """Write nodes of a graph. Merged edges have a target, others NONE."""
    tl.store(nodes + TOKEN * capacity + node, token, mask=mask)
    tl.store(nodes + PARENT * capacity + node, parent, mask=mask)
    tl.store(nodes + DEPTH * capacity + node, depth, mask=mask)
    tl.store(nodes + ORIGIN * capacity + node, origin, mask=mask)
    tl.store(nodes + TARGET * capacity + node, target, mask=mask)
    tl.store(chances + node, prob, mask=mask)
    tl.store(chances + capacity + node, survival, mask=mask)


@triton.jit
def _start(nodes, chances, grams, above, best, frontier, text, length, capacity, num_nodes, GRAM, WORDS, BEST):
    """Reset a graph to its root, the text's last token."""
    tl.store(nodes + TOKEN * capacity, tl.load(text + length - 1))
    tl.store(nodes + PARENT * capacity, -1)
    tl.store(nodes + DEPTH * capacity, 0)
    tl.store(nodes + ORIGIN * capacity, ROOT)
    tl.store(nodes + TARGET * capacity, -1)
    tl.store(nodes + LINE * capacity, 0)
    tl.store(chances, 1.0)
    tl.store(chances + capacity, 1.0)
    for back in range(0, GRAM):
        known = length - 1 - back >= 0
        tl.store(grams + back * capacity, tl.load(text + length - 1 - back, mask=known, other=-back))
    for word in range(0, WORDS):
        tl.store(above + word * capacity, 1 if word == 0 else 0)
    place = tl.arange(0, BEST)
    tl.store(best + place, 0.0, mask=place < num_nodes)
    tl.store(frontier, 0)


@triton.jit
def _text_rows(
    token, position, slot, mask, prefix, source, last, text, block_table, request, done, fresh, most, width, block_size,
    mask_token, SHIFT, BLOCK, CAUSAL, WORDS, WIDTH,
):  # fmt: skip
    """The rows of a text's ``fresh`` tokens after the first ``done``; each attends the rows before it and itself.

    Of a drafted block, only the first row holds a token of the text. Its rows may all attend each other.
    """
    place = tl.arange(0, WIDTH)
    inside, real = place < width, place < fresh
    row = request * width + place
    at = tl.minimum(done + place, most - 1)
    known = tl.load(text + at + SHIFT, mask=real & (place == 0) if BLOCK else real, other=mask_token)
    tl.store(token + row, tl.where(real, known, 0), mask=inside)
    tl.store(position + row, tl.where(real, at, 0).to(tl.int64), mask=inside)
    at = tl.where(real, at, 0)
    tl.store(slot + row, tl.where(real, _physical(block_table, at, block_size), -1), mask=inside)
    before = at - 1 + SHIFT
    stored = real & (before >= 0)
    before = _physical(block_table, tl.where(stored, before, 0), block_size)
    tl.store(source + row, tl.where(stored, before, -1), mask=inside)
    for word in range(0, WORDS):
        seen = place + 1 if CAUSAL else place * 0 + fresh
        ones = tl.minimum(tl.maximum(seen - 64 * word, 0), 64).to(tl.int64)
        bits = tl.where(ones == 64, -1, (tl.full([WIDTH], 1, tl.int64) << (ones % 64)) - 1)
        tl.store(mask + row * WORDS + word, tl.where(real, bits, 0), mask=inside)
    tl.store(prefix + request, tl.where(fresh > 0, done, 0))
    tl.store(last + request, (request * width + tl.maximum(fresh - 1, 0)).to(tl.int64))


@triton.jit(
    do_not_specialize=[
        "text_row", "block_row", "block_size", "max_length", "max_positions", "max_slots", "capacity", "num_nodes",
        "width",
    ],
    do_not_specialize_on_alignment=["limits", "trust"],
)  # fmt: skip
def begin_kernel(
    nodes, chances, grams, above, best, frontier, state, token, position, slot, mask, prefix, source, last,
    limits, trust, texts, total_len, draft_length, block_table, text_row, block_row, block_size, max_length,
    max_positions, max_slots, mask_token, capacity, num_nodes, width, DRAFTS: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr, GRAM: tl.constexpr, GRAPH_WORDS: tl.constexpr, ROW_WORDS: tl.constexpr,
    BEST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (graphs). See ``ops.growth.api.begin``."""
    graph = tl.program_id(0).to(tl.int64)
    own = tl.load(limits + 5 * graph)
    request = tl.maximum(own, 0).to(tl.int64)
    # A finished request may run for another step, beyond the end of its text.
    length = tl.minimum(tl.maximum(tl.load(total_len + request).to(tl.int32), 1), max_length)
    max_depth = tl.minimum(tl.load(limits + 5 * graph + 4), max_length) - length - 1
    asked = tl.load(limits + 5 * graph + 1)
    wanted = (asked > 0) & (own >= 0) & (max_depth > 0)
    drafted = wanted & (asked == 1)
    text = texts + request * text_row
    _start(nodes + graph * 6 * capacity, chances + graph * 2 * capacity, grams + graph * GRAM * capacity,
           above + graph * GRAPH_WORDS * capacity, best + graph * num_nodes, frontier + graph * num_nodes, text, length,
           capacity, num_nodes, GRAM, GRAPH_WORDS, BEST)  # fmt: skip
    state += graph * STATES
    base = length - SHIFT
    if DRAFTS:
        room = tl.load(limits + 5 * graph + 3)
        done = tl.load(limits + 5 * graph + 2)
        done = tl.where(done < 0, tl.load(draft_length + request).to(tl.int32), done)
        if BLOCK:
            done = length - 1
            fresh = tl.where(drafted & (done + width <= tl.minimum(room, max_positions)), width, 0)
            complete = fresh > 0
        else:
            missing = tl.where(drafted, tl.minimum(tl.minimum(base, room), max_positions) - done, 0)
            fresh = tl.minimum(tl.maximum(missing, 0), width)
            complete = (fresh > 0) & (done + fresh == base)
            tl.store(draft_length + request, (done + fresh).to(tl.int64), mask=own >= 0)
        most = tl.minimum(max_positions, max_length - SHIFT)
        _text_rows(token, position, slot, mask, prefix, source, last, text, block_table + graph * block_row, graph,
                   done, fresh, most, width, block_size, mask_token, SHIFT, BLOCK, CAUSAL, ROW_WORDS,
                   WIDTH)  # fmt: skip
        tl.store(state + FRONTIER, complete.to(tl.int32))
        tl.store(state + DEEPEST, tl.minimum(max_depth, max_positions - base))
        tl.store(state + ROOM, tl.minimum(room - base, max_slots))
    tl.store(state + SIZE, 1)
    tl.store(state + USED, 0)
    tl.store(state + LENGTH, length)
    tl.store(state + BASE, base)
    tl.store(state + MERGES, (tl.load(trust + graph * SOURCES + MERGED) >= OFF_BELOW).to(tl.int32))
    tl.store(state + MAX_DEPTH, max_depth)
    tl.store(state + NUM_NODES, tl.where(wanted, num_nodes, 0))
    copies = wanted & (tl.load(trust + graph * SOURCES + NGRAM) >= OFF_BELOW)
    tl.store(state + COPIES, tl.where(copies, tl.minimum(max_depth, num_nodes), 0))
    tl.store(state + SLOT, own)


@triton.jit
def _add_children(
    nodes, chances, grams, above, best, frontier, state, counts, tokens, probs, theta_sib, num_nodes, capacity, size,
    lane, TOP_K, GRAM, WORDS,
):  # fmt: skip
    """Add the candidates that pass to ``size`` nodes, in their order, while there is room; return the new number."""
    place = lane // TOP_K
    asked = place < tl.load(state + FRONTIER)
    parent = tl.load(frontier + place, mask=asked, other=0)
    token = tl.load(tokens + lane, mask=asked, other=-1).to(tl.int32)
    prob = tl.load(probs + lane, mask=asked, other=0.0)
    first = tl.load(probs + place * TOP_K, mask=asked, other=0.0)
    invalid = asked & (lane % TOP_K == 0) & (first == 0.0)
    asked = asked & (token >= 0)
    survival = tl.load(chances + capacity + parent) * prob
    strong = asked & (prob >= theta_sib * first) & (survival > tl.load(best + num_nodes - 1))
    node = size + tl.cumsum(strong.to(tl.int32), 0) - 1
    added = strong & (node < capacity)
    depth = tl.load(nodes + DEPTH * capacity + parent) + 1
    store_nodes(nodes, chances, capacity, node, added, token, parent, depth, DRAFT, -1, prob, survival)
    for back in range(0, GRAM):
        symbol = token
        if back > 0:
            symbol = tl.load(grams + (back - 1) * capacity + parent)
        tl.store(grams + back * capacity + node, symbol, mask=added)
    for word in range(0, WORDS):
        bit = tl.where(node // 64 == word, tl.full(node.shape, 1, tl.int64) << (node % 64).to(tl.int64), 0)
        tl.store(above + word * capacity + node, tl.load(above + word * capacity + parent) | bit, mask=added)
    total = tl.sum(added.to(tl.int64), 0)
    tl.atomic_add(counts, total)
    tl.atomic_add(counts + 2, tl.sum(asked.to(tl.int64), 0) - total)
    tl.atomic_add(counts + 4, tl.sum(invalid.to(tl.int64), 0))
    return size + total.to(tl.int32)


@triton.jit
def _repeats(targets, grams, new, end, capacity, GRAM, CHUNK):
    """Which new nodes end in the n-gram of an earlier native node."""
    found = new < 0
    for start in range(1, end, CHUNK):
        other = start + tl.arange(0, CHUNK)
        native = (other < end) & (tl.load(targets + other, mask=other < end, other=0) == -1)
        same = native[None, :] & (other[None, :] < new[:, None]) & (new[:, None] < end)
        for back in range(0, GRAM):
            ours = tl.load(grams + back * capacity + new, mask=new < end, other=0)
            theirs = tl.load(grams + back * capacity + other, mask=other < end, other=0)
            same = same & (ours[:, None] == theirs[None, :])
        found = found | (tl.max(same.to(tl.int32), 1) > 0)
    return found


@triton.jit
def _merge(nodes, grams, above, counts, first, end, capacity, lane, GRAM, WORDS, BLOCK, CHUNK):
    """Turn new nodes into merged edges, one after the other, since each changes what the next may point to."""
    new, node = first + lane, tl.arange(0, BLOCK)
    targets = nodes + TARGET * capacity
    repeats = _repeats(targets, grams, new, end, capacity, GRAM, CHUNK)
    own = tl.min(tl.where(repeats, new, end), 0)
    while own < end:
        parent = tl.load(nodes + PARENT * capacity + own)
        before = node < own
        fits = before & (node > 0) & (tl.load(targets + node, mask=before, other=0) == -1)
        for back in range(0, GRAM):
            theirs = tl.load(grams + back * capacity + node, mask=before, other=0)
            fits = fits & (theirs == tl.load(grams + back * capacity + own))
        # Refuse targets that reach the parent, which would close a cycle. Take the oldest of the others.
        reaching = tl.load(above + (node // 64) * capacity + parent, mask=before, other=0)
        fits = fits & ((reaching >> (node % 64)) & 1 == 0)
        target = tl.min(tl.where(fits, node, BLOCK), 0)
        if target < BLOCK:
            tl.store(targets + own, target)
            tl.atomic_add(counts + 1, tl.full([], 1, tl.int64))
            # The parent and its ancestors now reach everything that the target reaches.
            reached = tl.load(above + (target // 64) * capacity + node, mask=node < end, other=0)
            joined = (node < end) & ((reached >> (target % 64)) & 1 != 0)
            for word in range(0, WORDS):
                more = tl.load(above + word * capacity + parent)
                old = tl.load(above + word * capacity + node, mask=joined, other=0)
                tl.debug_barrier()  # the stores may write the parent's own row
                tl.store(above + word * capacity + node, old | more, mask=joined)
            tl.debug_barrier()
        own = tl.min(tl.where(repeats & (new > own), new, end), 0)


@triton.jit
def _num_before(values, targets, begin, end, own, number, NATIVE: tl.constexpr, CHUNK: tl.constexpr):
    """How many values come before each of ``own``: the higher ones, and equal ones at places below ``number``."""
    count = tl.zeros(own.shape, tl.int32)
    for start in range(begin, end, CHUNK):
        place = start + tl.arange(0, CHUNK)
        value = tl.load(values + place, mask=place < end, other=-1.0)
        if NATIVE:
            value = tl.where(tl.load(targets + place, mask=place < end, other=0) == -1, value, -1.0)
        equal = (value[None, :] == own[:, None]) & (place[None, :] < number[:, None])
        count += tl.sum(((value[None, :] > own[:, None]) | equal).to(tl.int32), 1)
    return count


@triton.jit
def keep_best(values, targets, best, first, end, num_nodes, lane, BEST, CHUNK):
    """Merge the survivals of nodes ``first`` to ``end`` into the list of the best; return the last of the list."""
    new, place = first + lane, tl.arange(0, BEST)
    real, listed = new < end, place < num_nodes
    value = tl.load(values + new, mask=real, other=-1.0)
    kept = tl.load(best + place, mask=listed, other=-1.0)
    rank = _num_before(values, targets, first, end, value, new, False, CHUNK)
    rank += _num_before(best, targets, 0, num_nodes, value, tl.full(new.shape, 1 << 30, tl.int32), False, CHUNK)
    kept_rank = place + _num_before(values, targets, first, end, kept, tl.full([BEST], -1, tl.int32), False, CHUNK)
    tl.debug_barrier()
    tl.store(best + rank, value, mask=real & (rank < num_nodes))
    tl.store(best + kept_rank, kept, mask=listed & (kept_rank < num_nodes))
    floor = tl.sum(tl.where(real & (rank == num_nodes - 1), value, 0.0), 0)
    return floor + tl.sum(tl.where(listed & (kept_rank == num_nodes - 1), kept, 0.0), 0)


@triton.jit
def _choose(
    nodes, chances, best, frontier, state, counts, theta_prob, first, end, num_nodes, next_width, capacity, lane,
    BEST, CHUNK,
):  # fmt: skip
    """Merge the new survivals into the list of the best, and choose the next frontier, best first."""
    new = first + lane
    real = new < end
    values, targets = chances + capacity, nodes + TARGET * capacity
    value = tl.load(values + new, mask=real, other=-1.0)
    floor = keep_best(values, targets, best, first, end, num_nodes, lane, BEST, CHUNK)
    native = real & (tl.load(targets + new, mask=real, other=0) == -1)
    depth = tl.load(nodes + DEPTH * capacity + new, mask=real, other=0)
    wanted = native & (value >= theta_prob) & (value >= floor) & (depth < tl.load(state + DEEPEST))
    place = _num_before(values, targets, first, end, value, new, True, CHUNK)
    used = tl.load(state + USED)
    room = tl.maximum(tl.load(state + ROOM) - used, 0)
    most = tl.minimum(tl.minimum(room, next_width), tl.sum(wanted.to(tl.int32), 0))
    tl.store(frontier + place, new, mask=wanted & (place < most))
    tl.store(state + FRONTIER, most)
    tl.atomic_add(counts + 3, most.to(tl.int64))
    return most, used


@triton.jit
def _node_rows(
    token, position, slot, mask, prefix, source, nodes, slots, frontier, state, block_table, graph, size, used, width,
    before, capacity, block_size, max_positions, WORDS, WIDTH,
):  # fmt: skip
    """Give the frontier's ``size`` nodes draft KV slots after the ``used`` ones, and write their rows.

    The caller has read ``used`` before a barrier, since no warp may read it after another has stored the new number.
    """
    place = tl.arange(0, WIDTH)
    inside, real = place < width, place < size
    row = graph * width + place
    node = tl.load(frontier + place, mask=real, other=0)
    parent = tl.maximum(tl.load(nodes + PARENT * capacity + node), 0)
    base = tl.load(state + BASE)
    own = used + place
    depth = tl.load(nodes + DEPTH * capacity + node)
    tl.store(token + row, tl.where(real, tl.load(nodes + TOKEN * capacity + node), 0), mask=inside)
    at = tl.minimum(base - 1 + depth, max_positions - 1)
    tl.store(position + row, tl.where(real, at, 0).to(tl.int64), mask=inside)
    physical = _physical(block_table, tl.where(real, base + own, 0), block_size)
    tl.store(slot + row, tl.where(real, physical, -1), mask=inside)
    above = tl.load(nodes + LINE * capacity + parent, mask=real, other=0)
    tl.store(source + row, graph * before + above, mask=inside)
    tl.store(nodes + LINE * capacity + node, place, mask=real)
    for word in range(0, WORDS):
        # The root's key and value are in the committed text, so its children inherit no slot.
        bits = tl.load(slots + word * capacity + parent, mask=real & (parent > 0), other=0)
        bits |= tl.where(own // 64 == word, tl.full([WIDTH], 1, tl.int64) << (own % 64).to(tl.int64), 0)
        tl.store(slots + word * capacity + node, bits, mask=real)
        tl.store(mask + row * WORDS + word, tl.where(real, bits, 0), mask=inside)
    tl.store(prefix + graph, tl.where(size > 0, base, 0))
    tl.store(state + USED, used + size)


@triton.jit(
    do_not_specialize=["block_row", "block_size", "max_positions", "num_nodes", "capacity", "width", "next_width"]
)
def grow_kernel(
    nodes, chances, grams, above, slots, best, frontier, state, counts, token, position, slot, mask, prefix, source,
    tokens, probs, block_table, block_row, block_size, max_positions, theta_sib, theta_prob, num_nodes, capacity, width,
    next_width, TOP_K: tl.constexpr, GRAM: tl.constexpr, GRAPH_WORDS: tl.constexpr, SLOT_WORDS: tl.constexpr,
    CANDIDATES: tl.constexpr, PART: tl.constexpr, NEW: tl.constexpr, BLOCK: tl.constexpr, BEST: tl.constexpr,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (graphs). See ``ops.growth.api.grow_level``."""
    graph = tl.program_id(0).to(tl.int64)
    nodes += graph * 6 * capacity
    chances += graph * 2 * capacity
    grams += graph * GRAM * capacity
    above += graph * GRAPH_WORDS * capacity
    best += graph * num_nodes
    frontier += graph * num_nodes
    state += graph * STATES
    lane = tl.arange(0, NEW)
    first = tl.load(state + SIZE)
    end = first
    tokens += graph * width * TOP_K
    probs += graph * width * TOP_K
    for start in range(0, CANDIDATES, PART):
        end = _add_children(nodes, chances, grams, above, best, frontier, state, counts, tokens, probs, theta_sib,
                            num_nodes, capacity, end, start + tl.arange(0, PART), TOP_K, GRAM, GRAPH_WORDS)  # fmt: skip
    tl.debug_barrier()
    tl.store(state + SIZE, end)
    if GRAM > 0:
        if tl.load(state + MERGES) != 0:
            _merge(nodes, grams, above, counts, first, end, capacity, lane, GRAM, GRAPH_WORDS, BLOCK, CHUNK)
    if WIDTH > 0:
        size, used = _choose(nodes, chances, best, frontier, state, counts, theta_prob, first, end, num_nodes,
                             next_width, capacity, lane, BEST, CHUNK)  # fmt: skip
        tl.debug_barrier()
        _node_rows(token, position, slot, mask, prefix, source, nodes, slots + graph * SLOT_WORDS * capacity, frontier,
                   state, block_table + graph * block_row, graph, size, used, next_width, width, capacity, block_size,
                   max_positions, SLOT_WORDS, WIDTH)  # fmt: skip
