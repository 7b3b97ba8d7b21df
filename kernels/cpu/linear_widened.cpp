// The products of linear.cpp for processors on which bfloat16 instructions are missing or slow: AVX2, AVX-512 without
// BF16, and Intel's AVX-512. Products of bfloat16 are exact in float32, and sums follow the order of the inputs. From
// about eight rows on arithmetic bounds the time; below that, reading the weights does.
#include "linear.h"

#include <c10/util/Half.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "isa.h"

#define GSD_KERNEL_BODY "linear_widened_body.h"
#include "each_isa.h"

namespace gsd {

#if GSD_X86
namespace {

constexpr int64_t kRowsAtOnce = 96;  // rows whose inputs stay in the L2 cache

template <typename Run>
void in_parts(const LinearJob& job, int64_t begin, int64_t end, int64_t block, int64_t stride, Run run) {
  static thread_local std::vector<float> inputs, sums;
  const int64_t rows = end - begin, parts = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  const int64_t most = std::min(rows, kRowsAtOnce), blocks = (2 * job.pairs + block - 1) / block;
  if (static_cast<int64_t>(inputs.size()) < blocks * most * stride) inputs.resize(blocks * most * stride);
  if (static_cast<int64_t>(sums.size()) < most * job.panels * 16) sums.resize(most * job.panels * 16);
  for (int64_t p = 0; p < parts; ++p)
    run(begin + rows * p / parts, begin + rows * (p + 1) / parts, inputs.data(), sums.data());
}

}  // namespace

void linear_widened(const LinearJob& job, int64_t begin, int64_t end, int64_t first, int64_t last) {
  if (current_isa() >= Isa::avx512) {
    in_parts(job, begin, end, avx512::kBlockInputs, avx512::kInputStride, [&](int64_t b, int64_t e, float* x, float* s) {
      (job.panels == 1 ? avx512::widened_rows<1> : avx512::widened_rows<2>)(job, b, e, first, last, x, s);
    });
  } else {
    in_parts(job, begin, end, avx2::kBlockInputs, avx2::kInputStride, [&](int64_t b, int64_t e, float* x, float* s) {
      avx2::widened_rows<1>(job, b, e, first, last, x, s);
    });
  }
}
#else
void linear_widened(const LinearJob&, int64_t, int64_t, int64_t, int64_t) {}
#endif

}  // namespace gsd
