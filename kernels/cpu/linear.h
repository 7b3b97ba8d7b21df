// One product of linear.cpp, as its kernels see it.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

namespace gsd {

struct LinearJob {
  const c10::BFloat16 *x, *weight, *bias;  // weight: [groups][pairs][panels][16][2]; bias: null for none
  c10::BFloat16* out;                      // [rows][columns]
  int64_t x_stride, columns, groups, pairs;
  int panels;
};

// Rows [begin, end) by groups [first, last) of one panel, or two with AVX-512, by products of float32.
void linear_widened(const LinearJob& job, int64_t begin, int64_t end, int64_t first, int64_t last);

}  // namespace gsd
