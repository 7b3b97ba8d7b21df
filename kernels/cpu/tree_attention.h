// What a task of the tree attention kernel reads; see tree_attention.cpp for the plan, tree_attention_body.h
// for the work.
#pragma once

#include "isa.h"
#include "paged_cache.h"

namespace gsd {

constexpr int64_t kTile = 32;   // keys that one query-key micro-kernel multiplies
// Keys of a softmax of its own. Spans begin at multiples of it in every row's sequence, and a row adds up its spans in
// their order, so its sums do not depend on who computes which of them, nor on the rows beside it.
constexpr int64_t kSpan = 256;
// Row stride of the scores: not a power of two, so that rows do not fall into the same cache sets.
constexpr int64_t kScoreStride = kSpan + 16;
constexpr int64_t kMostVectors = 64;  // of a task: their scores should stay in the second-level cache
constexpr int64_t kPairStride = kScoreStride / 2;  // of the same as pairs of bfloat16

struct TreeAttention {
  PagedCache cache;
  // How pages can be read without copying them (the fast path of the "vec" layouts).
  bool keys_in_place, values_in_place;

  char* output;
  const char* query;
  int64_t output_row, output_head, query_row, query_head;  // strides, elements

  const int32_t* block_table;
  int64_t block_table_row;
  const int32_t* query_start;
  const int32_t* prefix;
  const int64_t* positions;
  const int64_t* mask;
  int64_t mask_words;
  const float* sinks;  // or null

  int64_t group;   // query heads of a KV head
  int64_t window;  // 0: none
  float scale, softcap;
};

// Query vectors [begin, end) of one request and KV head; vector i is row i / group, query head i % group.
// With splits > 1, part `split` of the spans only: what each finds goes to `partial` and is added up afterwards.
struct AttentionTask {
  int32_t request, kv_head, begin, end;
  int32_t split, splits;
  int64_t partial;  // where the partial results of all spans begin
  int64_t cost;
};

// A row's sequence is the prefix up to its position and then the slots that it attends. A key of the prefix has its
// index as its place in it, and the slots follow without the gaps that their indices have: as they would lie in the
// prefix, were they accepted.

// One past the last key of the prefix that a row attends: the prefix is causal.
inline int64_t prefix_end(const TreeAttention& op, int64_t prefix, int64_t row) {
  return std::min(prefix, std::max<int64_t>(0, op.positions[row] + 1));
}

// The first key in a row's window.
inline int64_t window_begin(const TreeAttention& op, int64_t row) {
  return op.window ? std::max<int64_t>(0, op.positions[row] - op.window + 1) : 0;
}

// Bits of the mask words of `row` from slot `slot` on, 16 of them.
inline uint32_t slot_bits(const TreeAttention& op, int64_t row, int64_t slot) {
  const int64_t word = slot / 64, shift = slot % 64;
  if (word >= op.mask_words) return 0;
  const int64_t* words = op.mask + row * op.mask_words;
  uint64_t bits = static_cast<uint64_t>(words[word]) >> shift;
  if (shift > 48 && word + 1 < op.mask_words) bits |= static_cast<uint64_t>(words[word + 1]) << (64 - shift);
  return bits & 0xffff;
}

// Bit i: `row` attends key t + i, of 16.
inline uint32_t allowed(const TreeAttention& op, int64_t prefix, int64_t row, int64_t t) {
  uint32_t bits = 0;
  if (t < prefix) {
    bits = 0xffffu >> (16 - std::clamp<int64_t>(prefix_end(op, prefix, row) - t, 0, 16));
    const int64_t hidden = window_begin(op, row) - t;
    if (hidden > 0) bits &= hidden >= 16 ? 0 : 0xffffu << hidden;
  }
  if (t >= prefix) bits |= slot_bits(op, row, t - prefix);
  else if (t + 16 > prefix) bits |= slot_bits(op, row, 0) << (prefix - t);
  return bits & 0xffff;
}

// How many of its slots before slot `end` a row attends.
inline int64_t slots_before(const TreeAttention& op, int64_t row, int64_t end) {
  int64_t count = 0;
  for (int64_t w = 0; w < op.mask_words && 64 * w < end; ++w) {
    const uint64_t word = op.mask[row * op.mask_words + w];
    count += __builtin_popcountll(end - 64 * w >= 64 ? word : word & ((uint64_t{1} << (end - 64 * w)) - 1));
  }
  return count;
}

inline int64_t slots_of(const TreeAttention& op, int64_t row) { return slots_before(op, row, 64 * op.mask_words); }

// The place of the first of a row's `slots` slots. A mask lacks the slots before the row's window, so the place is
// known from the row's own, the last one.
inline int64_t first_slot_place(const TreeAttention& op, int64_t prefix, int64_t row, int64_t slots) {
  const int64_t behind = prefix_end(op, prefix, row);
  return op.window ? std::max(behind, op.positions[row] + 1 - slots) : behind;
}

// One past the last place of a row's sequence.
inline int64_t places_end(const TreeAttention& op, int64_t prefix, int64_t row) {
  const int64_t slots = slots_of(op, row);
  return slots ? first_slot_place(op, prefix, row, slots) + slots : prefix_end(op, prefix, row);
}

// One past the last index of all that a row attends.
inline int64_t keys_end(const TreeAttention& op, int64_t prefix, int64_t row) {
  for (int64_t w = op.mask_words; w-- > 0;) {
    const uint64_t word = op.mask[row * op.mask_words + w];
    if (word != 0) return prefix + 64 * w + 64 - __builtin_clzll(word);
  }
  return prefix_end(op, prefix, row);
}

// Where what a task's rows attend lies.
struct KeyRange {
  int64_t first = 0, end = 0;  // indices: all of it is in [first, end)
  int64_t direct_end = 0;      // keys before it have their index as their place in every row's sequence
  int64_t places = 0;          // one past the last place

  int64_t first_span() const { return first / kSpan; }
  int64_t spans() const { return std::max<int64_t>(0, (places + kSpan - 1) / kSpan - first_span()); }
};

inline KeyRange range_of(const TreeAttention& op, const AttentionTask& task) {
  const int64_t row0 = op.query_start[task.request], prefix = op.prefix[task.request];
  KeyRange range;
  range.first = prefix;
  for (int64_t row = row0 + task.begin / op.group; row <= row0 + (task.end - 1) / op.group; ++row) {
    range.first = std::min(range.first, window_begin(op, row));
    range.end = std::max(range.end, keys_end(op, prefix, row));
    range.places = std::max(range.places, places_end(op, prefix, row));
  }
  range.direct_end = range.end > prefix ? prefix / kTile * kTile : range.end;
  return range;
}

// Floats of one span's result: per vector the sums, the highest score and the sum of weights.
inline int64_t span_floats(int64_t vectors, int64_t head_size) { return vectors * (round_up(head_size, 16) + 2); }

// Floats of scratch that a task of `vectors` query vectors needs, the most that any data type takes.
inline int64_t scratch_floats(int64_t vectors, int64_t head_size) {
  const int64_t padded = round_up(head_size, 16);
  return vectors * (head_size + kScoreStride + kTile + kPairStride) + 2 * span_floats(vectors, head_size) +
         kTile * head_size + kSpan * padded + 9 * 16;
}

struct AttentionFns {
  void (*run)(const TreeAttention&, const AttentionTask&, float* scratch, float* partials);
  void (*merge)(const TreeAttention&, const AttentionTask&, float* scratch, float* partials);
};

}  // namespace gsd
