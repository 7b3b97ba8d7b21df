"""Triton kernel of ``ops.attention.paged``: attention of tree rows over a paged KV cache.

A program holds BLOCK_M pairs (row, query head of one KV head) of one request. It attends a span of the prefix, BLOCK_N
keys at a time, with the online softmax of FlashAttention (Dao et al., 2022). The last span's program also attends the
tree's slots. ``ops.attention.merge`` merges the spans (split-KV, as in Flash-Decoding).

With BY_ROW a program holds the heads of one row, and attends its keys in the order of its path, in tiles that begin at
multiples of BLOCK_N. It does the same arithmetic whether the path is in the tree or, later, part of the prefix.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    q, highest, total, acc, attends, used, index, table, key_cache, value_cache, kv_head, in_head,
    k_block, k_token, k_head, v_block, v_token, v_head, score_scale, softcap, BLOCK_SIZE, SOFTCAP, DOT_DTYPE,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over the keys at logical indices ``index``; reads those that are ``used``.

    Scores are in units of log2. One function does it all because each call costs time in Triton's interpreter.
    """
    d = tl.arange(0, in_head.shape[0])
    block = tl.load(table + index // BLOCK_SIZE, mask=used, other=0).to(tl.int64)
    token = (index % BLOCK_SIZE).to(tl.int64)
    loaded = used[:, None] & in_head[None, :]
    at = block * k_block + token * k_token + kv_head * k_head
    key = tl.load(key_cache + at[:, None] + d[None, :], mask=loaded, other=0.0)
    at = block * v_block + token * v_token + kv_head * v_head
    value = tl.load(value_cache + at[:, None] + d[None, :], mask=loaded, other=0.0)

    scores = tl.dot(q.to(DOT_DTYPE), tl.trans(key.to(DOT_DTYPE)), input_precision="ieee")
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1). If e^2x overflows, this is 1, as it should be.
        double = tl.exp2(scores * (2.0 * LOG2E * score_scale / softcap))
        scores = softcap * LOG2E * (1.0 - 2.0 / (double + 1.0))
    else:
        scores = scores * (score_scale * LOG2E)
    scores = tl.where(attends, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    reference = tl.where(higher == float("-inf"), 0.0, higher)  # -inf if the row attends no key
    weights = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(highest - reference)
    total = total * shrink + tl.sum(weights, 1)
    rounded, value = weights.to(q.dtype).to(DOT_DTYPE), value.to(DOT_DTYPE)
    if SLOTS:
        # The model may compute NaN for a drafted token. Times 0, it would spoil the rows that do not attend it; those
        # that do are NaN by their scores.
        value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
    acc = tl.dot(rounded, value, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def _attend_prefix(
    q, highest, total, acc, row, valid, split, prefix, positions, sliding_window, table, key_cache, value_cache,
    kv_head, in_head, k_block, k_token, k_head, v_block, v_token, v_head, score_scale, softcap,
    num_splits, WINDOW, BLOCK_N, BLOCK_SIZE, SOFTCAP, DOT_DTYPE,
):  # fmt: skip
    """Attend the split's span of the prefix, from the first key that some row's window holds."""
    begin = 0
    if WINDOW:
        position = tl.load(positions + row, mask=valid, other=0x7FFFFFFF).to(tl.int32)
        begin = tl.minimum(tl.maximum(tl.min(position, 0) - sliding_window + 1, 0), prefix)
    span = tl.cdiv(tl.cdiv(prefix - begin, BLOCK_N), num_splits) * BLOCK_N
    begin = begin + split * span
    end = tl.minimum(begin + span, prefix)
    for start in range(begin, end, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        used = index < end
        attends = valid[:, None] & used[None, :]
        if WINDOW:
            attends = attends & (position[:, None] - index[None, :] < sliding_window)
            used = tl.max(attends.to(tl.int32), 0) != 0
        highest, total, acc = _attend(
            q, highest, total, acc, attends, used, index, table, key_cache, value_cache, kv_head, in_head, k_block,
            k_token, k_head, v_block, v_token, v_head, score_scale, softcap, BLOCK_SIZE, SOFTCAP, DOT_DTYPE, False,
        )  # fmt: skip
    return highest, total, acc


@triton.jit
def _attend_slots(
    q, highest, total, acc, row, valid, prefix, tree_mask, mask_row, num_words, table, key_cache, value_cache, kv_head,
    in_head, k_block, k_token, k_head, v_block, v_token, v_head, score_scale, softcap, BLOCK_N, BLOCK_SIZE, SOFTCAP,
    DOT_DTYPE,
):  # fmt: skip
    """Attend the tree's slots that the masks name."""
    for start in range(0, num_words * 64, BLOCK_N):
        # BLOCK_N divides 64, so one word holds a tile's bits.
        word = tl.load(tree_mask + row * mask_row + start // 64, mask=valid, other=0)
        slot = start + tl.arange(0, BLOCK_N)
        # Halves of a word, because a tile of 64-bit integers takes twice the registers.
        low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
        half = tl.where((slot % 64 < 32)[None, :], low[:, None], high[:, None])
        attends = ((half >> (slot % 32)[None, :]) & 1) != 0
        used = tl.max(attends.to(tl.int32), 0) != 0
        # The masks may have words for more nodes than this tree has.
        if tl.max(used.to(tl.int32), 0) != 0:
            highest, total, acc = _attend(
                q, highest, total, acc, attends, used, prefix + slot, table, key_cache, value_cache, kv_head, in_head,
                k_block, k_token, k_head, v_block, v_token, v_head, score_scale, softcap, BLOCK_SIZE, SOFTCAP,
                DOT_DTYPE, True,
            )  # fmt: skip
    return highest, total, acc


@triton.jit
def _attend_path(
    q, highest, total, acc, row, valid, prefix, tree_mask, mask_row, num_words, sliding_window, table, key_cache,
    value_cache, kv_head, in_head, k_block, k_token, k_head, v_block, v_token, v_head, score_scale, softcap, WINDOW,
    BLOCK_N, BLOCK_SIZE, SOFTCAP, DOT_DTYPE,
):  # fmt: skip
    """Attend the prefix and the slots of one row's path, in the order of their positions."""
    bit = tl.arange(0, 64)
    length = prefix
    for at in range(num_words):
        word = tl.load(tree_mask + row * mask_row + at)
        length += tl.sum(((word >> bit) & 1).to(tl.int32), 0)
    first = 0
    if WINDOW:
        first = tl.maximum(length - sliding_window, 0)
    for start in range(first // BLOCK_N * BLOCK_N, length, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        used = (position >= first) & (position < length)
        index = tl.where(position < prefix, position, prefix)
        if start + BLOCK_N > prefix:
            found = 0  # nodes of the path in earlier words
            for at in range(num_words):
                word = tl.load(tree_mask + row * mask_row + at)
                on_path = ((word >> bit) & 1).to(tl.int32)
                depth = found + tl.cumsum(on_path, 0) - on_path
                here = (depth[None, :] == (position - prefix)[:, None]) & (on_path != 0)[None, :]
                index += tl.sum(tl.where(here, at * 64 + bit[None, :], 0), 1)
                found += tl.sum(on_path, 0)
        attends = valid[:, None] & used[None, :]
        highest, total, acc = _attend(
            q, highest, total, acc, attends, used, index, table, key_cache, value_cache, kv_head, in_head, k_block,
            k_token, k_head, v_block, v_token, v_head, score_scale, softcap, BLOCK_SIZE, SOFTCAP, DOT_DTYPE, False,
        )  # fmt: skip
    return highest, total, acc


@triton.jit
def _pairs_of(tile, num_pairs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BY_ROW: tl.constexpr):
    """The first pair of a tile, and the end of the pairs that it may hold."""
    first, end = tile * BLOCK_M, num_pairs
    if BY_ROW:
        tiles_per_row: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
        end = (tile // tiles_per_row + 1) * GROUP
        first = end - GROUP + tile % tiles_per_row * BLOCK_M
    return first, end


@triton.jit
def _start(sinks, head, valid, split, BLOCK_M: tl.constexpr, SINKS: tl.constexpr):
    """The highest score and the sum of weights before any key: those of the sinks in the first split."""
    highest, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        if split == 0:
            highest, total = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E, total + 1.0
    return highest, total


# What varies between the batches of an engine is not specialised, so that nothing compiles while it serves.
@triton.jit(
    do_not_specialize=[
        "sliding_window", "num_words", "table_row", "mask_row", "lse_split", "lse_row", "m_tiles", "num_splits",
    ],
    do_not_specialize_on_alignment=["lse"],
)  # fmt: skip
def tree_attention_kernel(
    output, lse, query, key_cache, value_cache, block_table, query_start_loc, prefix_lens, positions, tree_mask,
    sinks, k_scale, v_scale, scale, softcap, sliding_window, num_words, out_split, out_row, out_head, lse_split,
    lse_row, q_row, q_head, k_block, k_token, k_head, v_block, v_token, v_head, table_row, mask_row, k_scale_head,
    v_scale_head, m_tiles, num_splits, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PREFIX: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, STORE_LSE: tl.constexpr,
    DOT_DTYPE: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """Grid (m tiles x splits, KV heads, requests). Tiles vary fastest, so programs that share keys run together."""
    tile, split = tl.program_id(0) % m_tiles, tl.program_id(0) // m_tiles
    kv_head, request = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first_row = tl.load(query_start_loc + request).to(tl.int64)
    num_pairs = (tl.load(query_start_loc + request + 1) - first_row) * GROUP
    first_pair, end_pair = _pairs_of(tile, num_pairs, GROUP, BLOCK_M, BY_ROW)
    if first_pair >= num_pairs:
        return
    pair = first_pair + tl.arange(0, BLOCK_M)
    valid = pair < end_pair
    row, head = first_row + pair // GROUP, kv_head * GROUP + pair % GROUP
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_SIZE
    inside = valid[:, None] & in_head[None, :]
    q = tl.load(query + (row * q_row + head * q_head)[:, None] + d[None, :], mask=inside, other=0.0)
    prefix, table = tl.load(prefix_lens + request), block_table + request * table_row
    score_scale = scale
    if K_SCALE:
        score_scale = scale * tl.load(k_scale + kv_head * k_scale_head)

    highest, total = _start(sinks, head, valid, split, BLOCK_M, SINKS)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if BY_ROW:
        highest, total, acc = _attend_path(
            q, highest, total, acc, first_row + first_pair // GROUP, valid, prefix, tree_mask, mask_row, num_words,
            sliding_window, table, key_cache, value_cache, kv_head, in_head, k_block, k_token, k_head, v_block, v_token,
            v_head, score_scale, softcap, WINDOW, BLOCK_N, BLOCK_SIZE, SOFTCAP, DOT_DTYPE,
        )  # fmt: skip
    elif PREFIX:
        highest, total, acc = _attend_prefix(
            q, highest, total, acc, row, valid, split, prefix, positions, sliding_window, table, key_cache, value_cache,
            kv_head, in_head, k_block, k_token, k_head, v_block, v_token, v_head, score_scale, softcap,
            num_splits, WINDOW, BLOCK_N, BLOCK_SIZE, SOFTCAP, DOT_DTYPE,
        )  # fmt: skip
    if not BY_ROW:
        if split == num_splits - 1:
            highest, total, acc = _attend_slots(
                q, highest, total, acc, row, valid, prefix, tree_mask, mask_row, num_words, table, key_cache,
                value_cache, kv_head, in_head, k_block, k_token, k_head, v_block, v_token, v_head, score_scale, softcap,
                BLOCK_N, BLOCK_SIZE, SOFTCAP, DOT_DTYPE,
            )  # fmt: skip

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if V_SCALE:
        result = result * tl.load(v_scale + kv_head * v_scale_head)
    at = (split.to(tl.int64) * out_split + row * out_row + head * out_head)[:, None] + d[None, :]
    tl.store(output + at, result.to(output.dtype.element_ty), mask=inside)
    if STORE_LSE:
        logs = (highest + tl.log2(tl.where(total == 0.0, 1.0, total))) / LOG2E  # highest is -inf where total is 0
        tl.store(lse + split.to(tl.int64) * lse_split + row * lse_row + head, logs, mask=valid)
