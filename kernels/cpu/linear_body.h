// Products of a few rows with a group of packed columns; see linear.cpp. Only in gsd::avx512bf16.

#if GSD_BF16
// Maximum rows of a tile of P panels: 24 of 32 registers hold sums, and each load of weights serves R products.
constexpr int most_rows(int panels) { return panels == 4 ? 6 : panels == 3 ? 8 : 12; }

// Multiplies R rows by `pairs` pairs of inputs of a group of P panels.
struct LinearPart {
  const c10::BFloat16 *x, *weight, *bias;
  const float* before;  // sums of the group's earlier inputs, [R][P][16]; null without any
  float* after;         // output of the sums; null for the last inputs, which write `out` [R][P * 16]
  c10::BFloat16* out;
  // The next weights. F cache lines per pair are prefetched into the L2 cache; in the L1 cache they would compete with
  // the present weights, which is a fifth slower on Zen 4.
  const char* ahead;
  int64_t x_stride, out_stride, pairs;
};

template <int R, int P, int F>
static void linear_tile(const LinearPart& part) {
  __m512 sum[R][P];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p)
      sum[r][p] = part.before ? _mm512_loadu_ps(part.before + (r * P + p) * 16) : _mm512_setzero_ps();
  for (int64_t k = 0; k < part.pairs; ++k) {
    __m512bh weights[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) weights[p] = bits_as<__m512bh>(_mm512_loadu_si512(part.weight + (k * P + p) * 32));
#pragma GCC unroll 4
    for (int f = 0; f < F; ++f) _mm_prefetch(part.ahead + (k * F + f) * 64, _MM_HINT_T1);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = bits_as<__m512bh>(_mm512_set1_epi32(load_raw<int>(part.x + r * part.x_stride + 2 * k)));
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], pair, weights[p]);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
    const __m512 added = part.bias ? load(part.bias + p * 16) : _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      if (part.after) {
        _mm512_storeu_ps(part.after + (r * P + p) * 16, sum[r][p]);
        continue;
      }
      const __m256bh rounded = _mm512_cvtneps_pbh(part.bias ? sum[r][p] + added : sum[r][p]);
      c10::BFloat16* const to = part.out + r * part.out_stride + p * 16;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits_as<__m256i>(rounded));
    }
  }
}

using LinearTile = void (*)(const LinearPart&);

template <int P, int F, int... R>
static LinearTile tile_of_rows(int rows, std::integer_sequence<int, R...>) {
  static constexpr LinearTile table[] = {linear_tile<R + 1, P, F>...};
  return table[rows - 1];
}

template <int P, int... F>
static LinearTile tile_of_lines(int rows, int lines, std::integer_sequence<int, F...>) {
  using Rows = std::make_integer_sequence<int, most_rows(P)>;
  using OfRows = LinearTile (*)(int, Rows);
  static constexpr OfRows table[] = {tile_of_rows<P, F>...};
  return table[lines](rows, Rows{});
}

// Selects the tile by rows, panels, and lines to prefetch per pair.
static LinearTile linear_tile_for(int rows, int panels, int lines) {
  switch (panels) {
    case 1: return tile_of_lines<1>(rows, lines, std::make_integer_sequence<int, 2>{});
    case 2: return tile_of_lines<2>(rows, lines, std::make_integer_sequence<int, 3>{});
    case 3: return tile_of_lines<3>(rows, lines, std::make_integer_sequence<int, 4>{});
    default: return tile_of_lines<4>(rows, lines, std::make_integer_sequence<int, 5>{});
  }
}
#endif
