#include "isa.h"

#include <algorithm>
#include <atomic>

namespace gsd {

static Isa detect() {
#if GSD_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx2 && avx512 && __builtin_cpu_supports("avx512bf16")) return Isa::avx512bf16;
  if (avx2 && avx512) return Isa::avx512;
  if (avx2) return Isa::avx2;
#endif
  return Isa::baseline;
}

static Isa best() {
  static const Isa found = detect();
  return found;
}

// Intel's cores (measured on Emerald Rapids) multiply pairs of bfloat16 once in two cycles, but float32 twice a cycle,
// so widening weights, keys and values first takes half the time. AMD's cores multiply both at the same rate.
static Isa fastest() {
#if GSD_X86
  if (best() == Isa::avx512bf16 && __builtin_cpu_is("intel")) return Isa::avx512;
#endif
  return best();
}

static std::atomic<int> limit{static_cast<int>(fastest())};

Isa current_isa() { return static_cast<Isa>(std::min(static_cast<int>(best()), limit.load(std::memory_order_relaxed))); }

int64_t set_isa_limit(int64_t level) {
  limit.store(static_cast<int>(std::clamp<int64_t>(level, 0, 3)));
  return static_cast<int64_t>(current_isa());
}

}  // namespace gsd
