"""Triton kernel of ``ops.walk``: the verification walk of a batch of trees, and the KV moves that follow from it."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["places", "max_steps"], do_not_specialize_on_alignment=["starts", "batch_starts"])
def accept_walk_kernel(
    tokens, rows, count, last, src_slots, dst_slots, node_token, node_parent, size, sampled, invalid, starts,
    batch_starts, slot_mapping, places, max_steps, INVALID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (trees). Compare all nodes at once; the first child that carries the sampled token wins."""
    tree = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + tree).to(tl.int64)
    root = tl.load(batch_starts + tree + 1) - (tl.load(starts + tree + 1) - first)
    line = tl.arange(0, BLOCK)
    real = line <= tl.load(size + tree)
    if INVALID:
        real = real & (tl.load(invalid + first + line, mask=real, other=1) == 0)
    token = tl.load(node_token + tree * places + line, mask=real, other=-1)
    above = tl.load(node_parent + tree * places + line, mask=real, other=-1)
    active = root >= 0
    row = 0
    steps = 0
    for depth in range(0, places):
        drawn = tl.load(sampled + first + row, mask=active, other=0)
        tl.store(tokens + tree * places + depth, drawn)
        tl.store(rows + tree * places + depth, first + row)
        if depth + 1 < places:
            child = tl.min(tl.where(real & (above == row) & (token == drawn), line, BLOCK), 0)
            active = active & (child < BLOCK) & (depth < max_steps)
            moves = active & (child != depth + 1)
            at = tree * (places - 1) + depth
            tl.store(src_slots + at, tl.load(slot_mapping + root + child, mask=moves, other=-1))
            tl.store(dst_slots + at, tl.load(slot_mapping + root + depth + 1, mask=moves, other=-1))
            row = tl.where(active, child, row)
            steps += active.to(tl.int32)
    tl.store(count + tree, steps + 1)
    tl.store(last + tree, row)
