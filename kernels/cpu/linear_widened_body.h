// linear without products of bfloat16: weights are widened to float32 in registers; see linear_widened.cpp.

#if GSD_LANES >= 8
constexpr int kPanelVectors = 16 / GSD_LANES;
constexpr int kTileRows = GSD_LANES == 16 ? 12 : 6;  // leaves registers for the weights
// Inputs of a block, whose weights stay in the L1 cache while all rows are multiplied by them.
constexpr int64_t kBlockInputs = GSD_LANES == 16 ? 96 : 192;
constexpr int64_t kFetchPairs = GSD_LANES == 16 ? 1 : 8;  // pairs between prefetches of the next weights
constexpr int64_t kInputStride = kBlockInputs + 16;       // keeps rows from mapping to the same cache set

// Multiplies R rows by `pairs` pairs of inputs of P panels.
struct WidenedPart {
  const c10::BFloat16* weight;  // [pairs][P][16][2]
  const float* x;               // [R][kInputStride]
  float* sums;                  // [R][P][16]
  const char* ahead;            // the next weights, of which so many cache lines are prefetched every kFetchPairs pairs
  int64_t pairs, lines;
  bool adds;  // whether to add to `sums`
};

template <int R, int P>
static void widened_tile(const WidenedPart& part) {
  constexpr int kVectors = P * kPanelVectors;
  vf sum[R][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[r][v] = part.adds ? load(part.sums + (r * kVectors + v) * kLanes) : vf{};
  const float* x = part.x;
  const c10::BFloat16* weight = part.weight;
  const char* ahead = part.ahead;
  for (int64_t left = part.pairs; left > 0; left -= kFetchPairs) {
    for (int64_t line = 0; line < part.lines; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
    for (int64_t k = left < kFetchPairs ? left : kFetchPairs; k > 0; --k, x += 2, weight += P * 32) {
      vf even[kVectors], odd[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) load_pair(weight + 2 * v * kLanes, even[v], odd[v]);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vf first = splat(x[r * kInputStride]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[r][v] = first * even[v] + sum[r][v];
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const vf second = splat(x[r * kInputStride + 1]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[r][v] = second * odd[v] + sum[r][v];
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(part.sums + (r * kVectors + v) * kLanes, sum[r][v]);
}

template <int P, int... R>
static void widened_tile_of(int64_t rows, const WidenedPart& part, std::integer_sequence<int, R...>) {
  static constexpr void (*table[])(const WidenedPart&) = {widened_tile<R + 1, P>...};
  table[rows - 1](part);
}

// Widens rows [begin, end) of x to float32, [blocks][rows][kInputStride].
static void widen_inputs(const LinearJob& job, int64_t begin, int64_t end, float* inputs) {
  for (int64_t from = 0; from < 2 * job.pairs; from += kBlockInputs)
    for (int64_t row = begin; row < end; ++row, inputs += kInputStride) {
      const c10::BFloat16* x = job.x + row * job.x_stride + from;
      const int64_t count = 2 * job.pairs - from < kBlockInputs ? 2 * job.pairs - from : kBlockInputs;
      int64_t i = 0;
      for (; i + kLanes <= count; i += kLanes) store(inputs + i, load(x + i));
      for (; i < count; ++i) inputs[i] = x[i];
    }
}

// Multiplies rows [begin, end) by groups [first, last) of P panels. `inputs` has the size of widen_inputs' output, and
// `sums` that of [rows][P][16].
template <int P>
static void widened_rows(const LinearJob& job, int64_t begin, int64_t end, int64_t first, int64_t last, float* inputs,
                         float* sums) {
  constexpr int64_t kColumns = P * 16, kBlockPairs = kBlockInputs / 2;
  const int64_t rows = end - begin, chunks = (rows + kTileRows - 1) / kTileRows;
  widen_inputs(job, begin, end, inputs);
  for (int64_t group = first; group < last; ++group) {
    for (int64_t from = 0; from < job.pairs; from += kBlockPairs) {
      WidenedPart part;
      part.pairs = job.pairs - from < kBlockPairs ? job.pairs - from : kBlockPairs;
      part.weight = job.weight + (group * job.pairs + from) * P * 32;
      part.adds = from > 0;
      // The chunks share the prefetching of the next block, which keeps the memory busy all the time.
      const bool is_last = group + 1 == last && from + part.pairs == job.pairs;
      const int64_t lines = (P * kFetchPairs + chunks - 1) / chunks;
      const int64_t share = (part.pairs + kFetchPairs - 1) / kFetchPairs * lines;
      for (int64_t c = 0; c < chunks; ++c) {
        const int64_t top = rows * c / chunks, bottom = rows * (c + 1) / chunks;
        part.x = inputs + (from / kBlockPairs * rows + top) * kInputStride;
        part.sums = sums + top * kColumns;
        part.lines = is_last || c * lines >= P * kFetchPairs ? 0 : lines;
        part.ahead = reinterpret_cast<const char*>(part.weight) + (part.pairs * P + c * share) * 64;
        widened_tile_of<P>(bottom - top, part, std::make_integer_sequence<int, kTileRows>{});
      }
    }
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < kColumns; i += kLanes) {
        const int64_t column = group * kColumns + i;
        const vf sum = load(sums + row * kColumns + i);
        store(job.out + (begin + row) * job.columns + column, job.bias ? sum + load(job.bias + column) : sum);
      }
  }
}
#endif
