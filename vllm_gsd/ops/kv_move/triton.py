"""Triton kernel of ``ops.kv_move.paged``: move KV rows within the caches of all layers at once."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_moves", "slots_row"])
def kv_move_kernel(
    caches, src_slots, dst_slots, elements, num_moves, slots_row, cache_block, cache_head, cache_token,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (caches, KV heads x chunks of a row, requests). A program first reads all its rows, then writes."""
    chunks = tl.cdiv(WIDTH, BLOCK_W)
    head = (tl.program_id(1) // chunks).to(tl.int64)
    chunk = tl.program_id(1) % chunks
    # ``elements`` only gives the dtype; the table of addresses gives the caches.
    cache = tl.load(caches + tl.program_id(0)).to(tl.pointer_type(elements.dtype.element_ty))
    if ALIGNED:
        cache = tl.multiple_of(cache, 16)
    move = tl.arange(0, BLOCK_M)
    at = tl.program_id(2).to(tl.int64) * slots_row + move
    src = tl.load(src_slots + at, mask=move < num_moves, other=-1)
    dst = tl.load(dst_slots + at, mask=move < num_moves, other=-1)
    element = chunk * BLOCK_W + tl.arange(0, BLOCK_W)
    moves = (src >= 0) & (dst >= 0)
    mask = moves[:, None] & (element < WIDTH)[None, :]
    source = src // BLOCK_SIZE * cache_block + src % BLOCK_SIZE * cache_token + head * cache_head
    target = dst // BLOCK_SIZE * cache_block + dst % BLOCK_SIZE * cache_token + head * cache_head
    rows = tl.load(cache + source[:, None] + element[None, :], mask=mask, other=0)
    # No warp may write before all warps have read.
    tl.debug_barrier()
    tl.store(cache + target[:, None] + element[None, :], rows, mask=mask)
