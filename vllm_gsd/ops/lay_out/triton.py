"""Triton kernel of ``ops.lay_out``: nodes, positions and masks of the rows that verify a batch's graphs."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["places"], do_not_specialize_on_alignment=["valid", "starts", "batch_starts"])
def lay_out_kernel(
    token, parent, depth, origin, via_merge, survival, value, size, kept_token, kept_parent, kept_depth, kept_origin,
    kept_via_merge, kept_survival, kept_value, kept_size, slots, valid, starts, batch_starts, positions, mask,
    prefix_lens, places, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (requests). All rows climb to the root in parallel."""
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    first = tl.load(starts + request).to(tl.int64)
    num_rows = (tl.load(starts + request + 1) - first).to(tl.int32)
    root = tl.load(batch_starts + request + 1).to(tl.int64) - num_rows
    nodes = tl.minimum(tl.load(kept_size + slot).to(tl.int32), num_rows - 1)
    nodes = tl.where(tl.load(valid + request) != 0, nodes, 0)
    tl.store(size + request, nodes.to(tl.int64))

    line = tl.arange(0, BLOCK)
    real = line <= nodes
    inside = line < places
    source = slot * places + line
    target = request * places + line
    deep = tl.load(kept_depth + source, mask=real, other=0)
    tl.store(token + target, tl.load(kept_token + source, mask=real, other=0), mask=inside)
    tl.store(parent + target, tl.load(kept_parent + source, mask=real, other=-1), mask=inside)
    tl.store(depth + target, deep, mask=inside)
    tl.store(origin + target, tl.load(kept_origin + source, mask=real, other=0), mask=inside)
    tl.store(via_merge + target, tl.load(kept_via_merge + source, mask=real, other=0), mask=inside)
    tl.store(survival + target, tl.load(kept_survival + source, mask=real, other=0.0), mask=inside)
    tl.store(value + target, tl.load(kept_value + source, mask=real, other=0.0), mask=inside)

    position = tl.load(positions + root)
    tl.store(prefix_lens + request, position.to(tl.int32))
    tl.store(positions + root + line, position + deep, mask=line < num_rows)
    deepest = tl.max(deep, 0).to(tl.int32)
    one = tl.full([BLOCK], 1, tl.int64)
    for word in tl.static_range(WORDS):
        bits = tl.zeros([BLOCK], tl.int64)
        at = line
        climbs = line < num_rows
        # A row without a node needs two steps: itself and the root.
        for _ in range(0, tl.maximum(deepest, 1) + 1):
            bits = bits | tl.where(climbs & (at // 64 == word), one << (at % 64).to(tl.int64), 0)
            climbs = climbs & (at > 0)
            at = tl.load(kept_parent + slot * places + at, mask=climbs & (at <= nodes), other=0).to(tl.int32)
        tl.store(mask + (first + line) * WORDS + word, bits, mask=line < num_rows)
