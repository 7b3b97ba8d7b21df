// Products of a few rows with a group of packed columns; see linear.cpp. Only in gsd::avx512bf16.

#if GSD_BF16
// Rows that a tile of P panels may have: 24 of 32 registers are sums, and a load of weights serves R products.
constexpr int most_rows(int panels) { return panels == 4 ? 6 : panels == 3 ? 8 : 12; }

// out[R][P * 16] = x[R][2 * pairs] times the group `w`. Meanwhile `F` cache lines per pair are fetched from `ahead`.
template <int R, int P, int F>
static void linear_tile(const c10::BFloat16* x, int64_t x_stride, const c10::BFloat16* w, int64_t pairs,
                        const char* ahead, const c10::BFloat16* bias, c10::BFloat16* out, int64_t out_stride) {
  __m512 sum[R][P];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) sum[r][p] = _mm512_setzero_ps();
  for (int64_t k = 0; k < pairs; ++k) {
    __m512bh weights[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) weights[p] = bits_as<__m512bh>(_mm512_loadu_si512(w + (k * P + p) * 32));
#pragma GCC unroll 4
    for (int f = 0; f < F; ++f) _mm_prefetch(ahead + (k * F + f) * 64, _MM_HINT_T0);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = bits_as<__m512bh>(_mm512_set1_epi32(load_raw<int>(x + r * x_stride + 2 * k)));
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], pair, weights[p]);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
    const __m512 added = bias ? load(bias + p * 16) : _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m256bh rounded = _mm512_cvtneps_pbh(bias ? sum[r][p] + added : sum[r][p]);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + r * out_stride + p * 16), bits_as<__m256i>(rounded));
    }
  }
}

using LinearTile = void (*)(const c10::BFloat16*, int64_t, const c10::BFloat16*, int64_t, const char*,
                            const c10::BFloat16*, c10::BFloat16*, int64_t);

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

// The tile for so many rows, panels, and lines to fetch per pair.
static LinearTile linear_tile_for(int rows, int panels, int lines) {
  switch (panels) {
    case 1: return tile_of_lines<1>(rows, lines, std::make_integer_sequence<int, 2>{});
    case 2: return tile_of_lines<2>(rows, lines, std::make_integer_sequence<int, 3>{});
    case 3: return tile_of_lines<3>(rows, lines, std::make_integer_sequence<int, 4>{});
    default: return tile_of_lines<4>(rows, lines, std::make_integer_sequence<int, 5>{});
  }
}
#endif
