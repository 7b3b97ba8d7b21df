// The arguments of a product for the kernels of linear.cpp.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

namespace gsd {

struct LinearJob {
  const c10::BFloat16 *x, *weight, *bias;  // weight: [groups][pairs][panels][16][2]; bias: null without one
  c10::BFloat16* out;                      // [rows][columns]
  int64_t x_stride, columns, groups, pairs;
  int panels;
};

// Multiplies rows [begin, end) by groups [first, last) of one panel, or two with AVX-512, in float32.
void linear_widened(const LinearJob& job, int64_t begin, int64_t end, int64_t first, int64_t last);

}  // namespace gsd
