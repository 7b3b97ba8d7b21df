// vllm_gsd::tree_attention: checks, cuts the work into tasks, runs them. Python side and formula:
// vllm_gsd/ops/attention/cpu.py.
#include "tree_attention.h"

#include <ATen/Parallel.h>
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "isa.h"
#include "ops.h"
#include "scratch.h"

#define GSD_WITH_BF16
#define GSD_KERNEL_BODY "tree_attention_body.h"
#include "each_isa.h"

namespace gsd {

namespace {

template <typename T>
AttentionFns fns_for(int64_t head_size) {
#if GSD_X86
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    if (current_isa() == Isa::avx512bf16 && head_size % 2 == 0)
      return {avx512bf16::run_task<T>, avx512bf16::merge_splits<T>};
  }
  if (current_isa() >= Isa::avx512) return {avx512::run_task<T>, avx512::merge_splits<T>};
  if (current_isa() == Isa::avx2) return {avx2::run_task<T>, avx2::merge_splits<T>};
#endif
  return {baseline::run_task<T>, baseline::merge_splits<T>};
}

AttentionFns kernel_for(at::ScalarType dtype, int64_t head_size) {
  switch (dtype) {
    case at::kFloat: return fns_for<float>(head_size);
    case at::kBFloat16: return fns_for<c10::BFloat16>(head_size);
    case at::kHalf: return fns_for<c10::Half>(head_size);
    default: TORCH_CHECK_VALUE(false, "tree_attention works on float32, bfloat16 and float16, not ", dtype);
  }
}

// Every 16 entries, from the first on, are contiguous.
bool contiguous_by_16(const int32_t* table, int64_t size) {
  for (int64_t i = 0; i < size; ++i)
    if (i % 16 != 0 && table[i] != table[i - 1] + 1) return false;
  return size % 16 == 0;
}

// All entries lie at one distance.
bool linear(const int32_t* table, int64_t size) {
  for (int64_t i = 2; i < size; ++i)
    if (table[i] - table[i - 1] != table[1] - table[0]) return false;
  return size >= 2;
}

void check_inputs(const at::Tensor& output, const at::Tensor& query, const at::Tensor& kv_cache,
                  const at::Tensor& block_table, const at::Tensor& query_start_loc,
                  const at::Tensor& prefix_lens, const at::Tensor& positions, const at::Tensor& tree_mask,
                  const std::optional<at::Tensor>& sinks) {
  const auto dtype = query.scalar_type();
  TORCH_CHECK_VALUE(output.scalar_type() == dtype && kv_cache.scalar_type() == dtype,
                    "output, query and kv_cache must have one dtype, not ", output.scalar_type(), ", ", dtype,
                    " and ", kv_cache.scalar_type());
  TORCH_CHECK_VALUE(query.dim() == 3 && output.sizes() == query.sizes(),
                    "query and output must both be [num_rows, num_heads, head_size], not ", query.sizes(),
                    " and ", output.sizes());
  TORCH_CHECK_VALUE(query.stride(2) == 1 && output.stride(2) == 1,
                    "the last dimension of query and output must be contiguous");
  TORCH_CHECK_VALUE(kv_cache.dim() == 4 && kv_cache.size(3) == 2 * query.size(2),
                    "kv_cache must be [num_blocks, kv_heads, block_size, 2 * head_size] with the query's ",
                    "head size ", query.size(2), ", not ", kv_cache.sizes());
  TORCH_CHECK_VALUE(kv_cache.size(1) > 0 && query.size(1) % kv_cache.size(1) == 0, "the ", query.size(1),
                    " query heads cannot share ", kv_cache.size(1), " KV heads evenly");
  TORCH_CHECK_VALUE(query_start_loc.scalar_type() == at::kInt && query_start_loc.dim() == 1 &&
                        query_start_loc.size(0) >= 1 && query_start_loc.is_contiguous(),
                    "query_start_loc must be a contiguous int32 vector");
  const int64_t requests = query_start_loc.size(0) - 1;
  TORCH_CHECK_VALUE(block_table.scalar_type() == at::kInt && block_table.dim() == 2 &&
                        block_table.size(0) >= requests &&
                        (block_table.size(1) <= 1 || block_table.stride(1) == 1),
                    "block_table must be int32 [num_reqs, max_blocks]");
  TORCH_CHECK_VALUE(prefix_lens.scalar_type() == at::kInt && prefix_lens.dim() == 1 &&
                        prefix_lens.size(0) >= requests && prefix_lens.is_contiguous(),
                    "prefix_lens must be a contiguous int32 [num_reqs]");
  TORCH_CHECK_VALUE(positions.scalar_type() == at::kLong && positions.dim() == 1 && positions.is_contiguous(),
                    "positions must be a contiguous int64 [num_rows]");
  TORCH_CHECK_VALUE(tree_mask.scalar_type() == at::kLong && tree_mask.dim() == 2 && tree_mask.is_contiguous(),
                    "tree_mask must be a contiguous int64 [num_rows, words]");
  const int32_t* starts = query_start_loc.const_data_ptr<int32_t>();
  TORCH_CHECK_VALUE(starts[0] >= 0 && std::is_sorted(starts, starts + requests + 1),
                    "query_start_loc must not decrease from at least 0");
  const int32_t rows = starts[requests];
  TORCH_CHECK_VALUE(rows <= query.size(0) && rows <= positions.size(0) && rows <= tree_mask.size(0),
                    "query_start_loc ends at row ", rows, ", but there are ", query.size(0),
                    " rows in query, ", positions.size(0), " in positions, ", tree_mask.size(0),
                    " in tree_mask");
  if (sinks)
    TORCH_CHECK_VALUE(sinks->scalar_type() == at::kFloat && sinks->dim() == 1 && sinks->is_contiguous() &&
                          sinks->size(0) == query.size(1),
                      "sinks must be a contiguous float32 [num_heads]");
}

// One past the last key that some row of the request attends; the blocks of all that may be read exist.
int64_t checked_keys(const TreeAttention& op, int64_t request, int64_t max_blocks) {
  const int64_t begin = op.query_start[request], end = op.query_start[request + 1], prefix = op.prefix[request];
  TORCH_CHECK_VALUE(prefix >= 0, "request ", request, " has a prefix of ", prefix, " keys");
  int64_t keys = 0;
  for (int64_t row = begin; row < end; ++row) keys = std::max(keys, keys_end(op, prefix, row));
  const int64_t blocks = (keys + op.cache.block_size - 1) / op.cache.block_size;
  TORCH_CHECK_VALUE(blocks <= max_blocks, "request ", request, " attends ", keys,
                    " keys, but its block_table has only ", max_blocks, " blocks of ", op.cache.block_size);
  const int32_t* block = op.block_table + request * op.block_table_row;
  for (int64_t i = 0; i < blocks; ++i)
    TORCH_CHECK_VALUE(block[i] >= 0 && block[i] < op.cache.num_blocks, "block_table names block ", block[i],
                      " of ", op.cache.num_blocks);
  return keys;
}

// How the work on one request and KV head is cut: its query vectors into pieces, its spans of keys into splits.
struct Cut {
  int64_t pieces, splits;
};

// The cut with which `tasks` equal ones finish first. In units of one vector times one key, a task costs its
// own product, about kReading vectors for fetching the keys, and kMerging keys for a span's partial result.
Cut best_cut(int64_t tasks, int64_t vectors, int64_t keys, int64_t threads) {
  constexpr int64_t kReading = 4, kMerging = 48, kFewestVectors = 8;
  Cut best{1, 1};
  int64_t best_time = std::numeric_limits<int64_t>::max();
  const int64_t most_pieces = std::max<int64_t>(1, vectors / kFewestVectors);
  const int64_t spans = std::max<int64_t>(1, keys / kSpan), most_splits = std::min(spans, 2 * threads);
  for (int64_t pieces = 1; pieces <= most_pieces; ++pieces) {
    const int64_t piece = (vectors + pieces - 1) / pieces;
    for (int64_t splits = 1; splits <= most_splits; ++splits) {
      const int64_t turns = (tasks * pieces * splits + threads - 1) / threads, share = (spans + splits - 1) / splits;
      const int64_t merging = splits > 1 ? piece * share * kMerging : 0;
      const int64_t time = turns * ((piece + kReading) * std::min(keys, share * kSpan) + merging);
      if (time >= best_time) continue;
      best = {pieces, splits};
      best_time = time;
    }
  }
  return best;
}

struct Plan {
  std::vector<AttentionTask> tasks;
  std::vector<AttentionTask> merges;  // one task of each group of splits
  int64_t partials = 0;               // floats of all partial results
};

Plan plan_tasks(const TreeAttention& op, int64_t requests, int64_t max_blocks) {
  int64_t largest = 1, busy = 0;
  std::vector<int64_t> vectors(requests), keys(requests);
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t rows = op.query_start[r + 1] - op.query_start[r];
    vectors[r] = rows * op.group;
    keys[r] = checked_keys(op, r, max_blocks);
    if (op.window) keys[r] = std::min(keys[r], op.window + rows);  // for the costs below
    largest = std::max(largest, vectors[r] * keys[r]);
    busy += vectors[r] > 0;
  }
  const int64_t threads = at::get_num_threads(), heads = op.cache.num_kv_heads;
  Plan plan;
  for (int64_t r = 0; r < requests; ++r) {
    if (vectors[r] == 0) continue;
    Cut cut{1, 1};
    if (busy * heads < 8 * threads && 2 * vectors[r] * keys[r] > largest)
      cut = best_cut(busy * heads, vectors[r], keys[r], threads);
    cut.pieces = std::max(cut.pieces, (vectors[r] + kMostVectors - 1) / kMostVectors);
    AttentionTask task{};
    task.request = r;
    task.splits = cut.splits;
    task.cost = vectors[r] * keys[r] / (cut.pieces * cut.splits);
    for (task.kv_head = 0; task.kv_head < heads; ++task.kv_head) {
      for (int64_t piece = 0; piece < cut.pieces; ++piece) {
        task.begin = vectors[r] * piece / cut.pieces;
        task.end = vectors[r] * (piece + 1) / cut.pieces;
        task.partial = plan.partials;
        for (task.split = 0; task.split < cut.splits; ++task.split) plan.tasks.push_back(task);
        if (cut.splits == 1) continue;
        plan.merges.push_back(task);
        plan.partials += range_of(op, task).spans() * span_floats(task.end - task.begin, op.cache.head_size);
      }
    }
  }
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
                   [](const auto& a, const auto& b) { return a.cost > b.cost; });
  return plan;
}

}  // namespace

void tree_attention(at::Tensor output, const at::Tensor& query, const at::Tensor& kv_cache,
                    const at::Tensor& tables, const at::Tensor& block_table,
                    const at::Tensor& query_start_loc, const at::Tensor& prefix_lens,
                    const at::Tensor& positions, const at::Tensor& tree_mask, double scale,
                    int64_t sliding_window, double softcap, const std::optional<at::Tensor>& sinks) {
  check_inputs(output, query, kv_cache, block_table, query_start_loc, prefix_lens, positions, tree_mask,
               sinks);
  TreeAttention op;
  op.cache = paged_cache(kv_cache, tables);
  const int64_t block_size = op.cache.block_size, head_size = op.cache.head_size;
  op.keys_in_place = contiguous_by_16(op.cache.key.token, block_size) && linear(op.cache.key.dim, head_size);
  op.values_in_place = contiguous_by_16(op.cache.value.dim, head_size) &&
                       linear(op.cache.value.token, block_size) && block_size % 16 == 0;
  op.output = static_cast<char*>(output.data_ptr());
  op.query = static_cast<const char*>(query.const_data_ptr());
  op.output_row = output.stride(0);
  op.output_head = output.stride(1);
  op.query_row = query.stride(0);
  op.query_head = query.stride(1);
  op.block_table = block_table.const_data_ptr<int32_t>();
  op.block_table_row = block_table.stride(0);
  op.query_start = query_start_loc.const_data_ptr<int32_t>();
  op.prefix = prefix_lens.const_data_ptr<int32_t>();
  op.positions = positions.const_data_ptr<int64_t>();
  op.mask = tree_mask.const_data_ptr<int64_t>();
  op.mask_words = tree_mask.size(1);
  op.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  op.group = query.size(1) / op.cache.num_kv_heads;
  op.window = std::max<int64_t>(sliding_window, 0);
  op.scale = static_cast<float>(scale);
  op.softcap = static_cast<float>(softcap);

  const Plan plan = plan_tasks(op, query_start_loc.size(0) - 1, block_table.size(1));
  const AttentionFns kernel = kernel_for(query.scalar_type(), head_size);
  int64_t vectors = 0;
  for (const AttentionTask& task : plan.tasks) vectors = std::max<int64_t>(vectors, task.end - task.begin);
  const int64_t tasks = plan.tasks.size(), merges = plan.merges.size();
  const int threads = tasks > 1 ? at::get_num_threads() : 1;
  const int64_t floats = round_up(scratch_floats(vectors, head_size), 16);
  float* const all_scratch = static_cast<float*>(scratch_of(threads * floats * sizeof(float)));
  const std::unique_ptr<float[]> partials(plan.partials ? new float[plan.partials] : nullptr);
#pragma omp parallel num_threads(threads)
  {
    float* scratch = all_scratch + omp_get_thread_num() * floats;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; ++i) kernel.run(op, plan.tasks[i], scratch, partials.get());
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < merges; ++i) kernel.merge(op, plan.merges[i], scratch, partials.get());
  }
}

}  // namespace gsd
