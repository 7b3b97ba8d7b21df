// The instruction set that the kernels use.
#pragma once

#include <cstdint>

#ifdef __x86_64__
#define GSD_X86 1
#include <immintrin.h>
#else
#define GSD_X86 0
#endif

#define GSD_INLINE inline __attribute__((always_inline))

namespace gsd {

enum class Isa : int { baseline = 0, avx2 = 1, avx512 = 2, avx512bf16 = 3 };

// The fastest instruction set of this machine, unless a test has called set_isa_limit.
Isa current_isa();

// Limits the instruction set to `level` (0 baseline, 1 AVX2, 2 AVX-512, 3 with BF16) and returns the one in use.
int64_t set_isa_limit(int64_t level);

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace gsd
