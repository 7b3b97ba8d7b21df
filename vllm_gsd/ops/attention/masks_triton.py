"""Triton kernel of ``ops.attention.masks``: depths, positions and ancestor bitmasks of a batch of trees."""

import triton
import triton.language as tl


@triton.jit
def tree_masks_kernel(
    mask,
    depths,
    positions,
    parents,
    starts,
    prefix_lens,
    mask_row,
    max_depth,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (trees, words). All rows climb to their root in parallel."""
    tree = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    first = tl.load(starts + tree).to(tl.int64)
    size = tl.load(starts + tree + 1) - first
    line = tl.arange(0, BLOCK)
    inside = line < size
    bits = tl.zeros([BLOCK], tl.int64)
    depth = tl.full([BLOCK], -1, tl.int32)
    at = line
    climbs = inside
    one = tl.full([BLOCK], 1, tl.int64)
    for _ in range(0, max_depth + 1):
        here = climbs & (at // 64 == word)
        bits = bits | tl.where(here, one << (at % 64).to(tl.int64), 0)
        depth += climbs.to(tl.int32)
        at = tl.load(parents + first + at, mask=climbs, other=-1)
        climbs = climbs & (at >= 0)
    tl.store(mask + (first + line) * mask_row + word, bits, mask=inside)
    if word == 0:
        tl.store(depths + first + line, depth, mask=inside)
        prefix = tl.load(prefix_lens + tree)
        tl.store(positions + first + line, (prefix + depth).to(tl.int64), mask=inside)
