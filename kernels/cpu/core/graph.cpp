// Conversion of graphs from Python, and the operations of vllm_gsd/method/graph.py.
#include "graph.h"

#include <algorithm>
#include <cmath>

namespace gsd {

template <typename T>
View<T, 2> Graphs::field(int index, const char* name) const {
  const auto result = view<T, 2>(graphs_[index], name);
  if (index > 0 && (result.shape[0] != token_.shape[0] || result.shape[1] != token_.shape[1]))
    throw py::value_error(std::string(name) + " must be of the shape of graphs.token");
  return result;
}

Graphs::Graphs(py::handle graphs) : graphs_(graphs, 11, "graphs must be a GraphBatch") {
  token_ = field<int64_t>(0, "graphs.token");
  parent_ = field<int32_t>(1, "graphs.parent");
  depth_ = field<int32_t>(2, "graphs.depth");
  prob_ = field<float>(3, "graphs.prob");
  survival_ = field<float>(4, "graphs.survival");
  origin_ = field<int8_t>(5, "graphs.origin");
  merged_ = field<int32_t>(6, "graphs.merged");
  first_child_ = field<int32_t>(7, "graphs.first_child");
  next_sibling_ = field<int32_t>(8, "graphs.next_sibling");
  size_ = view<int32_t, 1>(graphs_[9], "graphs.size");
  context_ = view<int64_t, 2>(graphs_[10], "graphs.context");
  check_size(capacity(), 1, "graphs.token");
  if (size_.size() != token_.shape[0] || context_.shape[0] != token_.shape[0] || context_.shape[1] != MAX_CONTEXT)
    throw py::value_error("graphs.size and graphs.context must have a row for each graph");
}

Graph Graphs::graph(int64_t row) const {
  row = placed(row, token_.size(), "graphs");
  if (size_[row] < 0 || size_[row] > capacity()) throw py::value_error("graphs.size: a graph is larger than its arrays");
  return {token_.row(row),    parent_.row(row), depth_.row(row),       prob_.row(row),
          survival_.row(row), origin_.row(row), merged_.row(row),      first_child_.row(row),
          next_sibling_.row(row), &size_[row],  context_.row(row),     capacity()};
}

float Graph::survival_floor(int64_t num_nodes, std::vector<float>& scratch) const {
  const int64_t count = *size - 1;
  if (count < num_nodes) return 0.0f;
  if (num_nodes <= 0) return HUGE_VALF;  // no node is among the best zero nodes
  scratch.assign(survival + 1, survival + 1 + count);
  const auto wanted = scratch.begin() + (count - num_nodes);
  // NaN goes last, as in np.sort.
  std::nth_element(scratch.begin(), wanted, scratch.end(),
                   [](float a, float b) { return a < b || (b != b && a == a); });
  return *wanted;
}

void reset_all(py::handle graphs, py::handle token_ids, py::handle lines, py::handle length) {
  const Graphs batch(graphs);
  const Ints line(lines, "lines"), used(length, "length");
  check_size(used.size(), line.size(), "length");
  either<int32_t, int64_t, 2>(token_ids, "token_ids", [&](const auto& texts) {
    for (int64_t row = 0; row < line.size(); ++row) {
      const auto* text = texts.row(placed(line[row], texts.size(), "lines"));
      const int64_t count = std::min(used[row], texts.shape[1]);
      check_size(count, 1, "a text of token_ids");
      batch.graph(row).reset(text, count);
    }
  });
}

}  // namespace gsd
