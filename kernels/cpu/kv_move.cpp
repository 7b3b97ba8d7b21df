// vllm_gsd::move_kv copies cache slots in all layers at once. Python side: vllm_gsd/ops/kv_move/cpu.py.
#include <ATen/Parallel.h>
#include <omp.h>

#include <algorithm>
#include <vector>

#include "ops.h"
#include "paged_cache.h"
#include "scratch.h"

namespace gsd {

namespace {

// All reads come before all writes, so sources and destinations may overlap.
template <typename T>
void move_head(const PagedCache& cache, int64_t head, const int64_t* src, const int64_t* dst, int64_t count,
               uint32_t* rows) {
  const int64_t size = cache.head_size, block = cache.block_size;
  uint32_t* row = rows;
  for (int64_t i = 0; i < count; ++i, row += 2 * size) {
    const T* key = cache.key_page<T>(src[i] / block, head) + cache.key.token[src[i] % block];
    const T* value = cache.value_page<T>(src[i] / block, head) + cache.value.token[src[i] % block];
    for (int64_t d = 0; d < size; ++d) row[d] = key[cache.key.dim[d]];
    for (int64_t d = 0; d < size; ++d) row[size + d] = value[cache.value.dim[d]];
  }
  row = rows;
  for (int64_t i = 0; i < count; ++i, row += 2 * size) {
    T* key = const_cast<T*>(cache.key_page<T>(dst[i] / block, head)) + cache.key.token[dst[i] % block];
    T* value = const_cast<T*>(cache.value_page<T>(dst[i] / block, head)) + cache.value.token[dst[i] % block];
    for (int64_t d = 0; d < size; ++d) key[cache.key.dim[d]] = static_cast<T>(row[d]);
    for (int64_t d = 0; d < size; ++d) value[cache.value.dim[d]] = static_cast<T>(row[size + d]);
  }
}

void check_slots(const at::Tensor& src, const at::Tensor& dst) {
  for (const at::Tensor* slots : {&src, &dst})
    TORCH_CHECK_VALUE(slots->scalar_type() == at::kLong && slots->dim() == 1 && slots->is_contiguous(),
                      "src_slots and dst_slots must be contiguous int64 vectors");
  TORCH_CHECK_VALUE(src.size(0) == dst.size(0), "there are ", src.size(0), " src_slots, but ", dst.size(0),
                    " dst_slots");
}

}  // namespace

void move_kv(at::TensorList kv_caches, at::TensorList tables, const at::Tensor& src_slots,
             const at::Tensor& dst_slots) {
  check_slots(src_slots, dst_slots);
  const int64_t layers = kv_caches.size(), count = src_slots.size(0);
  TORCH_CHECK_VALUE(tables.size() == 1 || tables.size() == kv_caches.size(), "there are ", layers,
                    " KV caches, but ", tables.size(), " layouts");
  if (count == 0 || layers == 0) return;
  const int64_t* src = src_slots.const_data_ptr<int64_t>();
  const int64_t* dst = dst_slots.const_data_ptr<int64_t>();
  const int64_t highest = std::max(*std::max_element(src, src + count), *std::max_element(dst, dst + count));
  const int64_t lowest = std::min(*std::min_element(src, src + count), *std::min_element(dst, dst + count));

  std::vector<PagedCache> caches;
  int64_t elements = 0, most = 0;  // of a head
  for (int64_t i = 0; i < layers; ++i) {
    caches.push_back(paged_cache(kv_caches[i], tables[tables.size() == 1 ? 0 : i]));
    const int64_t slots = caches.back().num_blocks * caches.back().block_size;
    TORCH_CHECK_VALUE(lowest >= 0 && highest < slots, "slots ", lowest, " to ", highest,
                      " do not all lie in a KV cache of ", slots, " slots");
    TORCH_CHECK_VALUE(caches.back().element_size == 2 || caches.back().element_size == 4,
                      "move_kv moves elements of 2 or 4 bytes, not ", caches.back().element_size);
    elements += caches.back().num_kv_heads * count * caches.back().head_size;
    most = std::max(most, 2 * count * caches.back().head_size);
  }
  const int threads = elements > 8192 ? at::get_num_threads() : 1;
  uint32_t* const all_rows = static_cast<uint32_t*>(scratch_of(threads * most * sizeof(uint32_t)));
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < layers; ++i) {
    uint32_t* rows = all_rows + omp_get_thread_num() * most;
    for (int64_t head = 0; head < caches[i].num_kv_heads; ++head) {
      if (caches[i].element_size == 2) move_head<uint16_t>(caches[i], head, src, dst, count, rows);
      else move_head<uint32_t>(caches[i], head, src, dst, count, rows);
    }
  }
}

}  // namespace gsd
