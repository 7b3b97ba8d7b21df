// vllm_gsd::read_columns reads rows of an embedding whose weight is packed for the linear kernel; there they are columns.
// Python side: vllm_gsd/cpu/linear.py.
//
// Every pair of a column's weights lies in another cache line. Indexing that Inductor compiles computes the place of
// each pair by divisions, one column after the other if there are fewer than 32.
#include <ATen/Parallel.h>

#include "linear.h"
#include "ops.h"

namespace gsd {

namespace {

// A column waits for hundreds of cache lines, so a few columns are worth a second thread.
constexpr int64_t kColumnsPerThread = 2;

template <typename Index>
void read(const at::Tensor& packed, const at::Tensor& columns, at::Tensor& out) {
  const int64_t pairs = packed.size(1), panels = packed.size(2), count = packed.size(0) * panels * 16;
  const auto* weight = static_cast<const uint32_t*>(packed.const_data_ptr());
  const Index* column = columns.const_data_ptr<Index>();
  auto* rows = static_cast<uint32_t*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < columns.numel(); ++i)
    TORCH_CHECK_INDEX(column[i] >= 0 && column[i] < count, "column ", column[i], " of a weight that has ", count);
  at::parallel_for(0, columns.numel(), kColumnsPerThread, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t panel = column[i] / 16;
      const uint32_t* from = weight + (panel / panels * pairs * panels + panel % panels) * 16 + column[i] % 16;
      uint32_t* to = rows + i * pairs;
      for (int64_t pair = 0; pair < pairs; ++pair) to[pair] = from[pair * panels * 16];
    }
  });
}

}  // namespace

at::Tensor read_columns(const at::Tensor& packed, const at::Tensor& columns) {
  check_packed(packed);
  TORCH_CHECK_VALUE(columns.scalar_type() == at::kInt || columns.scalar_type() == at::kLong,
                    "columns must be int32 or int64, not ", columns.scalar_type());
  auto shape = columns.sizes().vec();
  shape.push_back(2 * packed.size(1));
  at::Tensor out = packed.new_empty(shape);
  const at::Tensor listed = columns.contiguous();
  if (listed.scalar_type() == at::kInt) read<int32_t>(packed, listed, out);
  else read<int64_t>(packed, listed, out);
  return out;
}

}  // namespace gsd
