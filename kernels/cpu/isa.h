// Which instruction set the kernels run with, and the vector type of each.
#pragma once

#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#define GSD_X86 1
#include <immintrin.h>
#else
#define GSD_X86 0
#endif

#define GSD_INLINE inline __attribute__((always_inline))

namespace gsd {

enum class Isa : int { baseline = 0, avx2 = 1, avx512 = 2, avx512bf16 = 3 };

// The instruction set that is the fastest on this machine, unless set_isa_limit has said otherwise (tests).
Isa current_isa();

// Uses the best that there is up to `level` (0 baseline, 1 AVX2, 2 AVX-512, 3 with BF16) from now on; returns what is
// then used.
int64_t set_isa_limit(int64_t level);

}  // namespace gsd
