// What a task of the tree attention kernel reads; see tree_attention.cpp for the plan, tree_attention_body.h
// for the work.
#pragma once

#include "paged_cache.h"

namespace gsd {

constexpr int64_t kTile = 32;   // keys that one query-key micro-kernel multiplies
constexpr int64_t kSpan = 256;  // keys between two softmax updates
// Row stride of the scores: not a power of two, so that rows do not fall into the same cache sets.
constexpr int64_t kScoreStride = kSpan + 16;
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
// With splits > 1, part `split` of the keys only: what it finds goes to `partial` and is merged afterwards.
struct AttentionTask {
  int32_t request, kv_head, begin, end;
  int32_t split, splits;
  int64_t partial;  // where the partial results of all splits begin
  int64_t cost;
};

// One past the last key of the prefix that a row attends: the prefix is causal.
inline int64_t prefix_end(const TreeAttention& op, int64_t prefix, int64_t row) {
  return std::min(prefix, std::max<int64_t>(0, op.positions[row] + 1));
}

// One past the last key of all that a row attends.
inline int64_t keys_end(const TreeAttention& op, int64_t prefix, int64_t row) {
  for (int64_t w = op.mask_words; w-- > 0;) {
    const uint64_t word = op.mask[row * op.mask_words + w];
    if (word != 0) return prefix + 64 * w + 64 - __builtin_clzll(word);
  }
  return prefix_end(op, prefix, row);
}

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Floats of scratch that a task of `vectors` query vectors needs, the most that any data type takes.
inline int64_t scratch_floats(int64_t vectors, int64_t head_size) {
  const int64_t padded = round_up(head_size, 16);
  return vectors * (head_size + kScoreStride + padded + 2 + kPairStride) + kTile * head_size + kSpan * padded + 7 * 16;
}

// Floats of one split's partial result: per vector the sums, the highest score and the sum of weights.
inline int64_t partial_floats(const AttentionTask& task, int64_t head_size) {
  return (task.end - task.begin) * (round_up(head_size, 16) + 2);
}

struct AttentionFns {
  void (*run)(const TreeAttention&, const AttentionTask&, float* scratch, float* partials);
  void (*merge)(const TreeAttention&, const AttentionTask&, float* scratch, float* partials);
};

}  // namespace gsd
