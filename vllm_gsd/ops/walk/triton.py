"""Triton kernel of ``ops.walk``: the verification walk of a batch of trees."""

import triton
import triton.language as tl


@triton.jit
def accept_walk_kernel(
    path,
    length,
    tokens_out,
    src_slots,
    dst_slots,
    tokens,
    parents,
    sampled,
    starts,
    slots,
    path_row,
    tokens_row,
    max_depth,
    MOVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (trees). Compare all rows at once; the first child that carries the sampled token wins."""
    tree = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + tree).to(tl.int64)
    size = tl.load(starts + tree + 1) - first
    line = tl.arange(0, BLOCK)
    inside = line < size
    token = tl.load(tokens + first + line, mask=inside, other=-1)
    parent = tl.load(parents + first + line, mask=inside, other=-1)
    active = size > 0
    place = 0
    steps = 0
    for depth in range(0, max_depth + 1):
        drawn = tl.load(sampled + first + place, mask=active, other=-1).to(tl.int64)
        tl.store(tokens_out + tree * tokens_row + depth, drawn)  # -1 after the bonus token
        if depth < max_depth:
            # Children come after their parent in the tree.
            fits = inside & (line > place) & (parent == place) & (token == drawn)
            child = tl.min(tl.where(fits, line, BLOCK), 0)
            active = active & (child < BLOCK)
            tl.store(path + tree * path_row + depth, tl.where(active, child, -1))
            if MOVES:
                source = tl.load(slots + first + child, mask=active, other=-1)
                target = tl.load(slots + first + depth + 1, mask=active, other=-1)
                moves = active & (child != depth + 1)
                tl.store(src_slots + tree * path_row + depth, tl.where(moves, source, -1))
                tl.store(dst_slots + tree * path_row + depth, tl.where(moves, target, -1))
            place = tl.where(active, child, place)
            steps += active.to(tl.int32)
    tl.store(length + tree, steps)
