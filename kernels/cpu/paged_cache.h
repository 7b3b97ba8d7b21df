// A layer's KV cache and the order of the elements inside its pages (vllm_gsd/ops/kv_move/layout.py).
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace gsd {

// A page holds the keys or the values of one block and one KV head. Token t, dimension d lies at token[t] + dim[d].
struct PageOrder {
  const int32_t* token;
  const int32_t* dim;
};

struct PagedCache {
  const char* data;
  int64_t element_size;
  int64_t num_blocks, num_kv_heads, block_size, head_size;
  int64_t block_stride, head_stride;  // elements
  PageOrder key, value;

  template <typename T>
  const T* key_page(int64_t block, int64_t kv_head) const {
    return reinterpret_cast<const T*>(data) + block * block_stride + kv_head * head_stride;
  }
  template <typename T>
  const T* value_page(int64_t block, int64_t kv_head) const {
    return key_page<T>(block, kv_head) + block_size * head_size;
  }
};

// `tables` is KVLayout.tables: int32 key_token, key_dim, value_token and value_dim, concatenated.
inline PagedCache paged_cache(const at::Tensor& kv_cache, const at::Tensor& tables) {
  TORCH_CHECK_VALUE(kv_cache.dim() == 4 && kv_cache.size(3) % 2 == 0,
                    "kv_cache must be [num_blocks, kv_heads, block_size, 2 * head_size], not ",
                    kv_cache.sizes());
  TORCH_CHECK_VALUE(kv_cache.stride(3) == 1 && kv_cache.stride(2) == kv_cache.size(3),
                    "the pages of kv_cache must be contiguous");
  PagedCache cache;
  cache.data = static_cast<const char*>(kv_cache.const_data_ptr());
  cache.element_size = kv_cache.element_size();
  cache.num_blocks = kv_cache.size(0);
  cache.num_kv_heads = kv_cache.size(1);
  cache.block_size = kv_cache.size(2);
  cache.head_size = kv_cache.size(3) / 2;
  cache.block_stride = kv_cache.stride(0);
  cache.head_stride = kv_cache.stride(1);
  const int64_t page = cache.block_size * cache.head_size;
  TORCH_CHECK_VALUE(tables.scalar_type() == at::kInt && tables.is_contiguous() &&
                        tables.numel() == 2 * (cache.block_size + cache.head_size),
                    "the layout is not one for blocks of ", cache.block_size, " and heads of ",
                    cache.head_size);
  const int32_t* table = tables.const_data_ptr<int32_t>();
  cache.key = {table, table + cache.block_size};
  cache.value = {cache.key.dim + cache.head_size, cache.key.dim + cache.head_size + cache.block_size};
  for (const PageOrder& order : {cache.key, cache.value}) {
    int64_t low = 0, high = 0;
    for (auto [entries, count] :
         {std::pair(order.token, cache.block_size), std::pair(order.dim, cache.head_size)}) {
      const auto [least, most] = std::minmax_element(entries, entries + count);
      low += *least;
      high += *most;
    }
    TORCH_CHECK_VALUE(low >= 0 && high < page, "the layout points outside of its page");
  }
  return cache;
}

}  // namespace gsd
