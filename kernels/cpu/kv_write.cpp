// vllm_gsd::write_kv stores the keys and values of a step's rows in their cache slots. Python side:
// vllm_gsd/ops/kv_move/cpu.py.
//
// Where keys are transposed, the rows of a graph lie in the same cache lines. If rows were divided among threads, these
// would take the lines from each other at every element. So one thread writes up to 64 rows of a KV head.
#include <ATen/Parallel.h>

#include "ops.h"
#include "paged_cache.h"

namespace gsd {

namespace {

// Rows of a head that one thread writes at a time.
constexpr int64_t kRows = 64;
// Up to this many elements of keys are written sooner than a second thread wakes up.
constexpr int64_t kFewElements = 8192;

template <typename T>
struct Rows {
  const T* data;
  int64_t row, head;  // strides, elements

  explicit Rows(const at::Tensor& rows)
      : data(static_cast<const T*>(rows.const_data_ptr())), row(rows.stride(0)), head(rows.stride(1)) {}
  const T* at(int64_t r, int64_t h) const { return data + r * row + h * head; }
};

template <typename T>
void store_row(const T* from, const PageOrder& order, int64_t offset, int64_t size, T* page) {
  T* to = page + order.token[offset];
  for (int64_t d = 0; d < size; ++d) to[order.dim[d]] = from[d];
}

template <typename T>
void write(const PagedCache& cache, const at::Tensor& key, const at::Tensor& value, const int64_t* slots) {
  const Rows<T> keys(key), values(value);
  const int64_t count = key.size(0), parts = (count + kRows - 1) / kRows, block = cache.block_size;
  const int64_t tasks = parts * cache.num_kv_heads;
  const bool alone = count * cache.num_kv_heads * cache.head_size <= kFewElements;
  at::parallel_for(0, tasks, alone ? tasks : 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t head = i / parts, begin = count * (i % parts) / parts, end = count * (i % parts + 1) / parts;
      for (int64_t row = begin; row < end; ++row) {
        if (slots[row] < 0) continue;
        T* page = const_cast<T*>(cache.key_page<T>(slots[row] / block, head));
        store_row(keys.at(row, head), cache.key, slots[row] % block, cache.head_size, page);
        store_row(values.at(row, head), cache.value, slots[row] % block, cache.head_size, page + block * cache.head_size);
      }
    }
  });
}

}  // namespace

void write_kv(at::Tensor kv_cache, const at::Tensor& tables, const at::Tensor& key, const at::Tensor& value,
              const at::Tensor& slots) {
  const PagedCache cache = paged_cache(kv_cache, tables);
  for (const at::Tensor* rows : {&key, &value})
    TORCH_CHECK_VALUE(rows->scalar_type() == kv_cache.scalar_type() && rows->dim() == 3 && rows->stride(2) == 1 &&
                          rows->size(0) == key.size(0) && rows->size(1) == cache.num_kv_heads &&
                          rows->size(2) == cache.head_size,
                      "key and value must be [num_rows, ", cache.num_kv_heads, ", ", cache.head_size,
                      "] of the cache's dtype, each head contiguous, not ", rows->scalar_type(), " ", rows->sizes());
  TORCH_CHECK_VALUE(cache.element_size == 2 || cache.element_size == 4,
                    "write_kv writes elements of 2 or 4 bytes, not ", cache.element_size);
  const int64_t count = key.size(0);
  TORCH_CHECK_VALUE(slots.scalar_type() == at::kLong && slots.dim() == 1 && slots.is_contiguous() &&
                        slots.size(0) >= count,
                    "slots must be a contiguous int64 vector of at least ", count, " elements");
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i)
    TORCH_CHECK_VALUE(slot[i] < cache.num_blocks * cache.block_size, "slot ", slot[i],
                      " does not lie in a KV cache of ", cache.num_blocks * cache.block_size, " slots");
  if (cache.element_size == 2) write<uint16_t>(cache, key, value, slot);
  else write<uint32_t>(cache, key, value, slot);
}

}  // namespace gsd
