"""Triton kernels of ``ops.topk``: the best of parts of a row, then the best of these. Rows need no sorting."""

import triton
import triton.language as tl


@triton.jit
def _next_best(value, number, left, MOST: tl.constexpr):
    """The highest value among those left and the lowest number that has it; MOST if none is left."""
    best = tl.max(tl.where(left, value, float("-inf")), 0)
    return best, tl.min(tl.where(left & (value == best), number, MOST), 0)


@triton.jit
def best_of_parts_kernel(
    values, tokens, highest, total, logits, row_stride, vocabulary, k, MOST: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (rows, parts). A part's k best logits and their tokens, its highest logit and sum of exponentials."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    number = part * BLOCK + tl.arange(0, BLOCK)
    left = number < vocabulary
    value = tl.load(logits + row * row_stride + number, mask=left, other=float("-inf")).to(tl.float32)
    best = tl.max(tl.where(value == value, value, float("-inf")), 0)
    # NaN and +inf make the sum NaN; a part with -inf alone has the sum 0.
    shifted = value - tl.where(best == float("-inf"), 0.0, best)
    tl.store(highest + row * parts + part, best)
    tl.store(total + row * parts + part, tl.sum(tl.exp(shifted), 0))
    value = tl.where(value == value, value, float("-inf"))
    for place in range(0, k):
        best, token = _next_best(value, number, left, MOST)
        tl.store(values + (row * parts + part) * k + place, best)
        tl.store(tokens + (row * parts + part) * k + place, token)
        left = left & (number != token)


@triton.jit
def best_of_rows_kernel(
    probs, ids, values, tokens, highest, total, parts, k, MOST: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (rows). The k best of a row's parts and their probabilities."""
    row = tl.program_id(0).to(tl.int64)
    part, lane = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    best = tl.load(highest + row * parts + part, mask=part < parts, other=float("-inf"))
    sums = tl.load(total + row * parts + part, mask=part < parts, other=0.0)
    peak = tl.max(best, 0)
    whole = tl.sum(sums * tl.where(best == float("-inf"), tl.where(sums == sums, 0.0, sums), tl.exp(best - peak)), 0)
    inside = lane < parts * k
    value = tl.load(values + row * parts * k + lane, mask=inside, other=float("-inf"))
    token = tl.load(tokens + row * parts * k + lane, mask=inside, other=MOST)
    left = token < MOST
    for place in range(0, k):
        best_value, chosen = _next_best(value, token, left, MOST)
        prob = tl.exp(best_value - peak) / whole
        # A row without a softmax has the peak -inf, or a NaN as its sum.
        tl.store(probs + row * k + place, tl.where((prob == prob) & (peak > float("-inf")), prob, 0.0))
        tl.store(ids + row * k + place, chosen.to(tl.int64))
        left = left & (token != chosen)
