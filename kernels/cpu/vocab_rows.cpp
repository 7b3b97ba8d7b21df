// vllm_gsd::topk_softmax and vllm_gsd::argmax_of_walks. Rows of logits are cut into chunks of fixed size, so that the
// result does not depend on the number of threads. Python side: vllm_gsd/ops/topk/api.py.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/step.h"
#include "isa.h"
#include "ops.h"

#define GSD_KERNEL_BODY "vocab_rows_body.h"
#include "each_isa.h"

namespace gsd {

namespace {

constexpr int64_t kChunk = 4096;

template <typename T>
struct Kernels {
  decltype(&baseline::scan_chunk<T>) scan = baseline::scan_chunk<T>;
  decltype(&baseline::highest_of_chunk<T>) highest = baseline::highest_of_chunk<T>;
  decltype(&baseline::first_equal<T>) first_equal = baseline::first_equal<T>;

  Kernels() {
#if GSD_X86
    if (current_isa() >= Isa::avx512) {
      scan = avx512::scan_chunk<T>;
      highest = avx512::highest_of_chunk<T>;
      first_equal = avx512::first_equal<T>;
    } else if (current_isa() == Isa::avx2) {
      scan = avx2::scan_chunk<T>;
      highest = avx2::highest_of_chunk<T>;
      first_equal = avx2::first_equal<T>;
    }
#endif
  }
};

template <typename T>
struct Rows {
  const T* data;
  int64_t stride, rows, width, chunks;

  explicit Rows(const at::Tensor& logits)
      : data(logits.const_data_ptr<T>()), stride(logits.stride(0)), rows(logits.size(0)),
        width(logits.size(1)), chunks((width + kChunk - 1) / kChunk) {}
  const T* row(int64_t r) const { return data + r * stride; }
  int64_t chunk_end(int64_t chunk) const { return std::min(width, (chunk + 1) * kChunk); }
  bool worth_threads() const { return rows * width > 2 * kChunk; }
};

// Results by chunk, where chunk c of row r is entry r * chunks + c, or results by row.
struct Found {
  std::vector<float> values, sum;
  std::vector<int32_t> ids;
  std::vector<int64_t> count;
  Found(int64_t entries, int64_t k) : values(entries * k), sum(entries), ids(entries * k), count(entries) {}
};

// Merges the chunks of a row in order: their sums, and their lists into the k best, `values` and `best`.
void merge_row(const Found& found, int64_t first, int64_t chunks, int64_t k, float* values, int32_t* best,
               float* probs, int64_t* ids) {
  baseline::TopList top{values, best, k, 0};
  for (int64_t c = first; c < first + chunks; ++c)
    for (int64_t i = c * k; i < c * k + found.count[c]; ++i) top.offer(found.values[i], found.ids[i]);
  const double highest = values[0];
  double total = 0;
  for (int64_t c = first; c < first + chunks; ++c)
    if (found.sum[c] != 0.0f) total += found.sum[c] * std::exp(found.values[c * k] - highest);
  for (int64_t i = 0; i < k; ++i) {
    // Without a softmax (only -inf, or a NaN or +inf among the logits) the probabilities are 0.
    probs[i] = total > 0 ? std::exp(values[i] - highest) / total : 0.0;
    ids[i] = best[i];
  }
}

template <typename T>
void topk_softmax_rows(const at::Tensor& logits, int64_t k, float* probs, int64_t* ids) {
  const Rows<T> in(logits);
  const Kernels<T> kernels;
  Found found(in.rows * in.chunks, k), merged(in.rows, k);  // here, as an exception must not leave the region
#pragma omp parallel num_threads(at::get_num_threads()) if (in.worth_threads())
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < in.rows * in.chunks; ++i) {
      const int64_t chunk = i % in.chunks;
      found.sum[i] = kernels.scan(in.row(i / in.chunks), chunk * kChunk, in.chunk_end(chunk), k,
                                  &found.values[i * k], &found.ids[i * k], found.count[i]);
    }
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < in.rows; ++r)
      merge_row(found, r * in.chunks, in.chunks, k, &merged.values[r * k], &merged.ids[r * k], probs + r * k,
                ids + r * k);
  }
}

// Trees of rows, as in vllm_gsd/method/verify.py.
struct Trees {
  const int64_t* tokens;
  const int32_t *parents, *starts;
  int64_t count;
};

// Samples only the rows that a tree's walk visits; each sample decides the next row.
template <typename T>
void argmax_of_walks(const at::Tensor& logits, const Trees& trees, int64_t* ids) {
  const Rows<T> in(logits);
  const Kernels<T> kernels;
  std::fill(ids, ids + in.rows, -1);
  at::parallel_for(0, trees.count, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> highest(in.chunks);
    const auto sample = [&](int64_t r) {
      for (int64_t c = 0; c < in.chunks; ++c) highest[c] = kernels.highest(in.row(r), c * kChunk, in.chunk_end(c));
      int64_t chunk = 0;
      for (int64_t c = 1; c < in.chunks && !std::isnan(highest[chunk]); ++c)
        if (highest[c] > highest[chunk] || std::isnan(highest[c])) chunk = c;
      return ids[r] = kernels.first_equal(in.row(r), chunk * kChunk, in.chunk_end(chunk), highest[chunk]);
    };
    for (int64_t t = begin; t < end; ++t) {
      const int64_t root = trees.starts[t];
      for (int64_t place = 0; place >= 0;)
        place = child_carrying(trees.parents, trees.tokens, root, trees.starts[t + 1], place, sample(root + place));
    }
  });
}

// Checks `logits` and makes its rows contiguous.
at::Tensor check_rows(const at::Tensor& logits) {
  TORCH_CHECK_VALUE(logits.dim() == 2 && logits.size(1) >= 1, "logits must be [rows, vocabulary], not ",
                    logits.sizes());
  TORCH_CHECK_VALUE(logits.size(1) < std::numeric_limits<int32_t>::max(), "the vocabulary is too large");
  return logits.size(1) == 1 || logits.stride(1) == 1 ? logits : logits.contiguous();
}

// Calls `f` with a zero of the C++ type of `dtype`.
template <typename F>
void with_dtype(at::ScalarType dtype, F f) {
  switch (dtype) {
    case at::kFloat: return f(float{});
    case at::kBFloat16: return f(c10::BFloat16{});
    case at::kHalf: return f(c10::Half{});
    default: TORCH_CHECK_VALUE(false, "logits must be float32, bfloat16 or float16, not ", dtype);
  }
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> topk_softmax(const at::Tensor& logits, int64_t k) {
  const at::Tensor in = check_rows(logits);
  TORCH_CHECK_VALUE(k >= 1 && k <= in.size(1), "k must be from 1 to the vocabulary's ", in.size(1), ", not ",
                    k);
  at::Tensor probs = in.new_empty({in.size(0), k}, at::kFloat);
  at::Tensor ids = in.new_empty({in.size(0), k}, at::kLong);
  with_dtype(in.scalar_type(), [&](auto zero) {
    topk_softmax_rows<decltype(zero)>(in, k, probs.mutable_data_ptr<float>(),
                                      ids.mutable_data_ptr<int64_t>());
  });
  return {probs, ids};
}

at::Tensor argmax_of_walks(const at::Tensor& logits, const at::Tensor& tokens, const at::Tensor& parents,
                           const at::Tensor& starts) {
  const at::Tensor in = check_rows(logits);
  const int64_t rows = in.size(0), count = starts.numel() - 1;
  TORCH_CHECK_VALUE(tokens.scalar_type() == at::kLong && tokens.is_contiguous() && tokens.numel() == rows &&
                        parents.scalar_type() == at::kInt && parents.is_contiguous() && parents.numel() == rows,
                    "tokens and parents must be contiguous int64 and int32 [", rows, "]");
  TORCH_CHECK_VALUE(starts.scalar_type() == at::kInt && starts.is_contiguous() && count >= 0,
                    "starts must be a contiguous int32 [trees + 1]");
  const Trees trees{tokens.const_data_ptr<int64_t>(), parents.const_data_ptr<int32_t>(),
                    starts.const_data_ptr<int32_t>(), count};
  for (int64_t t = 0; t < count; ++t)
    TORCH_CHECK_VALUE(0 <= trees.starts[t] && trees.starts[t] < trees.starts[t + 1] && trees.starts[t + 1] <= rows,
                      "starts must rise, from 0 to at most ", rows);
  at::Tensor ids = in.new_empty({rows}, at::kLong);
  with_dtype(in.scalar_type(),
             [&](auto zero) { argmax_of_walks<decltype(zero)>(in, trees, ids.mutable_data_ptr<int64_t>()); });
  return ids;
}

}  // namespace gsd
