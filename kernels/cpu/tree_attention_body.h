// The tree attention kernel for one instruction set (see each_isa.h).
//
// A task goes over the places of its rows' sequences in spans of kSpan. Of each: scores = Q K^T, hidden ones become -inf,
// P = softmax of the span alone, O = P V; then the span's O joins the sum of those before it. The product P V runs over
// the keys that a group of vectors has in common, and then over the last keys of each row, which are those of its own:
// what a row does not attend never meets a factor, so it may be NaN.
// Keys and values are multiplied where they lie if the layout allows (columns of 16 contiguous elements),
// converted in the micro-kernel; other layouts and incomplete tiles are first copied into scratch, as floats.
// With GSD_BF16 all stays bfloat16, multiplied pair by pair without conversion; the softmax's weights are rounded to
// bfloat16 for that, as FlashAttention rounds them.
//
// A step's weights drive the KV cache out of the caches, and how it is read is not what processors guess ahead. So
// values are fetched while their keys are multiplied, and a span's keys while the values of the one before it are.

#include "multiply_body.h"

#include "page_copy_body.h"

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
  static constexpr int64_t kWide = kVectors * kLanes;  // dimensions that are multiplied at once
  static constexpr std::make_integer_sequence<int, kMaxRows> sizes{};

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
    slot_scores_ = take(count_ * kTile);
    own_ = take(span_floats(count_, size_));
    sum_ = result_at(take(span_floats(count_, size_)));
    weights_ = kPer == 1 ? reinterpret_cast<Factor*>(scores_) : reinterpret_cast<Factor*>(take(count_ * kPairStride));
    num_groups_ = (count_ + kMaxRows - 1) / kMaxRows;
  }

  void run(const AttentionTask& task, float* partials) {
    pack_queries();
    find_range(task);
    start_sum();
    const int64_t spans = range_.spans(), last = spans * (task.split + 1) / task.splits;
    int64_t span = spans * task.split / task.splits;
    const auto begin_of = [&](int64_t s) {
      return std::max((range_.first_span() + s) * kSpan, range_.first / kTile * kTile);
    };
    fetch_end_ = last == spans ? range_.end : begin_of(last);
    if (span < last) fetch_keys(begin_of(span), begin_of(span) + kSpan);
    for (; span < last; ++span) {
      const int64_t begin = begin_of(span), end = std::min(begin_of(span + 1), range_.places);
      const Result result = result_at(task.splits > 1 ? partials + task.partial + span * floats() : own_);
      score(begin, end);
      softmax(begin, end, result);
      add_values(begin, end, result.output);
      if (task.splits == 1) join(result);
    }
    if (task.splits == 1) finish();
  }

  // Adds up the spans that the splits of `task` found.
  void merge(const AttentionTask& task, float* partials) {
    start_sum();
    const int64_t spans = range_of(op_, task).spans();
    for (int64_t span = 0; span < spans; ++span) join(result_at(partials + task.partial + span * floats()));
    finish();
  }

 private:
  // Per vector: sums of weighted values [padded_], the highest score, the sum of weights.
  struct Result {
    float *output, *highest, *total;
  };
  int64_t floats() const { return span_floats(count_, size_); }
  Result result_at(float* at) const { return {at, at + count_ * padded_, at + count_ * padded_ + count_}; }

  // The query vectors fall into num_groups_ groups of nearly equal size; group g begins here.
  int64_t group_begin(int64_t g) const { return count_ * g / num_groups_; }
  int64_t row_of(int64_t vector) const { return row0_ + (begin_ + vector) / op_.group; }
  int64_t head_of(int64_t vector) const { return kv_head_ * op_.group + (begin_ + vector) % op_.group; }
  // One past the row's last vector in this task.
  int64_t vectors_end(int64_t row) const { return std::min(count_, (row + 1 - row0_) * op_.group - begin_); }

  // Each group packed [factors][rows].
  void pack_queries() {
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
  }

  // No span yet, but the sinks.
  void start_sum() {
    for (int64_t i = 0; i < count_; ++i) {
      sum_.highest[i] = op_.sinks ? op_.sinks[head_of(i)] : std::numeric_limits<float>::lowest();
      sum_.total[i] = op_.sinks ? 1.0f : 0.0f;
    }
    std::memset(sum_.output, 0, count_ * padded_ * sizeof(float));
  }

  void find_range(const AttentionTask& task) {
    range_ = range_of(op_, task);
    common_end_ = 0;
    for (int64_t g = 0; g < num_groups_; ++g) {
      int64_t end = range_.direct_end == range_.end ? range_.end : prefix_;
      for (int64_t row = row_of(group_begin(g)); row <= row_of(group_begin(g + 1) - 1); ++row)
        end = std::min(end, prefix_end(op_, prefix_, row));
      common_[g] = end / kPer * kPer;
      common_end_ = std::max(common_end_, common_[g]);
    }
  }

  // All of [from, from + count) may be read: the keys exist and their blocks hold live data.
  bool inside(int64_t from, int64_t count) const { return from >= range_.first && from + count <= range_.end; }

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
    for (int64_t t = begin; t < std::min(end, fetch_end_); t += kTile) {
      const auto [from, bytes] = share_of(key_page(t), t, kTile);
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
    }
  }

  // Part `part` of `parts` of the share of tokens [t, t + count), fetched in the course of `products` products.
  template <typename Page>
  Ahead ahead(const Page& page_of, int64_t t, int64_t count, int64_t part, int64_t parts, int64_t products) const {
    if (t >= fetch_end_) return {reinterpret_cast<const char*>(query_), 0};
    const auto [from, bytes] = share_of(page_of(t), t, count);
    const int64_t begin = bytes * part / parts / 64 * 64, end = bytes * (part + 1) / parts;
    return {from + begin, (end - begin + products - 1) / products};
  }

  void score(int64_t begin, int64_t end) {
    for (int64_t t = begin; t < std::min(end, range_.direct_end); t += kTile)
      score_tile(t, scores_ + (t - begin), kScoreStride);
    if (range_.direct_end < range_.end && end > range_.direct_end) place_slots(begin, end);
  }

  // The scores of all keys behind the direct ones, each at its place in its row's sequence if that is in [begin, end).
  void place_slots(int64_t begin, int64_t end) {
    const int64_t from = std::max(range_.direct_end, begin) - begin, stop = round_up(end - begin, 16);
    for (int64_t i = 0; i < count_; ++i)
      std::fill(scores_ + i * kScoreStride + from, scores_ + i * kScoreStride + stop,
                -std::numeric_limits<float>::infinity());
    for (int64_t t = range_.direct_end; t < range_.end; t += kTile) {
      score_tile(t, slot_scores_, kTile);
      for (int64_t i = 0, next; i < count_; i = next) {
        const int64_t row = row_of(i);
        next = vectors_end(row);
        uint32_t bits = allowed(op_, prefix_, row, t) | allowed(op_, prefix_, row, t + 16) << 16;
        if (bits == 0) continue;
        // What a row attends of a tile are neighbours in its sequence.
        int64_t at = place_of(row, t + __builtin_ctz(bits)) - begin;
        for (; bits; bits &= bits - 1, ++at) {
          if (at < 0 || at >= end - begin) continue;
          const float* score = slot_scores_ + __builtin_ctz(bits);
          for (int64_t v = i; v < next; ++v) scores_[v * kScoreStride + at] = score[v * kTile];
        }
      }
    }
  }

  int64_t place_of(int64_t row, int64_t t) const {
    if (t < prefix_) return t;
    return first_slot_place(op_, prefix_, row, slots_of(op_, row)) + slots_before(op_, row, t - prefix_);
  }

  // Keys [t, t + kTile) by all vectors; rows of `to` are ld_to apart.
  void score_tile(int64_t t, float* to, int64_t ld_to) {
    if (op_.keys_in_place && inside(t, kTile)) {
      const T* column[2];
      for (int i = 0; i < 2; ++i) {
        const int64_t at = t + 16 * i;
        column[i] = key_page(at) + cache_.key.token[at % cache_.block_size] + cache_.key.dim[0];
      }
      const int64_t ld = cache_.key.dim[1] - cache_.key.dim[0];
      multiply_keys(column, ld, t, to, ld_to);
    } else {
      copy_keys(t);
      const Held* column[2] = {keys_, keys_ + 16};
      multiply_keys(column, kTile, t, to, ld_to);
    }
  }

  // column: the first dimension of keys 0..15 and 16..31 of the tile; ld: distance of dimensions; t: its first key
  template <typename B>
  void multiply_keys(const B* const column[2], int64_t ld, int64_t t, float* scores, int64_t ld_scores) {
    constexpr int64_t kCalls = kTile / kLanes / kVectors;
    const auto values_ahead = [&](int64_t call) {
      const auto page = [this](int64_t token) { return value_page(token); };
      return ahead(page, t, kTile, call, num_groups_ * kCalls, size_ / kPer);
    };
    for (int64_t g = 0; g < num_groups_; ++g) {
      const int64_t begin = group_begin(g), rows = group_begin(g + 1) - begin;
      const Factor* query = query_ + begin * (size_ / kPer);
      float* to = scores + begin * ld_scores;
#if GSD_BF16
      static_assert(kTile == kVectors * kLanes);
      pair_score_fn(rows, sizes)(query, column, ld, size_ / 2, op_.scale, to, ld_scores, values_ahead(g));
#else
      const MultiplyFn<B> fn = score_fn<B>(rows, sizes);
      for (int v = 0; v < kTile / kLanes; v += kVectors) {
        const B* vectors[kVectors];
        for (int n = 0; n < kVectors; ++n)
          vectors[n] = column[(v + n) * kLanes / 16] + (v + n) * kLanes % 16;
        fn(query, vectors, ld, size_, to + v * kLanes, ld_scores, values_ahead(g * kCalls + v / kVectors));
      }
#endif
    }
    if (op_.softcap != 0.0f) cap(scores, ld_scores);
  }

  // Never inlined, nor is `join`: two compilations of one formula might fuse other products with their sums.
  __attribute__((noinline)) void cap(float* scores, int64_t ld) const {
    const float inverse = 1.0f / op_.softcap;
    for (int64_t i = 0; i < count_; ++i)
      for (float* at = scores + i * ld; at < scores + i * ld + kTile; at += kLanes)
        store(at, tanh_of(load(at) * inverse) * op_.softcap);
  }

  // Keys [t, t + kTile) as keys_[head_size][kTile], zero where none may be read.
  void copy_keys(int64_t t) {
    if (!inside(t, kTile)) std::memset(keys_, 0, kTile * size_ * sizeof(Held));
    const int64_t stop = std::min(t + kTile, range_.end);
    for (int64_t at = std::max(t, range_.first), count; at < stop; at += count) {
      const int64_t offset = at % cache_.block_size;
      count = std::min(stop - at, cache_.block_size - offset);
      copy_from_page(key_page(at), cache_.key.dim, size_, cache_.key.token + offset, count, keys_ + (at - t),
                     kTile);
    }
  }

  // Values [t, stop) as rows of values_ that start at `to`; the rest of 16 rows is zero.
  void copy_values(int64_t t, int64_t stop, Held* to) {
    if (!inside(t, 16) || padded_ != size_) std::memset(to, 0, 16 * padded_ * sizeof(Held));
    for (int64_t at = std::max(t, range_.first), count; at < stop; at += count) {
      const int64_t offset = at % cache_.block_size;
      count = std::min(stop - at, cache_.block_size - offset);
      copy_from_page(value_page(at), cache_.value.token + offset, count, cache_.value.dim, size_,
                     to + (at - t) * padded_, padded_);
    }
  }

  // Scores of direct keys that a row does not attend become -inf.
  void hide(float* score, int64_t row, int64_t begin, int64_t end) const {
    const int64_t window = window_begin(op_, row), seen = prefix_end(op_, prefix_, row);
    vi lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    const vf hidden = splat(-std::numeric_limits<float>::infinity());
    for (int64_t t = begin; t < end; t += 16) {
      if (t >= window && t + 16 <= seen) {  // go on where the row's prefix ends
        t = seen / 16 * 16 - 16;
        continue;
      }
      const int32_t bits = allowed(op_, prefix_, row, t);
      if (bits == 0xffff) continue;
      for (int v = 0; v < 16; v += kLanes) {
        float* at = score + (t - begin) + v;
        const vi seen = ((vi{} + (bits >> v)) >> lane) & 1;
        store(at, seen != 0 ? load(at) : hidden);
      }
    }
  }

  // Turns the span's scores into weights e^(score - highest), and starts its result.
  void softmax(int64_t begin, int64_t end, const Result& result) {
    const int64_t length = round_up(end - begin, 16), direct = round_up(std::min(end, range_.direct_end), 16);
    std::memset(result.output, 0, count_ * padded_ * sizeof(float));
    for (int64_t i = 0; i < count_; ++i) {
      float* score = scores_ + i * kScoreStride;
      const int64_t row = row_of(i);
      if (direct > prefix_end(op_, prefix_, row) || begin < window_begin(op_, row)) hide(score, row, begin, direct);
      vf high = splat(std::numeric_limits<float>::lowest());
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
      result.highest[i] = highest;
      result.total[i] = sum_of_lanes(sum);
    }
  }

  // Adds the next span to the sum.
  __attribute__((noinline)) void join(const Result& span) {
    for (int64_t i = 0; i < count_; ++i) {
      const float highest = std::max(sum_.highest[i], span.highest[i]);
      const float before = exp_of(splat(sum_.highest[i] - highest))[0];
      const float weight = exp_of(splat(span.highest[i] - highest))[0];
      sum_.highest[i] = highest;
      sum_.total[i] = sum_.total[i] * before + span.total[i] * weight;
      float* sum = sum_.output + i * padded_;
      const float* added = span.output + i * padded_;
      for (int64_t d = 0; d < padded_; d += kLanes) store(sum + d, load(sum + d) * before + load(added + d) * weight);
    }
  }

  void add_values(int64_t begin, int64_t end, float* output) {
    add_common(begin, std::min(end, common_end_), output);
    for (int64_t g = 0; g < num_groups_; ++g)
      for (int64_t i = group_begin(g), next; i < group_begin(g + 1); i = next) {
        const int64_t row = row_of(i), from = std::max(begin, common_[g]);
        next = std::min(group_begin(g + 1), vectors_end(row));
        const int64_t stop = std::min(end, places_end(op_, prefix_, row));
        if (from >= stop) continue;
        const int64_t length = round_up(stop - from, kPer);
        copy_sequence(row, from, stop, length);
        const auto no_fetch = [&] { return Ahead{reinterpret_cast<const char*>(query_), 0}; };
        add_rows(i, next - i, values_, nullptr, padded_, from - begin, length, output, no_fetch);
      }
  }

  // Values of places [from, stop) of a row's sequence as rows of values_, of which `length` are set, to 0 elsewhere.
  void copy_sequence(int64_t row, int64_t from, int64_t stop, int64_t length) {
    std::memset(values_, 0, length * padded_ * sizeof(Held));
    const int64_t behind = std::min(stop, prefix_end(op_, prefix_, row));
    for (int64_t t = std::max(from, window_begin(op_, row)); t < behind; ++t) copy_value(t, values_ + (t - from) * padded_);
    const int64_t slots = slots_of(op_, row);
    int64_t place = first_slot_place(op_, prefix_, row, slots);
    if (place + slots <= from) return;
    for (int64_t w = 0; w < op_.mask_words; ++w)
      for (uint64_t bits = op_.mask[row * op_.mask_words + w]; bits; bits &= bits - 1, ++place)
        if (place >= from && place < stop)
          copy_value(prefix_ + 64 * w + __builtin_ctzll(bits), values_ + (place - from) * padded_);
  }

  void copy_value(int64_t t, Held* to) const {
    const int32_t* token = cache_.value.token + t % cache_.block_size;
    if (op_.values_in_place) copy_row(value_page(t), *token, cache_.value.dim, size_, to);
    else copy_from_page(value_page(t), token, 1, cache_.value.dim, size_, to, padded_);
  }

  // Values that all vectors of a group attend, of [begin, end). Multiplies runs of keys, as long as they lie at one
  // distance: pages in place, or one copied run.
  void add_common(int64_t begin, int64_t end, float* output) {
    const int64_t step = cache_.value.token[1] - cache_.value.token[0];
    for (int64_t t = begin, next; t < end; t = next) {
      if (op_.values_in_place && inside(t, 16)) {
        const int64_t offset = t % cache_.block_size;
        const int64_t whole = std::min(range_.end - t, cache_.block_size - offset) / 16 * 16;
        next = std::min(end, t + whole);
        const T* values = value_page(t) + cache_.value.token[offset];
        add_run(values, cache_.value.dim, step, t, begin, next - t, output);
        continue;
      }
      next = std::min(t + 16, end);
      copy_values(t, next, values_);
      while (next < end && !(op_.values_in_place && inside(next, 16))) {
        const int64_t stop = std::min(next + 16, end);
        copy_values(next, stop, values_ + (next - t) * padded_);
        next = stop;
      }
      add_run(values_, nullptr, padded_, t, begin, next - t, output);
    }
  }

  // values: `length` rows at distance ld; dim: where their dimensions lie, null: one after the other; t: the token of
  // the first, in a span that starts at `begin`
  template <typename B>
  void add_run(const B* values, const int32_t* dim, int64_t ld, int64_t t, int64_t begin, int64_t length,
               float* output) {
    const int64_t calls = num_groups_ * (padded_ / kWide + padded_ % kWide / kLanes);
    int64_t call = 0;
    for (int64_t g = 0; g < num_groups_; ++g) {
      const int64_t common = std::min(length, common_[g] - t);
      if (common <= 0) continue;
      const auto keys_ahead = [&] {
        const auto page = [this](int64_t token) { return key_page(token); };
        return ahead(page, t + kSpan, length, call++, calls, common / kPer);
      };
      const int64_t first = group_begin(g), rows = group_begin(g + 1) - first;
      add_rows(first, rows, values, dim, ld, t - begin, common, output, keys_ahead);
    }
  }

  // The same for vectors [first, first + rows), whose weights are those from `at` on.
  template <typename B, typename NextAhead>
  void add_rows(int64_t first, int64_t rows, const B* values, const int32_t* dim, int64_t ld, int64_t at,
                int64_t length, float* output, const NextAhead& next_ahead) {
    const auto column = [&](int64_t d) { return values + (dim ? dim[d] : d); };
    const Factor* weights = weights_ + first * (kScoreStride / kPer) + at / kPer;
#if GSD_BF16
    const MultiplyPairsFn wide = pair_output_fn<kVectors>(rows, sizes), narrow = pair_output_fn<1>(rows, sizes);
    const auto add = [&](MultiplyPairsFn fn, const B* const* vectors, int64_t d) {
      fn(weights, vectors, ld, length / 2, 1.0f, output + first * padded_ + d, padded_, next_ahead());
    };
#else
    const MultiplyFn<B> wide = output_fn<B, kVectors>(rows, sizes), narrow = output_fn<B, 1>(rows, sizes);
    const auto add = [&](MultiplyFn<B> fn, const B* const* vectors, int64_t d) {
      fn(weights, vectors, ld, length, output + first * padded_ + d, padded_, next_ahead());
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

  // A row that attends nothing has a total of 0: its output is 0.
  void finish() {
    for (int64_t i = 0; i < count_; ++i) {
      const float inverse = sum_.total[i] > 0.0f ? 1.0f / sum_.total[i] : 0.0f;
      const float* from = sum_.output + i * padded_;
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
  KeyRange range_;
  int64_t fetch_end_ = 0, num_groups_ = 0, common_end_ = 0;
  int64_t common_[kMostVectors];  // of each group of vectors: keys before it are common to all of its rows
  Held *keys_, *values_;
  Factor *query_, *weights_;  // weights_ in the place of scores_, if they are floats
  float *scores_, *slot_scores_, *own_;
  Result sum_;
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
