// vllm_gsd::linear: x @ weight.T in bfloat16 for a step's rows, which are few: the time is that of reading the weights
// once, as long as the next weights are fetched while the present ones are multiplied. Python: vllm_gsd/ops/linear.py.
//
// Weights are packed [groups, size / 2, panels, 16, 2]: a group is 16 * panels output columns, the pairs of its inputs
// one after the other, so that a group is read from its first byte to its last.
#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>

#include "isa.h"
#include "ops.h"

#define GSD_WITH_BF16
#define GSD_KERNEL_BODY "linear_body.h"
#include "each_isa.h"

namespace gsd {

#if GSD_X86
namespace {

constexpr int64_t kRowsAtOnce = 240;   // their inputs stay in the second-level cache
constexpr int64_t kAheadBytes = 2048;  // in a group that nothing fetched before
constexpr int64_t kLine = 64;          // bytes of a cache line, and of 16 pairs

struct Linear {
  const c10::BFloat16 *x, *weight, *bias;
  c10::BFloat16* out;
  int64_t x_stride, columns, groups, pairs;
  int panels;

  // Rows [begin, end) by groups [first, last).
  void run(int64_t begin, int64_t end, int64_t first, int64_t last) const {
    const int64_t most = avx512bf16::most_rows(panels);
    const int64_t rows = end - begin;
    // Several chunks share the fetching of the next group evenly among them, or memory rests while one of them runs.
    int64_t chunks = (rows + most - 1) / most;
    while (chunks < std::min<int64_t>(panels, rows) && panels % chunks) ++chunks;
    const int64_t group = pairs * panels * 32;
    for (int64_t g = first; g < last; ++g) {
      const c10::BFloat16* w = weight + g * group;
      const int64_t column = g * panels * 16;
      for (int64_t c = 0; c < chunks; ++c) {
        // A single chunk waits for memory anyway.
        const char* ahead = reinterpret_cast<const char*>(w) + kAheadBytes;
        int64_t lines = panels;
        if (chunks > 1 && (g > first || c > 0)) {
          const int64_t turn = g > first ? c : c - 1, turns = g > first ? chunks : chunks - 1;
          lines = (panels + turns - 1) / turns;
          ahead = reinterpret_cast<const char*>(w + group) + turn * lines * pairs * kLine;
          if (g + 1 == last || turn * lines >= panels) lines = 0;
        }
        const int64_t from = begin + rows * c / chunks, to = begin + rows * (c + 1) / chunks;
        const auto tile = avx512bf16::linear_tile_for(static_cast<int>(to - from), panels, static_cast<int>(lines));
        tile(x + from * x_stride, x_stride, w, pairs, ahead, bias ? bias + column : nullptr,
             out + from * columns + column, columns);
      }
    }
  }
};

}  // namespace
#endif

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK_VALUE(weight.dim() == 5 && weight.size(2) >= 1 && weight.size(2) <= 4 && weight.size(3) == 16 &&
                        weight.size(4) == 2 && weight.is_contiguous() && weight.scalar_type() == at::kBFloat16,
                    "weight must be packed by pack_weight, not ", weight.sizes());
  const int64_t size = 2 * weight.size(1), columns = weight.size(0) * weight.size(2) * 16;
  TORCH_CHECK_VALUE(x.scalar_type() == at::kBFloat16 && x.dim() >= 1 && x.size(-1) == size,
                    "x must be bfloat16 [..., ", size, "], not ", x.scalar_type(), " ", x.sizes());
  TORCH_CHECK_VALUE(!bias || (bias->scalar_type() == at::kBFloat16 && bias->numel() == columns),
                    "bias must be bfloat16 [", columns, "]");
  TORCH_CHECK_VALUE(current_isa() >= Isa::avx512bf16, "packed weights need a processor with AVX512-BF16");
  auto shape = x.sizes().vec();
  shape.back() = columns;
  at::Tensor out = at::empty(shape, x.options());
#if GSD_X86
  at::Tensor rows = x.reshape({-1, size});
  if (rows.stride(1) != 1) rows = rows.contiguous();
  const at::Tensor added = bias ? bias->contiguous() : at::Tensor();
  const Linear job{rows.const_data_ptr<c10::BFloat16>(),
                   weight.const_data_ptr<c10::BFloat16>(),
                   bias ? added.const_data_ptr<c10::BFloat16>() : nullptr,
                   out.mutable_data_ptr<c10::BFloat16>(),
                   rows.stride(0),
                   columns,
                   weight.size(0),
                   weight.size(1),
                   static_cast<int>(weight.size(2))};
  const int64_t count = rows.size(0);
  at::parallel_for(0, job.groups, 1, [&](int64_t first, int64_t last) {
    const int64_t blocks = (count + kRowsAtOnce - 1) / kRowsAtOnce;
    for (int64_t b = 0; b < blocks; ++b) job.run(count * b / blocks, count * (b + 1) / blocks, first, last);
  });
#endif
  return out;
}

}  // namespace gsd
