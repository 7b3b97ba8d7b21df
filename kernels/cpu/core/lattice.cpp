// Token graphs from drafted blocks, vllm_gsd/method/lattice.py.
#include <algorithm>
#include <vector>

#include "graph.h"

namespace gsd {

namespace {

struct Edge {
  int32_t parent;
  int64_t candidate;
  float prob, survival;
};

// Adds edges as nodes: first the best edge into each candidate, then merged edges to these. Returns the merged ones.
int64_t add_edges(Graph& graph, const std::vector<Edge>& edges, const int64_t* token, std::vector<int32_t>& nodes,
                  std::vector<const Edge*>& best) {
  std::fill(nodes.begin(), nodes.end(), NONE);
  std::fill(best.begin(), best.end(), nullptr);
  for (const Edge& edge : edges) {
    const Edge*& known = best[edge.candidate];
    if (known == nullptr || edge.survival > known->survival) known = &edge;
  }
  for (size_t candidate = 0; candidate < nodes.size(); ++candidate)
    if (best[candidate] != nullptr)
      nodes[candidate] = graph.add_child(best[candidate]->parent, token[candidate], best[candidate]->prob, ORIGIN_DRAFT);
  int64_t merged = 0;
  for (const Edge& edge : edges) {
    if (&edge == best[edge.candidate] || nodes[edge.candidate] == NONE) continue;
    const int32_t node = graph.add_child(edge.parent, token[edge.candidate], edge.prob, ORIGIN_DRAFT);
    if (node == NONE) continue;
    graph.merged[node] = nodes[edge.candidate];
    ++merged;
  }
  return merged;
}

}  // namespace

py::tuple add_lattices(py::handle graphs, py::handle drafted, py::handle tokens, py::handle probs, py::handle num_nodes,
                       py::handle max_depth, float theta_sib, float theta_prob) {
  const Graphs batch(graphs);
  const auto chosen = view<const bool, 1>(drafted, "drafted");
  const auto all_tokens = view<const int64_t, 3>(tokens, "tokens");
  const auto all_probs = view<const float, 4>(probs, "probs");
  const Ints most(num_nodes, "num_nodes"), deepest(max_depth, "max_depth");
  const int64_t depths = all_tokens.shape[1], width = all_tokens.shape[2];
  check_size(most.size(), chosen.size(), "num_nodes");
  check_size(deepest.size(), chosen.size(), "max_depth");
  check_size(all_tokens.size(), std::count(chosen.data, chosen.data + chosen.size(), true), "tokens");
  check_size(all_probs.size(), all_tokens.size(), "probs");
  check_size(all_probs.shape[1], depths, "a block of probs");
  check_size(std::min(all_probs.shape[2], all_probs.shape[3]), width, "a depth of probs");

  std::vector<float> scratch;
  std::vector<Edge> edges;
  std::vector<int32_t> above, nodes(width);
  std::vector<const Edge*> best(width);
  int64_t added = 0, merged = 0, pruned = 0, line = 0;
  for (int64_t row = 0; row < chosen.size(); ++row) {
    if (!chosen[row]) continue;
    Graph graph = batch.graph(row);
    check_size(*graph.size, 1, "a graph");
    above.assign(1, 0);
    for (int64_t depth = 0; depth < std::min(depths, deepest[row]); ++depth) {
      const int64_t* token = all_tokens.row(line, depth);
      const float floor = graph.survival_floor(most[row], scratch);
      edges.clear();
      for (size_t place = 0; place < above.size(); ++place) {
        const int32_t parent = above[place];
        if (parent == NONE || !(graph.survival[parent] >= std::max(floor, theta_prob))) continue;
        const float* prob = all_probs.row(line, depth, static_cast<int64_t>(place));
        float highest = 0.0f;
        for (int64_t k = 0; k < width; ++k)
          if (token[k] >= 0) highest = std::max(highest, prob[k]);
        for (int64_t k = 0; k < width; ++k) {
          if (token[k] < 0) continue;
          const float survival = graph.survival[parent] * prob[k];
          if (prob[k] >= theta_sib * highest && survival > floor) edges.push_back({parent, k, prob[k], survival});
          else ++pruned;
        }
      }
      const int64_t before = *graph.size;
      merged += add_edges(graph, edges, token, nodes, best);
      added += *graph.size - before;
      pruned += static_cast<int64_t>(edges.size()) - (*graph.size - before);
      above = nodes;
    }
    ++line;
  }
  return py::make_tuple(added, merged, pruned);
}

}  // namespace gsd
