// The operators of torch.ops.vllm_gsd; ops.cpp registers them, vllm_gsd/ops documents them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace gsd {

void tree_attention(at::Tensor output, const at::Tensor& query, const at::Tensor& kv_cache,
                    const at::Tensor& tables, const at::Tensor& block_table,
                    const at::Tensor& query_start_loc, const at::Tensor& prefix_lens,
                    const at::Tensor& positions, const at::Tensor& tree_mask, double scale,
                    int64_t sliding_window, double softcap, const std::optional<at::Tensor>& sinks);

void move_kv(at::TensorList kv_caches, at::TensorList tables, const at::Tensor& src_slots,
             const at::Tensor& dst_slots);

void write_kv(at::Tensor kv_cache, const at::Tensor& tables, const at::Tensor& key, const at::Tensor& value,
              const at::Tensor& slots);

std::tuple<at::Tensor, at::Tensor> topk_softmax(const at::Tensor& logits, int64_t k);

at::Tensor argmax_of_walks(const at::Tensor& logits, const at::Tensor& tokens, const at::Tensor& parents,
                           const at::Tensor& starts);

std::tuple<at::Tensor, at::Tensor, at::Tensor> best_paths(const at::Tensor& scores, const at::Tensor& chances,
                                                          const at::Tensor& ids, const at::Tensor& best, bool merge);

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

at::Tensor read_columns(const at::Tensor& packed, const at::Tensor& columns);

at::Tensor read_rows(const at::Tensor& states, const at::Tensor& rows, const std::optional<at::Tensor>& cleared);

void write_rows(at::Tensor states, const at::Tensor& rows, const at::Tensor& values);

void move_rows(at::Tensor states, const at::Tensor& sources, const at::Tensor& destinations);

}  // namespace gsd
