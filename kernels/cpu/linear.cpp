// vllm_gsd::linear computes x @ weight.T in bfloat16 for the few rows of a step. Reading the weights once bounds the
// time, provided that the next weights are prefetched during multiplication. Python side: vllm_gsd/cpu/linear.py. This
// file multiplies pairs of bfloat16 where that is faster (isa.cpp); linear_widened.cpp has the kernel of other
// processors.
//
// Weights are packed [groups, size / 2, panels, 16, 2]. A group holds 16 * panels output columns with the pairs of
// inputs in sequence, so it is read from its first byte to its last.
#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>

#include "isa.h"
#include "linear.h"
#include "ops.h"

#define GSD_WITH_BF16
#define GSD_KERNEL_BODY "linear_body.h"
#include "each_isa.h"

namespace gsd {

#if GSD_X86
namespace {

constexpr int64_t kRowsAtOnce = 240;   // rows whose inputs stay in the L2 cache
constexpr int64_t kAheadBytes = 1024;  // prefetch distance of a single chunk
constexpr int64_t kLine = 64;          // bytes of a cache line, which holds 16 pairs
// Chunks of at most so many rows process a group in blocks of pairs, so that all but the first chunk find the weights
// in the L1 cache. With more rows the sums do not fit into it as well, and arithmetic dominates anyway.
constexpr int64_t kRowsOfBlocks = 24, kPairsOfBlock = 48;

struct PairedLinear : LinearJob {
  // Multiplies rows [begin, end) by groups [first, last).
  void run(int64_t begin, int64_t end, int64_t first, int64_t last) const {
    const int64_t most = avx512bf16::most_rows(panels), rows = end - begin;
    // The chunks share the prefetching of the next weights evenly, which keeps the memory busy all the time.
    int64_t chunks = (rows + most - 1) / most;
    while (chunks < std::min<int64_t>(panels, rows) && panels % chunks) ++chunks;
    const bool in_blocks = chunks > 1 && rows <= kRowsOfBlocks;
    const int64_t blocks = in_blocks ? std::max<int64_t>(1, pairs / kPairsOfBlock) : 1;
    for (int64_t g = first; g < last; ++g)
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t from = pairs * b / blocks, to = pairs * (b + 1) / blocks;
        run_block(begin, rows, chunks, g, from, to, g + 1 == last && to == pairs);
      }
  }

  // Pairs [from, to) of a group. With `is_last` there are no weights to prefetch.
  void run_block(int64_t begin, int64_t rows, int64_t chunks, int64_t group, int64_t from, int64_t to,
                 bool is_last) const {
    alignas(kLine) static thread_local float sums[kRowsOfBlocks * 4 * 16];
    avx512bf16::LinearPart part;
    part.weight = weight + (group * pairs + from) * panels * 32;
    part.bias = bias ? bias + group * panels * 16 : nullptr;
    part.x_stride = x_stride;
    part.out_stride = columns;
    part.pairs = to - from;
    const int64_t share = (panels + chunks - 1) / chunks;  // lines per pair
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t top = rows * c / chunks, bottom = rows * (c + 1) / chunks;
      const bool waits = chunks == 1;  // a single chunk waits for memory, so it prefetches only a little ahead
      const int64_t lines = waits ? panels : is_last ? 0 : std::clamp<int64_t>(panels - c * share, 0, share);
      part.ahead = reinterpret_cast<const char*>(part.weight) +
                   (waits ? kAheadBytes : (panels + c * share) * part.pairs * kLine);
      part.x = x + (begin + top) * x_stride + 2 * from;
      part.out = out + (begin + top) * columns + group * panels * 16;
      part.before = from > 0 ? sums + top * panels * 16 : nullptr;
      part.after = to < pairs ? sums + top * panels * 16 : nullptr;
      avx512bf16::linear_tile_for(static_cast<int>(bottom - top), panels, static_cast<int>(lines))(part);
    }
  }
};

}  // namespace
#endif

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  check_packed(weight);
  const int64_t size = 2 * weight.size(1), columns = weight.size(0) * weight.size(2) * 16;
  TORCH_CHECK_VALUE(x.scalar_type() == at::kBFloat16 && x.dim() >= 1 && x.size(-1) == size,
                    "x must be bfloat16 [..., ", size, "], not ", x.scalar_type(), " ", x.sizes());
  TORCH_CHECK_VALUE(!bias || (bias->scalar_type() == at::kBFloat16 && bias->numel() == columns),
                    "bias must be bfloat16 [", columns, "]");
  TORCH_CHECK_VALUE(current_isa() >= Isa::avx2, "packed weights need a processor with AVX2");
  const bool pairs = current_isa() >= Isa::avx512bf16;
  const int64_t most = pairs ? 4 : current_isa() == Isa::avx512 ? 2 : 1;
  TORCH_CHECK_VALUE(weight.size(2) <= most, "weight must be packed in groups of at most ", most, " panels here");
  auto shape = x.sizes().vec();
  shape.back() = columns;
  at::Tensor out = x.new_empty(shape);
#if GSD_X86
  at::Tensor rows = x.dim() == 2 ? x : x.reshape({-1, size});
  if (rows.stride(1) != 1) rows = rows.contiguous();
  const at::Tensor added = bias ? bias->contiguous() : at::Tensor();
  const LinearJob job{rows.const_data_ptr<c10::BFloat16>(),
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
    if (!pairs) return linear_widened(job, 0, count, first, last);
    const int64_t blocks = (count + kRowsAtOnce - 1) / kRowsAtOnce;
    for (int64_t b = 0; b < blocks; ++b) PairedLinear{job}.run(count * b / blocks, count * (b + 1) / blocks, first, last);
  });
#endif
  return out;
}

}  // namespace gsd
