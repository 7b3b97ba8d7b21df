// vllm_gsd::best_paths chooses a depth's candidates of a drafted block. Python side: vllm_gsd/ops/lattice/api.py.
#include <ATen/Dispatch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "ops.h"

namespace gsd {

namespace {

constexpr float kNone = std::numeric_limits<float>::lowest();  // log-probability of what has none

// One block's scores at one depth, and what of them is known already.
template <typename T>
struct Depth {
  const T* scores;
  int64_t stride, rows, k;
  const int64_t* ids;             // [rows, k], the best tokens of each row, in descending order
  const float* best;              // [1 or k], log-probability of the best path to each candidate before
  int64_t before;                 // length of best
  std::vector<float> shift;       // [rows], from scores to log-probabilities

  float log_prob(int64_t row, int64_t token) const {
    const float found = static_cast<float>(scores[row * stride + token]) + shift[row];
    return std::isnan(found) ? kNone : std::max(found, kNone);
  }
  int64_t row_of(int64_t candidate) const { return rows == 1 ? 0 : candidate; }
  // The best path to a token, and the first candidate before that it leads over.
  std::pair<float, int64_t> path(int64_t token) const {
    std::pair<float, int64_t> found{best[0] + log_prob(0, token), 0};
    for (int64_t p = 1; p < before; ++p) {
      const float other = best[p] + log_prob(row_of(p), token);
      if (other > found.first) found = {other, p};
    }
    return found;
  }
};

// The candidates: the most probable token of the first row, then those that the best paths reach, the lowest of equals.
template <typename T>
void choose(const Depth<T>& depth, int64_t* chosen) {
  std::vector<int64_t> tokens(depth.ids, depth.ids + depth.rows * depth.k);
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  TORCH_CHECK_VALUE(static_cast<int64_t>(tokens.size()) >= depth.k, "a row of ids must name different tokens");
  std::vector<std::pair<float, int64_t>> order;
  for (const int64_t token : tokens)
    order.emplace_back(token == depth.ids[0] ? -std::numeric_limits<float>::infinity() : -depth.path(token).first, token);
  std::partial_sort(order.begin(), order.begin() + depth.k, order.end());
  for (int64_t i = 0; i < depth.k; ++i) chosen[i] = order[i].second;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> best_paths(const at::Tensor& scores, const at::Tensor& chances,
                                                          const at::Tensor& ids, const at::Tensor& best, bool merge) {
  TORCH_CHECK_VALUE(scores.dim() == 3 && scores.size(1) >= 1 && (scores.size(2) == 1 || scores.stride(2) == 1),
                    "scores must be [blocks, before, pool], each row contiguous, not ", scores.sizes());
  const int64_t count = scores.size(0), rows = scores.size(1), k = ids.size(-1), before = best.size(-1);
  TORCH_CHECK_VALUE(ids.sizes() == at::IntArrayRef({count, rows, k}) && ids.scalar_type() == at::kLong &&
                        ids.is_contiguous() && 1 <= k && k <= scores.size(2),
                    "ids must be a contiguous int64 [", count, ", ", rows, ", k]");
  TORCH_CHECK_VALUE(chances.sizes() == at::IntArrayRef({count, rows}) && chances.scalar_type() == at::kFloat &&
                        chances.is_contiguous(), "chances must be a contiguous float32 [", count, ", ", rows, "]");
  TORCH_CHECK_VALUE(best.sizes() == at::IntArrayRef({count, before}) && best.scalar_type() == at::kFloat &&
                        best.is_contiguous() && (rows == 1 || rows == before) && (before == 1 || before == k),
                    "best must be a contiguous float32 [", count, ", 1 or k]");
  const int64_t *id = ids.const_data_ptr<int64_t>(), pool = scores.size(2);
  for (int64_t i = 0; i < ids.numel(); ++i)
    TORCH_CHECK_VALUE(0 <= id[i] && id[i] < pool, "ids name token ", id[i], " of a pool of ", pool);
  at::Tensor places = ids.new_empty({count, k}), probs = best.new_empty({count, k, k});
  at::Tensor paths = best.new_empty({count, k});
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, scores.scalar_type(), "best_paths", [&] {
    for (int64_t b = 0; b < count; ++b) {
      Depth<scalar_t> depth{scores.const_data_ptr<scalar_t>() + b * scores.stride(0), scores.stride(1), rows, k,
                            id + b * rows * k, best.const_data_ptr<float>() + b * before, before,
                            std::vector<float>(rows)};
      for (int64_t row = 0; row < rows; ++row)
        depth.shift[row] = std::log(chances.const_data_ptr<float>()[b * rows + row]) -
                           static_cast<float>(depth.scores[row * depth.stride + depth.ids[row * k]]);
      int64_t* chosen = places.mutable_data_ptr<int64_t>() + b * k;
      choose(depth, chosen);
      for (int64_t c = 0; c < k; ++c) {
        const auto [likely, over] = depth.path(chosen[c]);
        paths.mutable_data_ptr<float>()[b * k + c] = likely;
        for (int64_t p = 0; p < k; ++p) {
          const bool kept = merge || before == 1 || p == over;
          probs.mutable_data_ptr<float>()[(b * k + p) * k + c] =
              kept ? std::exp(depth.log_prob(depth.row_of(p), chosen[c])) : 0.0f;
        }
      }
    }
  });
  return {places, probs, paths};
}

}  // namespace gsd
