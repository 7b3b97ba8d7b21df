// Includes the file named by GSD_KERNEL_BODY once per instruction set, compiled for it and in its own namespace
// (gsd::baseline, gsd::avx2, gsd::avx512). GSD_LANES is the number of floats of a vector. With GSD_WITH_BF16 the file
// is also included in gsd::avx512bf16 with GSD_BF16 set to 1, for products of pairs of bfloat16.
//
// A body holds templates and static functions only and includes no header: a standard header first included here would
// be compiled for an instruction set that this machine may lack.
#ifndef GSD_KERNEL_BODY
#error "define GSD_KERNEL_BODY before including each_isa.h"
#endif

#define GSD_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define GSD_BEGIN_TARGET(features) \
  GSD_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define GSD_END_TARGET GSD_PRAGMA(clang attribute pop)
#else
#define GSD_BEGIN_TARGET(features) GSD_PRAGMA(GCC push_options) GSD_PRAGMA(GCC target(features))
#define GSD_END_TARGET GSD_PRAGMA(GCC pop_options)
#endif

#define GSD_BF16 0
#define GSD_LANES 4
namespace gsd::baseline {
#include "simd_body.h"
#include GSD_KERNEL_BODY
}
#undef GSD_LANES

#if GSD_X86

GSD_BEGIN_TARGET("avx2,fma,f16c")
#define GSD_LANES 8
namespace gsd::avx2 {
#include "simd_body.h"
#include GSD_KERNEL_BODY
}
#undef GSD_LANES
GSD_END_TARGET

#define GSD_LANES 16
GSD_BEGIN_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
namespace gsd::avx512 {
#include "simd_body.h"
#include GSD_KERNEL_BODY
}
GSD_END_TARGET

#ifdef GSD_WITH_BF16
#undef GSD_BF16
#define GSD_BF16 1
GSD_BEGIN_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
namespace gsd::avx512bf16 {
#include "simd_body.h"
#include GSD_KERNEL_BODY
}
GSD_END_TARGET
#endif  // GSD_WITH_BF16
#undef GSD_LANES

#endif  // GSD_X86

#undef GSD_BF16
#undef GSD_KERNEL_BODY
#undef GSD_PRAGMA
#undef GSD_BEGIN_TARGET
#undef GSD_END_TARGET
