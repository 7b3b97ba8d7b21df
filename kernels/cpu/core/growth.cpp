// Level-wise growth, vllm_gsd/method/growth.py.
#include <algorithm>

#include "graph.h"
#include "merge.h"

namespace gsd {

py::tuple add_candidates(py::handle graphs, py::handle frontier, py::handle frontier_len, py::handle tokens,
                         py::handle probs, py::handle num_nodes, float theta_sib, py::handle merge_ngram) {
  const Graphs batch(graphs);
  const Frontier nodes(frontier, frontier_len);
  const auto all_tokens = view<const int64_t, 2>(tokens, "tokens");
  const auto all_probs = view<const float, 2>(probs, "probs");
  const Ints most(num_nodes, "num_nodes"), ngram(merge_ngram, "merge_ngram");
  const int64_t width = all_tokens.shape[1];
  check_size(all_tokens.size(), nodes.total(), "tokens");
  check_size(all_probs.size(), nodes.total(), "probs");
  check_size(all_probs.shape[1], width, "a row of probs");
  check_size(most.size(), nodes.rows(), "num_nodes");
  check_size(ngram.size(), nodes.rows(), "merge_ngram");

  Merger merger;
  std::vector<float> scratch;
  int64_t added = 0, merged = 0, pruned = 0, line = 0;
  for (int64_t row = 0; row < nodes.rows(); ++row) {
    if (nodes.length(row) == 0) continue;
    Graph graph = batch.graph(row);
    const float floor = graph.survival_floor(most[row], scratch);
    for (int64_t place = 0; place < nodes.length(row); ++place, ++line) {
      const int32_t parent = nodes.node(row, place, *graph.size);
      const int64_t* token = all_tokens.row(line);
      const float* prob = all_probs.row(line);
      for (int64_t k = 0; k < width; ++k) {
        if (token[k] < 0) continue;
        if (prob[k] < theta_sib * prob[0] || graph.survival[parent] * prob[k] <= floor) {
          ++pruned;
          continue;
        }
        if (graph.find_child(parent, token[k]) != NONE) continue;  // another source has already added it
        const int32_t target = merger.target(graph, parent, token[k], ngram[row]);
        const int32_t node = graph.add_child(parent, token[k], prob[k], ORIGIN_DRAFT);
        if (node == NONE) {
          ++pruned;
          continue;
        }
        ++added;
        graph.merged[node] = target;
        merged += target != NONE;
      }
    }
  }
  return py::make_tuple(added, merged, pruned);
}

void next_frontier(py::handle graphs, py::handle first_new, py::handle num_nodes, py::handle room, float theta_prob,
                   py::handle frontier, py::handle frontier_len) {
  const Graphs batch(graphs);
  const Ints first(first_new, "first_new"), most(num_nodes, "num_nodes"), free(room, "room");
  const auto chosen = view<int32_t, 2>(frontier, "frontier");
  const auto length = view<int32_t, 1>(frontier_len, "frontier_len");
  check_size(most.size(), first.size(), "num_nodes");
  check_size(free.size(), first.size(), "room");
  check_size(chosen.size(), first.size(), "frontier");
  check_size(length.size(), first.size(), "frontier_len");

  std::vector<float> scratch;
  for (int64_t row = 0; row < first.size(); ++row) {
    const Graph graph = batch.graph(row);
    const float floor = graph.survival_floor(most[row], scratch);
    const int64_t limit = std::min(free[row], chosen.shape[1]);
    int32_t* nodes = chosen.row(row);
    int64_t count = 0;
    for (int32_t node = static_cast<int32_t>(std::max<int64_t>(0, first[row])); node < *graph.size; ++node) {
      const float survival = graph.survival[node];
      if (graph.merged[node] != NONE || survival < theta_prob || survival < floor) continue;
      // Insert in order of survival and keep the best ``limit``.
      int64_t place = std::min(count, limit);
      while (place > 0 && graph.survival[nodes[place - 1]] < survival) {
        if (place < limit) nodes[place] = nodes[place - 1];
        --place;
      }
      if (place >= limit) continue;
      nodes[place] = node;
      count = std::min(count + 1, limit);
    }
    length[row] = static_cast<int32_t>(count);
  }
}

}  // namespace gsd
