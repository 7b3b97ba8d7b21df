// The packed weights of linear.cpp and read_columns.cpp, and the arguments of a product.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gsd {

// Raises ValueError unless `weight` has the form of a packed one.
inline void check_packed(const at::Tensor& weight) {
  TORCH_CHECK_VALUE(weight.dim() == 5 && weight.size(2) >= 1 && weight.size(2) <= 4 && weight.size(3) == 16 &&
                        weight.size(4) == 2 && weight.is_contiguous() && weight.scalar_type() == at::kBFloat16,
                    "weight must be packed by pack_weight, not ", weight.sizes());
}

struct LinearJob {
  const c10::BFloat16 *x, *weight, *bias;  // weight: [groups][pairs][panels][16][2]; bias: null without one
  c10::BFloat16* out;                      // [rows][columns]
  int64_t x_stride, columns, groups, pairs;
  int panels;
};

// Multiplies rows [begin, end) by groups [first, last) of one panel, or two with AVX-512, in float32.
void linear_widened(const LinearJob& job, int64_t begin, int64_t end, int64_t first, int64_t last);

}  // namespace gsd
