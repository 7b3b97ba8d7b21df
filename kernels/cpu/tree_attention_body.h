// The tree attention kernel for one instruction set (see each_isa.h).
//
// A task goes over its keys in spans of kSpan: scores = Q K^T, masked softmax update, O = O * old + P V.
// Keys and values are multiplied where they lie if the layout allows (columns of 16 contiguous elements),
// converted in the micro-kernel; other layouts and incomplete tiles are first copied into scratch, as floats.
// With GSD_BF16 all stays bfloat16, multiplied pair by pair without conversion; the softmax's weights are rounded to
// bfloat16 for that, as FlashAttention rounds them.
//
// A step's weights drive the KV cache out of the caches, and how it is read is not what processors guess ahead. So
// values are fetched while their keys are multiplied, and a span's keys while the values of the one before it are.

#include "multiply_body.h"

// Distance of 16 entries of an offset table: 1 contiguous, 2 every other one, 0 neither.
static inline int step_of_16(const int32_t* offset) {
  const int32_t step = offset[1] - offset[0];
  if (step != 1 && step != 2) return 0;
  for (int i = 1; i < 16; ++i)
    if (offset[i] - offset[i - 1] != step) return 0;
  return step;
}

// to[r * ld + c] = page[row[r] + column[c]]
template <typename T, typename To>
static void copy_from_page(const T* page, const int32_t* row, int64_t rows, const int32_t* column,
                           int64_t columns, To* to, int64_t ld) {
  for (int64_t c = 0; c < columns;) {
    const int step = columns - c >= 16 ? step_of_16(column + c) : 0;
    if (step == 0) {
      const int64_t last = std::min(c + 16, columns);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = c; i < last; ++i) to[r * ld + i] = static_cast<To>(page[row[r] + column[i]]);
      c = last;
      continue;
    }
    for (int64_t r = 0; r < rows; ++r) {
      const T* from = page + row[r] + column[c];
      To* out = to + r * ld + c;
      if (step == 1) {
        for (int v = 0; v < 16; v += kLanes) store(out + v, load(from + v));
        continue;
      }
      if constexpr (sizeof(T) == 2) {  // pairs of rows interleaved, as AMX wants its 16-bit operands
        if (r + 1 < rows && row[r + 1] == row[r] + 1) {
          for (int v = 0; v < 16; v += kLanes) {
            vf first, second;
            load_pair(from + 2 * v, first, second);
            store(out + v, first);
            store(out + ld + v, second);
          }
          ++r;
          continue;
        }
      }
      for (int i = 0; i < 16; ++i) out[i] = static_cast<To>(from[2 * i]);
    }
    c += 16;
  }
}

template <typename T>
class TaskRun {
#if GSD_BF16
  static_assert(std::is_same_v<T, c10::BFloat16>);
  using Factor = uint32_t;        // of a query, or of the softmax's weights: a pair of bfloat16
  using Held = c10::BFloat16;     // a copied key or value
  static constexpr int kPer = 2;  // elements of a factor
#else
  using Factor = float;
  using Held = float;
  static constexpr int kPer = 1;
#endif

 public:
  TaskRun(const TreeAttention& op, const AttentionTask& task, float* scratch)
      : op_(op), cache_(op.cache), request_(task.request), kv_head_(task.kv_head), begin_(task.begin),
        count_(task.end - task.begin), size_(cache_.head_size), padded_(round_up(size_, 16)),
        row0_(op.query_start[request_]), prefix_(op.prefix[request_]),
        blocks_(op.block_table + request_ * op.block_table_row) {
    float* free = scratch;
    auto take = [&free](int64_t floats) {
      float* taken = free;
      free += round_up(floats, 16);
      return taken;
    };
    keys_ = reinterpret_cast<Held*>(take(kTile * size_));
    values_ = reinterpret_cast<Held*>(take(kSpan * padded_));
    query_ = reinterpret_cast<Factor*>(take(count_ * size_));
    scores_ = take(count_ * kScoreStride);
    output_ = take(count_ * (padded_ + 2));
    highest_ = output_ + count_ * padded_;
    total_ = highest_ + count_;
    weights_ = kPer == 1 ? reinterpret_cast<Factor*>(scores_) : reinterpret_cast<Factor*>(take(count_ * kPairStride));
    num_groups_ = (count_ + kMaxRows - 1) / kMaxRows;
  }

  void run(const AttentionTask& task, float* partials) {
    start(task.split == 0);
    find_range();
    const int64_t first_tile = first_ / kTile, tiles = (end_ - first_tile * kTile + kTile - 1) / kTile;
    const int64_t begin = (first_tile + tiles * task.split / task.splits) * kTile;
    const int64_t end = std::min(end_, (first_tile + tiles * (task.split + 1) / task.splits) * kTile);
    task_end_ = end;
    fetch_keys(begin, begin + kSpan);
    for (int64_t t = begin; t < end; t += kSpan) {
      const int64_t span_end = std::min(t + kSpan, end);
      score(t, span_end);
      softmax(t, span_end);
      add_values(t, span_end);
    }
    if (task.splits == 1) return finish();
    // output_, highest_ and total_ lie one behind the other
    const int64_t floats = partial_floats(task, size_);
    std::memcpy(partials + task.partial + task.split * floats, output_, floats * sizeof(float));
  }

  // Adds up the splits of `task`, always in their order.
  void merge(const AttentionTask& task, const float* partials) {
    const int64_t floats = partial_floats(task, size_);
    std::memcpy(output_, partials + task.partial, floats * sizeof(float));
    for (int64_t split = 1; split < task.splits; ++split) {
      const float* output = partials + task.partial + split * floats;
      const float* highest = output + count_ * padded_;
      for (int64_t i = 0; i < count_; ++i) {
        if (highest[i] > highest_[i]) rescale(i, highest[i]);
        const float weight = exp_of(splat(highest[i] - highest_[i]))[0];
        total_[i] += weight * highest[count_ + i];
        float* sum = output_ + i * padded_;
        for (int64_t d = 0; d < padded_; d += kLanes)
          store(sum + d, load(output + i * padded_ + d) * weight + load(sum + d));
      }
    }
    finish();
  }

 private:
  // The query vectors fall into num_groups_ groups of nearly equal size; group g begins here.
  int64_t group_begin(int64_t g) const { return count_ * g / num_groups_; }
  int64_t row_of(int64_t vector) const { return row0_ + (begin_ + vector) / op_.group; }
  int64_t head_of(int64_t vector) const { return kv_head_ * op_.group + (begin_ + vector) % op_.group; }
  int64_t window_begin(int64_t row) const {
    return op_.window ? std::max<int64_t>(0, op_.positions[row] - op_.window + 1) : 0;
  }

  // Queries, each group packed [factors][rows]; empty softmax (or one that holds the sink).
  void start(bool with_sinks) {
    const float* sinks = with_sinks ? op_.sinks : nullptr;
    const T* query = reinterpret_cast<const T*>(op_.query);
    for (int64_t g = 0; g < num_groups_; ++g) {
      const int64_t begin = group_begin(g), rows = group_begin(g + 1) - begin;
      for (int64_t i = 0; i < rows; ++i) {
        const T* from = query + row_of(begin + i) * op_.query_row + head_of(begin + i) * op_.query_head;
        Factor* to = query_ + begin * (size_ / kPer) + i;
        for (int64_t d = 0; d < size_ / kPer; ++d) {
#if GSD_BF16
          to[d * rows] = load_raw<uint32_t>(from + 2 * d);  // scores are scaled, as this cannot be
#else
          to[d * rows] = static_cast<float>(from[d]) * op_.scale;
#endif
        }
      }
    }
    for (int64_t i = 0; i < count_; ++i) {
      highest_[i] = sinks ? sinks[head_of(i)] : std::numeric_limits<float>::lowest();
      total_[i] = sinks ? 1.0f : 0.0f;
    }
    std::memset(output_, 0, count_ * padded_ * sizeof(float));
  }

  // [first_, end_): every key that some row of this task attends lies in it.
  void find_range() {
    const int64_t first_row = row_of(0), last_row = row_of(count_ - 1);
    first_ = prefix_;
    end_ = 0;
    for (int64_t row = first_row; row <= last_row; ++row) {
      first_ = std::min(first_, window_begin(row));
      end_ = std::max(end_, keys_end(op_, prefix_, row));
    }
  }

  // All of [from, from + count) may be read: the keys exist and their blocks hold live data.
  bool inside(int64_t from, int64_t count) const { return from >= first_ && from + count <= end_; }

  int64_t block_of(int64_t t) const { return blocks_[t / cache_.block_size]; }
  const T* key_page(int64_t t) const { return cache_.key_page<T>(block_of(t), kv_head_); }
  const T* value_page(int64_t t) const { return cache_.value_page<T>(block_of(t), kv_head_); }

  // Where the share of tokens [t, t + count) of a page's bytes begins and how many they are; of t's page only. Where in
  // a page a token lies does not matter: all shares are fetched before the page is read.
  std::pair<const char*, int64_t> share_of(const T* page, int64_t t, int64_t count) const {
    const int64_t offset = t % cache_.block_size;
    count = std::min(count, cache_.block_size - offset);
    return {reinterpret_cast<const char*>(page + offset * size_), count * size_ * static_cast<int64_t>(sizeof(T))};
  }

  void fetch_keys(int64_t begin, int64_t end) const {
    for (int64_t t = begin; t < std::min(end, task_end_); t += kTile) {
      const auto [from, bytes] = share_of(key_page(t), t, kTile);
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
    }
  }

  // Part `part` of `parts` of the share of tokens [t, t + count), fetched in the course of `products` products.
  template <typename Page>
  Ahead ahead(const Page& page_of, int64_t t, int64_t count, int64_t part, int64_t parts, int64_t products) const {
    if (t >= task_end_) return {reinterpret_cast<const char*>(query_), 0};
    const auto [from, bytes] = share_of(page_of(t), t, count);
    const int64_t begin = bytes * part / parts / 64 * 64, end = bytes * (part + 1) / parts;
    return {from + begin, (end - begin + products - 1) / products};
  }

  void score(int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t += kTile) {
      if (op_.keys_in_place && inside(t, kTile)) {
        const T* column[2];
        for (int i = 0; i < 2; ++i) {
          const int64_t at = t + 16 * i;
          column[i] = key_page(at) + cache_.key.token[at % cache_.block_size] + cache_.key.dim[0];
        }
        const int64_t ld = cache_.key.dim[1] - cache_.key.dim[0];
        score_tile(column, ld, t, t - begin);
      } else {
        copy_keys(t);
        const Held* column[2] = {keys_, keys_ + 16};
        score_tile(column, kTile, t, t - begin);
      }
    }
  }

  // column: the first dimension of keys 0..15 and 16..31 of the tile; ld: distance of dimensions; t: its first key;
  // at: where in the span that is
  template <typename B>
  void score_tile(const B* const column[2], int64_t ld, int64_t t, int64_t at) {
    constexpr int64_t kCalls = kTile / kLanes / kVectors;
    const auto values_ahead = [&](int64_t call) {
      const auto page = [this](int64_t token) { return value_page(token); };
      return ahead(page, t, kTile, call, num_groups_ * kCalls, size_ / kPer);
    };
    constexpr auto sizes = std::make_integer_sequence<int, kMaxRows>{};
    for (int64_t g = 0; g < num_groups_; ++g) {
      const int64_t begin = group_begin(g), rows = group_begin(g + 1) - begin;
      const Factor* query = query_ + begin * (size_ / kPer);
      float* to = scores_ + begin * kScoreStride + at;
#if GSD_BF16
      static_assert(kTile == kVectors * kLanes);
      pair_score_fn(rows, sizes)(query, column, ld, size_ / 2, op_.scale, to, kScoreStride, values_ahead(g));
#else
      const MultiplyFn<B> fn = score_fn<B>(rows, sizes);
      for (int v = 0; v < kTile / kLanes; v += kVectors) {
        const B* vectors[kVectors];
        for (int n = 0; n < kVectors; ++n)
          vectors[n] = column[(v + n) * kLanes / 16] + (v + n) * kLanes % 16;
        fn(query, vectors, ld, size_, to + v * kLanes, kScoreStride, values_ahead(g * kCalls + v / kVectors));
      }
#endif
    }
  }

  // Keys [t, t + kTile) as keys_[head_size][kTile], zero where none may be read.
  void copy_keys(int64_t t) {
    if (!inside(t, kTile)) std::memset(keys_, 0, kTile * size_ * sizeof(Held));
    const int64_t stop = std::min(t + kTile, end_);
    for (int64_t at = std::max(t, first_), count; at < stop; at += count) {
      const int64_t offset = at % cache_.block_size;
      count = std::min(stop - at, cache_.block_size - offset);
      copy_from_page(key_page(at), cache_.key.dim, size_, cache_.key.token + offset, count, keys_ + (at - t),
                     kTile);
    }
  }

  // Values [t, stop) as rows of values_ that start at `to`; the rest of 16 rows is zero.
  void copy_values(int64_t t, int64_t stop, Held* to) {
    if (!inside(t, 16) || padded_ != size_) std::memset(to, 0, 16 * padded_ * sizeof(Held));
    for (int64_t at = std::max(t, first_), count; at < stop; at += count) {
      const int64_t offset = at % cache_.block_size;
      count = std::min(stop - at, cache_.block_size - offset);
      copy_from_page(value_page(at), cache_.value.token + offset, count, cache_.value.dim, size_,
                     to + (at - t) * padded_, padded_);
    }
  }

  // Bits of the mask words of `row` from tree slot `slot` on, 16 of them.
  uint32_t tree_bits(int64_t row, int64_t slot) const {
    const int64_t word = slot / 64, shift = slot % 64;
    if (word >= op_.mask_words) return 0;
    const int64_t* words = op_.mask + row * op_.mask_words;
    uint64_t bits = static_cast<uint64_t>(words[word]) >> shift;
    if (shift > 48 && word + 1 < op_.mask_words)
      bits |= static_cast<uint64_t>(words[word + 1]) << (64 - shift);
    return bits & 0xffff;
  }

  // Bit i: `row` attends key t + i.
  uint32_t allowed(int64_t row, int64_t t) const {
    uint32_t bits = 0;
    if (t < prefix_) {
      bits = 0xffffu >> (16 - std::clamp<int64_t>(prefix_end(op_, prefix_, row) - t, 0, 16));
      const int64_t hidden = window_begin(row) - t;
      if (hidden > 0) bits &= hidden >= 16 ? 0 : 0xffffu << hidden;
    }
    if (t >= prefix_) bits |= tree_bits(row, t - prefix_);
    else if (t + 16 > prefix_) bits |= tree_bits(row, 0) << (prefix_ - t);
    return bits & 0xffff;
  }

  // Scores of keys that a row does not attend become -inf.
  void hide(float* score, int64_t row, int64_t begin, int64_t end) const {
    const int64_t window = window_begin(row), seen = prefix_end(op_, prefix_, row);
    vi lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    const vf hidden = splat(-std::numeric_limits<float>::infinity());
    for (int64_t t = begin; t < end; t += 16) {
      if (t >= window && t + 16 <= seen) {  // go on where the row's prefix ends
        t = seen / 16 * 16 - 16;
        continue;
      }
      const int32_t bits = allowed(row, t);
      if (bits == 0xffff) continue;
      for (int v = 0; v < 16; v += kLanes) {
        float* at = score + (t - begin) + v;
        const vi seen = ((vi{} + (bits >> v)) >> lane) & 1;
        store(at, seen != 0 ? load(at) : hidden);
      }
    }
  }

  // Turns the span's scores into e^(score - highest), and rescales what earlier spans left.
  void softmax(int64_t begin, int64_t end) {
    const int64_t length = round_up(end - begin, 16);
    for (int64_t i = 0; i < count_; ++i) {
      float* score = scores_ + i * kScoreStride;
      const int64_t row = row_of(i);
      if (op_.softcap != 0.0f) cap(score, length);
      if (begin + length > prefix_end(op_, prefix_, row) || begin < window_begin(row)) hide(score, row, begin, end);
      vf high = splat(highest_[i]);
      for (int64_t c = 0; c < length; c += kLanes) high = max_of(load(score + c), high);
      const float highest = highest_lane(high);
      vf sum{};
#if GSD_BF16
      const float shift = highest == std::numeric_limits<float>::lowest() ? 0.0f : highest * kLog2E;
      for (int64_t c = 0; c < length; c += kLanes) {
        const vf p = exp2_of(load(score + c) * kLog2E - shift);
        const __m256bh rounded = _mm512_cvtneps_pbh(bits_as<__m512>(p));
        __builtin_memcpy(weights_ + i * kPairStride + c / 2, &rounded, sizeof(rounded));
        sum += p;
      }
#else
      for (int64_t c = 0; c < length; c += kLanes) {
        const vf p = exp_of(load(score + c) - highest);
        store(score + c, p);
        sum += p;
      }
#endif
      if (highest != highest_[i]) rescale(i, highest);
      total_[i] += sum_of_lanes(sum);
    }
  }

  void cap(float* score, int64_t length) const {
    const float inverse = 1.0f / op_.softcap;
    for (int64_t c = 0; c < length; c += kLanes)
      store(score + c, tanh_of(load(score + c) * inverse) * op_.softcap);
  }

  void rescale(int64_t vector, float highest) {
    const float factor = exp_of(splat(highest_[vector] - highest))[0];
    highest_[vector] = highest;
    total_[vector] *= factor;
    float* out = output_ + vector * padded_;
    for (int64_t d = 0; d < padded_; d += kLanes) store(out + d, load(out + d) * factor);
  }

  // Multiplies runs of keys, as long as they lie at one distance: pages in place, or one copied run.
  void add_values(int64_t begin, int64_t end) {
    const int64_t step = cache_.value.token[1] - cache_.value.token[0];
    for (int64_t t = begin, next; t < end; t = next) {
      next = std::min(t + 16, end);
      if (op_.values_in_place && inside(t, 16)) {
        const int64_t offset = t % cache_.block_size;
        const int64_t stop = std::min(end, t - offset + cache_.block_size);
        next = t + (stop - t) / 16 * 16;
        const T* values = value_page(t) + cache_.value.token[offset];
        add_run(values, cache_.value.dim, step, t, t - begin, next - t);
        continue;
      }
      copy_values(t, next, values_);
      while (next < end && !(op_.values_in_place && inside(next, 16))) {
        const int64_t stop = std::min(next + 16, end);
        copy_values(next, stop, values_ + (next - t) * padded_);
        next = stop;
      }
      add_run(values_, nullptr, padded_, t, t - begin, round_up(next - t, 16));
    }
  }

  // values: `length` rows at distance ld; dim: where their dimensions lie, null: one after the other; t: the token of
  // the first; at: where in the span that is
  template <typename B>
  void add_run(const B* values, const int32_t* dim, int64_t ld, int64_t t, int64_t at, int64_t length) {
    const auto column = [&](int64_t d) { return values + (dim ? dim[d] : d); };
    constexpr int64_t kWide = kVectors * kLanes;
    const int64_t calls = num_groups_ * (padded_ / kWide + padded_ % kWide / kLanes);
    int64_t call = 0;
    const auto keys_ahead = [&] {
      const auto page = [this](int64_t token) { return key_page(token); };
      return ahead(page, t + kSpan, length, call++, calls, length / kPer);
    };
    constexpr auto sizes = std::make_integer_sequence<int, kMaxRows>{};
    for (int64_t g = 0; g < num_groups_; ++g) {
      const int64_t begin = group_begin(g), rows = group_begin(g + 1) - begin;
      const Factor* weights = weights_ + begin * (kScoreStride / kPer) + at / kPer;
#if GSD_BF16
      const MultiplyPairsFn wide = pair_output_fn<kVectors>(rows, sizes), narrow = pair_output_fn<1>(rows, sizes);
      const auto add = [&](MultiplyPairsFn fn, const B* const* vectors, int64_t d) {
        fn(weights, vectors, ld, length / 2, 1.0f, output_ + begin * padded_ + d, padded_, keys_ahead());
      };
#else
      const MultiplyFn<B> wide = output_fn<B, kVectors>(rows, sizes), narrow = output_fn<B, 1>(rows, sizes);
      const auto add = [&](MultiplyFn<B> fn, const B* const* vectors, int64_t d) {
        fn(weights, vectors, ld, length, output_ + begin * padded_ + d, padded_, keys_ahead());
      };
#endif
      int64_t d = 0;
      for (; d + kWide <= padded_; d += kWide) {
        const B* vectors[kVectors] = {column(d), column(d + kLanes)};
        add(wide, vectors, d);
      }
      for (; d < padded_; d += kLanes) {
        const B* vectors[1] = {column(d)};
        add(narrow, vectors, d);
      }
    }
  }

  // A row that attends nothing has a total of 0: its output is 0.
  void finish() {
    for (int64_t i = 0; i < count_; ++i) {
      const float inverse = total_[i] > 0.0f ? 1.0f / total_[i] : 0.0f;
      const float* from = output_ + i * padded_;
      T* to = reinterpret_cast<T*>(op_.output) + row_of(i) * op_.output_row + head_of(i) * op_.output_head;
      int64_t d = 0;
      for (; d + kLanes <= size_; d += kLanes) store(to + d, load(from + d) * inverse);
      for (; d < size_; ++d) to[d] = static_cast<T>(from[d] * inverse);
    }
  }

  const TreeAttention& op_;
  const PagedCache& cache_;
  const int64_t request_, kv_head_, begin_, count_, size_, padded_, row0_, prefix_;
  const int32_t* const blocks_;
  int64_t first_ = 0, end_ = 0, task_end_ = 0, num_groups_ = 0;
  Held *keys_, *values_;
  Factor *query_, *weights_;  // weights_ in the place of scores_, if they are floats
  float *scores_, *output_, *highest_, *total_;
};

template <typename T>
static void run_task(const TreeAttention& op, const AttentionTask& task, float* scratch, float* partials) {
  TaskRun<T>(op, task, scratch).run(task, partials);
}

template <typename T>
static void merge_splits(const TreeAttention& op, const AttentionTask& task, float* scratch,
                         float* partials) {
  TaskRun<T>(op, task, scratch).merge(task, partials);
}
