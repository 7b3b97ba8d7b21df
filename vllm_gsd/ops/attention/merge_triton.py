"""Triton kernel of ``ops.attention.merge``: merge attention over disjoint sets of keys."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["num_parts", "lse_row", "part_lse_part", "part_lse_row"],
    do_not_specialize_on_alignment=["lse", "end_row"],
)
def merge_kernel(
    output, lse, parts, part_lses, end_row, num_parts, out_row, out_head, lse_row, part_part, part_row, part_head,
    part_lse_part, part_lse_row, HEAD_SIZE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_END: tl.constexpr, STORE_LSE: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads). Parts are added in a fixed order, so equal inputs give equal bits."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    if HAS_END:
        if row >= tl.load(end_row):
            return
    part = tl.arange(0, BLOCK_P).to(tl.int64)
    given = part < num_parts
    logs = tl.load(part_lses + part * part_lse_part + row * part_lse_row + head, mask=given, other=float("-inf"))
    logs = tl.where(logs == float("inf"), float("-inf"), logs)
    highest = tl.max(logs, 0)
    reference = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(logs - reference)
    total = tl.sum(weights, 0)
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_SIZE
    # A part without keys has weight 0 and may hold any value, even NaN.
    inside = (weights > 0.0)[:, None] & in_head[None, :]
    at = (part * part_part + row * part_row + head * part_head)[:, None] + d[None, :]
    values = tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
    merged = tl.sum(values * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(output + row * out_row + head * out_head + d, merged.to(output.dtype.element_ty), mask=in_head)
    if STORE_LSE:
        tl.store(lse + row * lse_row + head, highest + tl.log(tl.where(total == 0.0, 1.0, total)))
