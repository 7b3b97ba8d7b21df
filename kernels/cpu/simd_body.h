// Vectors of GSD_LANES floats: loads and stores of the three data types, and exp. See each_isa.h.

constexpr int kLanes = GSD_LANES;
typedef float vf __attribute__((vector_size(4 * GSD_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * GSD_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * GSD_LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * GSD_LANES)));

template <typename To, typename From>
static GSD_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename V, typename P>
static GSD_INLINE V load_raw(const P* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

// x - 0 is x for every x, so this is a plain broadcast.
static GSD_INLINE vf splat(float x) { return x - vf{}; }
// b if one of them is NaN.
static GSD_INLINE vf max_of(vf a, vf b) { return a > b ? a : b; }

static GSD_INLINE vf widen_bf16(vu low16) { return bits_as<vf>(low16 << 16); }

static GSD_INLINE vf widen_half(vh h) {
#if GSD_LANES == 16
  return bits_as<vf>(_mm512_cvtph_ps(bits_as<__m256i>(h)));
#elif GSD_LANES == 8
  return bits_as<vf>(_mm256_cvtph_ps(bits_as<__m128i>(h)));
#else
  vf v{};
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(c10::Half(h[i], c10::Half::from_bits()));
  return v;
#endif
}

// Widens 16-bit integers to 32 bits. GCC 12 compiles the generic conversion into several instructions.
static GSD_INLINE vu widen_integers(vh h) {
#if GSD_LANES == 16
  return bits_as<vu>(_mm512_cvtepu16_epi32(bits_as<__m256i>(h)));
#elif GSD_LANES == 8
  return bits_as<vu>(_mm256_cvtepu16_epi32(bits_as<__m128i>(h)));
#else
  return __builtin_convertvector(h, vu);
#endif
}

static GSD_INLINE vf load(const float* p) { return load_raw<vf>(p); }
static GSD_INLINE vf load(const c10::BFloat16* p) { return widen_bf16(widen_integers(load_raw<vh>(p))); }
static GSD_INLINE vf load(const c10::Half* p) { return widen_half(load_raw<vh>(p)); }

// Two interleaved rows: elements 0, 2, 4... of p belong to the first, 1, 3, 5... to the second.
static GSD_INLINE void load_pair(const c10::BFloat16* p, vf& first, vf& second) {
  const vu both = load_raw<vu>(p);
  first = widen_bf16(both);
  second = bits_as<vf>(both & 0xffff0000u);
}
static GSD_INLINE void load_pair(const c10::Half* p, vf& first, vf& second) {
  const vu both = load_raw<vu>(p);
  first = widen_half(__builtin_convertvector(both & 0xffffu, vh));
  second = widen_half(__builtin_convertvector(both >> 16, vh));
}

static GSD_INLINE void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof(v)); }

static GSD_INLINE void store(c10::BFloat16* p, vf v) {
  const vu bits = bits_as<vu>(v);
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  const vu quiet_nan = vu{} + 0x7fc0u;
  const vh h = __builtin_convertvector(v == v ? rounded : quiet_nan, vh);
  __builtin_memcpy(p, &h, sizeof(h));
}

static GSD_INLINE void store(c10::Half* p, vf v) {
#if GSD_LANES == 16
  const __m256i h = _mm512_cvtps_ph(bits_as<__m512>(v), _MM_FROUND_TO_NEAREST_INT);
  __builtin_memcpy(p, &h, sizeof(h));
#elif GSD_LANES == 8
  const __m128i h = _mm256_cvtps_ph(bits_as<__m256>(v), _MM_FROUND_TO_NEAREST_INT);
  __builtin_memcpy(p, &h, sizeof(h));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = c10::Half(v[i]);
#endif
}

// Combines the lower half with the upper half, repeatedly, down to one number.
template <int N, typename V, typename Op>
static GSD_INLINE float fold_lanes(V v, Op op) {
  if constexpr (N == 4) {
    return op(op(v[0], v[2]), op(v[1], v[3]));
  } else {
    typedef float Half __attribute__((vector_size(2 * N)));
    struct Halves {
      Half low, high;
    };
    const Halves halves = bits_as<Halves>(v);
    return fold_lanes<N / 2>(op(halves.low, halves.high), op);
  }
}

static GSD_INLINE float highest_lane(vf v) {
  return fold_lanes<kLanes>(v, [](auto a, auto b) { return a > b ? a : b; });
}

static GSD_INLINE float sum_of_lanes(vf v) {
  return fold_lanes<kLanes>(v, [](auto a, auto b) { return a + b; });
}

// e^x for x <= 88, relative error below 2e-7; exactly 0 below -87.3 (where it would be denormal), NaN of NaN.
// x = n ln 2 + r with integer n and |r| <= ln 2 / 2; e^r by a polynomial of degree 6 (Cephes expf).
static GSD_INLINE vf exp_of(vf x) {
  const vf lowest = splat(-87.3f);
  const vf clamped = max_of(lowest, x);
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum.
  const vf shifted = clamped * 1.44269504088896341f + 12582912.0f;
  const vf n = shifted - 12582912.0f;
  vf r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vf power = bits_as<vf>((bits_as<vi>(shifted) << 23) + 0x3f800000);
  return x < lowest ? vf{} : p * power;
}

#if GSD_BF16
constexpr float kLog2E = 1.44269504088896341f;

// 2^x for x <= 127, relative error below 4e-6, a thousandth of what rounding to bfloat16 adds; 0 from -150 down, NaN of
// NaN.
static GSD_INLINE vf exp2_of(vf x) {
  const vf clamped = max_of(splat(-200.0f), x);
  const __m512 n = _mm512_roundscale_ps(bits_as<__m512>(clamped), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const vf r = clamped - bits_as<vf>(n);  // 2^r by the polynomial of degree 4 that fits it best on [-1/2, 1/2]
  vf p = r * 9.5701018345e-03f + 5.5917860313e-02f;
  p = p * r + 2.4024744830e-01f;
  p = p * r + 6.9312181474e-01f;
  p = p * r + 9.9999926145e-01f;
  return bits_as<vf>(_mm512_scalef_ps(bits_as<__m512>(p), n));
}
#endif

// tanh: an odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel, and that formula elsewhere (Cephes
// tanhf).
static GSD_INLINE vf tanh_of(vf x) {
  const vf magnitude = x < 0.0f ? -x : x;
  const vf square = x * x;
  vf p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const vf near = p * square * x + x;
  const vf capped = magnitude > 10.0f ? splat(10.0f) : magnitude;
  const vf far = 1.0f - 2.0f / (exp_of(capped + capped) + 1.0f);
  return magnitude < 0.625f ? near : (x < 0.0f ? -far : far);
}

// Whether any lane of a comparison is true.
static GSD_INLINE bool any_of(vi truth) {
#if GSD_LANES == 16
  return _mm512_movepi32_mask(bits_as<__m512i>(truth)) != 0;
#elif GSD_LANES == 8
  return _mm256_movemask_ps(bits_as<__m256>(truth)) != 0;
#else
  int64_t halves[2];
  __builtin_memcpy(halves, &truth, sizeof(halves));
  return (halves[0] | halves[1]) != 0;
#endif
}
