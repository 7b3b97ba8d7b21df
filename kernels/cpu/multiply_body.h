// The micro-kernels of tree attention: products of a few rows held in registers.
// Included by tree_attention_body.h, so inside each instruction set's namespace.

// Accumulators: 24 of 32 registers with AVX-512, 12 of 16 with AVX2.
constexpr int kMaxRows = GSD_LANES == 16 ? 12 : GSD_LANES == 8 ? 6 : 4, kVectors = 2;

// Prefetching into the L2 cache beside the products: each product fetches two lines, `step` bytes after those of the
// last. More at a time would make the processor wait for a free line.
struct Ahead {
  const char* at;
  int64_t step;

  GSD_INLINE void fetch() {
    __builtin_prefetch(at, 0, 2);
    __builtin_prefetch(at + 64, 0, 2);
    at += step;
  }
};

// c[M][N vectors] (+)= a[M][depth] b[depth][N vectors]; a[i][k] is a[i * kRowStep + k * kDepthStep] and
// vector n of b's row k begins at b[n][k * ldb].
template <int M, int N, int kRowStep, int kDepthStep, bool kAdd, typename B>
static void multiply(const float* a, const B* const* b, int64_t ldb, int64_t depth, float* c, int64_t ldc,
                     Ahead ahead) {
  vf sum[M][N];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) sum[i][n] = kAdd ? load(c + i * ldc + n * kLanes) : vf{};
  const B* b0 = b[0];
  const B* b1 = b[N - 1];
  for (int64_t k = 0; k < depth; ++k) {
    ahead.fetch();
    const vf column[2] = {load(b0), load(b1)};
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const vf factor = splat(a[i * kRowStep]);
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) sum[i][n] = factor * column[n] + sum[i][n];
    }
    a += kDepthStep;
    b0 += ldb;
    b1 += ldb;
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) store(c + i * ldc + n * kLanes, sum[i][n]);
}

template <typename B>
using MultiplyFn = void (*)(const float*, const B* const*, int64_t, int64_t, float*, int64_t, Ahead);

// Scores of M query vectors packed [head_size][M] against kVectors vectors of keys.
template <typename B, int... M>
static MultiplyFn<B> score_fn(int m, std::integer_sequence<int, M...>) {
  static constexpr MultiplyFn<B> table[] = {multiply<M + 1, kVectors, 1, M + 1, false, B>...};
  return table[m - 1];
}

// Adds M rows of probabilities times values to the output, one or kVectors vectors of dimensions wide.
template <typename B, int N, int... M>
static MultiplyFn<B> output_fn(int m, std::integer_sequence<int, M...>) {
  static constexpr MultiplyFn<B> table[] = {multiply<M + 1, N, kScoreStride, 1, true, B>...};
  return table[m - 1];
}

#if GSD_BF16
// As multiply, for bfloat16: a[i][k] is a pair (rows 2k and 2k + 1 of b), and the product times `factor` is kept or
// added.
template <int M, int N, int kRowStep, int kDepthStep, bool kAdd>
static void multiply_pairs(const uint32_t* a, const c10::BFloat16* const* b, int64_t ldb, int64_t pairs,
                           float factor, float* c, int64_t ldc, Ahead ahead) {
  alignas(64) static constexpr uint16_t kInterleave[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(kInterleave);
  __m512 sum[M][N];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) sum[i][n] = kAdd ? _mm512_loadu_ps(c + i * ldc + n * kLanes) : _mm512_setzero_ps();
  const c10::BFloat16* b0 = b[0];
  const c10::BFloat16* b1 = b[N - 1];
  for (int64_t k = 0; k < pairs; ++k) {
    ahead.fetch();
    __m512bh column[2];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      const c10::BFloat16* from = n == 0 ? b0 : b1;
      const __m256i first = load_raw<__m256i>(from), second = load_raw<__m256i>(from + ldb);
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
      column[n] = bits_as<__m512bh>(_mm512_permutexvar_epi16(order, both));
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const __m512bh factors = bits_as<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[i * kRowStep])));
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) sum[i][n] = _mm512_dpbf16_ps(sum[i][n], factors, column[n]);
    }
    a += kDepthStep;
    b0 += 2 * ldb;
    b1 += 2 * ldb;
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) _mm512_storeu_ps(c + i * ldc + n * kLanes, sum[i][n] * factor);
}

using MultiplyPairsFn = void (*)(const uint32_t*, const c10::BFloat16* const*, int64_t, int64_t, float, float*,
                                 int64_t, Ahead);

template <int... M>
static MultiplyPairsFn pair_score_fn(int m, std::integer_sequence<int, M...>) {
  static constexpr MultiplyPairsFn table[] = {multiply_pairs<M + 1, kVectors, 1, M + 1, false>...};
  return table[m - 1];
}

template <int N, int... M>
static MultiplyPairsFn pair_output_fn(int m, std::integer_sequence<int, M...>) {
  static constexpr MultiplyPairsFn table[] = {multiply_pairs<M + 1, N, kPairStride, 1, true>...};
  return table[m - 1];
}
#endif
