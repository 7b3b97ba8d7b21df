// vllm_gsd::read_rows, write_rows and move_rows access hidden states by row. Python side:
// vllm_gsd/ops/state_rows/api.py.
//
// A step calls them after a forward pass, when neither their code nor their data is cached. Little code then matters
// most, and PyTorch's indexing runs several general operators.
#include <cstring>
#include <vector>

#include "ops.h"

namespace gsd {

namespace {

struct States {
  char* data;
  int64_t count, stride, bytes;  // stride and bytes of a row

  explicit States(const at::Tensor& tensor) {
    TORCH_CHECK_VALUE(tensor.dim() == 2 && (tensor.size(1) <= 1 || tensor.numel() == 0 || tensor.stride(1) == 1),
                      "states must be [rows, size], each row contiguous, not ", tensor.sizes());
    data = static_cast<char*>(tensor.data_ptr());
    count = tensor.size(0);
    stride = tensor.stride(0) * tensor.element_size();
    bytes = tensor.size(1) * tensor.element_size();
  }
  char* row(int64_t index) const {
    TORCH_CHECK_INDEX(index < count, "row ", index, " of states that have ", count);
    return data + index * stride;
  }
};

const int64_t* indices(const at::Tensor& rows, int64_t count) {
  TORCH_CHECK_VALUE(rows.scalar_type() == at::kLong && rows.dim() == 1 && rows.is_contiguous() && rows.size(0) == count,
                    "rows must be a contiguous int64 [", count, "]");
  return rows.const_data_ptr<int64_t>();
}

}  // namespace

at::Tensor read_rows(const at::Tensor& states, const at::Tensor& rows, const std::optional<at::Tensor>& cleared) {
  const int64_t count = rows.numel();
  const int64_t* index = indices(rows, count);
  TORCH_CHECK_VALUE(!cleared || (cleared->scalar_type() == at::kBool && cleared->numel() == count &&
                                 cleared->is_contiguous()),
                    "cleared must be a contiguous bool [", count, "]");
  const bool* clear = cleared ? cleared->const_data_ptr<bool>() : nullptr;
  const States from(states);
  at::Tensor read = states.new_empty({count, states.size(1)});
  const States to(read);
  for (int64_t i = 0; i < count; ++i) {
    if ((clear && clear[i]) || index[i] < 0) std::memset(to.row(i), 0, to.bytes);
    else std::memcpy(to.row(i), from.row(index[i]), to.bytes);
  }
  return read;
}

void write_rows(at::Tensor states, const at::Tensor& rows, const at::Tensor& values) {
  TORCH_CHECK_VALUE(values.dim() == 2 && values.scalar_type() == states.scalar_type() &&
                        values.size(1) == states.size(1),
                    "values must be ", states.scalar_type(), " [rows, ", states.size(1), "]");
  const at::Tensor by_row = values.stride(1) == 1 ? values : values.contiguous();
  const States to(states), from(by_row);
  const int64_t* index = indices(rows, from.count);
  for (int64_t i = 0; i < from.count; ++i)
    if (index[i] >= 0) std::memcpy(to.row(index[i]), from.row(i), to.bytes);
}

void move_rows(at::Tensor states, const at::Tensor& sources, const at::Tensor& destinations) {
  const States all(states);
  const int64_t count = sources.numel();
  const int64_t *source = indices(sources, count), *destination = indices(destinations, count);
  std::vector<char> rows(count * all.bytes);  // all reads come before all writes
  for (int64_t i = 0; i < count; ++i)
    if (source[i] >= 0) std::memcpy(rows.data() + i * all.bytes, all.row(source[i]), all.bytes);
  for (int64_t i = 0; i < count; ++i)
    if (source[i] >= 0 && destination[i] >= 0)
      std::memcpy(all.row(destination[i]), rows.data() + i * all.bytes, all.bytes);
}

}  // namespace gsd
