// Token graphs, vllm_gsd/method/graph.py: a GraphBatch and one graph of it.
#pragma once

#include <vector>

#include "array.h"
#include "constants.h"

namespace gsd {

// One graph. Only these functions write the links between nodes, so links are not checked.
struct Graph {
  int64_t* token;
  int32_t *parent, *depth;
  float *prob, *survival;
  int8_t* origin;
  int32_t *merged, *first_child, *next_sibling;
  int32_t* size;
  int64_t* context;
  int64_t capacity;

  int32_t find_child(int32_t above, int64_t wanted) const {
    int32_t child = first_child[above];
    while (child != NONE && token[child] != wanted) child = next_sibling[child];
    return child;
  }

  // Returns the new node, or NONE if the graph is full.
  int32_t add_child(int32_t above, int64_t new_token, float chance, int64_t source) {
    const int32_t node = *size;
    if (node >= capacity) return NONE;
    *size = node + 1;
    token[node] = new_token;
    parent[node] = above;
    depth[node] = depth[above] + 1;
    prob[node] = chance;
    survival[node] = survival[above] * chance;
    origin[node] = static_cast<int8_t>(source);
    merged[node] = first_child[node] = next_sibling[node] = NONE;
    int32_t last = first_child[above];
    if (last == NONE) {
      first_child[above] = node;
      return node;
    }
    while (next_sibling[last] != NONE) last = next_sibling[last];
    next_sibling[last] = node;
    return node;
  }

  // Raises the probability of an existing node that a text suggests too.
  void agree(int32_t node, float chance) {
    if (origin[node] != ORIGIN_DRAFT) return;
    prob[node] = prob[node] + chance * (1.0f - prob[node]);
    origin[node] = ORIGIN_AGREED;
  }

  // The node whose children follow ``node``: the target of a merged edge, else ``node`` itself.
  int32_t beyond(int32_t node) const { return merged[node] == NONE ? node : merged[node]; }

  // The survival of the ``num_nodes``-th best node, 0 if there are fewer. ``scratch`` is memory for sorting.
  float survival_floor(int64_t num_nodes, std::vector<float>& scratch) const;

  template <typename T>
  void reset(const T* committed, int64_t length) {
    token[0] = committed[length - 1];
    parent[0] = merged[0] = first_child[0] = next_sibling[0] = NONE;
    depth[0] = 0;
    prob[0] = survival[0] = 1.0f;
    origin[0] = ORIGIN_ROOT;
    *size = 1;
    for (int64_t back = 0; back < MAX_CONTEXT; ++back) {
      const int64_t place = length - 2 - back;
      context[back] = place >= 0 ? static_cast<int64_t>(committed[place]) : NONE;
    }
  }
};

// A GraphBatch.
class Graphs {
 public:
  explicit Graphs(py::handle graphs);

  int64_t capacity() const { return token_.shape[1]; }
  Graph graph(int64_t row) const;

 private:
  template <typename T>
  View<T, 2> field(int index, const char* name) const;

  Tuple graphs_;
  View<int64_t, 2> token_;
  View<int32_t, 2> parent_, depth_;
  View<float, 2> prob_, survival_;
  View<int8_t, 2> origin_;
  View<int32_t, 2> merged_, first_child_, next_sibling_;
  View<int32_t, 1> size_;
  View<int64_t, 2> context_;
};

// The nodes to expand, a padded list per graph.
class Frontier {
 public:
  Frontier(py::handle nodes, py::handle length)
      : nodes_(view<const int32_t, 2>(nodes, "frontier")), length_(view<const int32_t, 1>(length, "frontier_len")) {
    check_size(nodes_.size(), length_.size(), "frontier");
    for (int64_t row = 0; row < rows(); ++row) {
      if (length_[row] < 0 || length_[row] > nodes_.shape[1])
        throw py::value_error("frontier_len: a length is not one of the frontier's");
      total_ += length_[row];
    }
  }

  int64_t rows() const { return length_.size(); }
  int64_t length(int64_t row) const { return length_[row]; }
  int64_t total() const { return total_; }
  int32_t node(int64_t row, int64_t place, int64_t capacity) const {
    return static_cast<int32_t>(placed(nodes_.row(row)[place], capacity, "frontier"));
  }

 private:
  View<const int32_t, 2> nodes_;
  View<const int32_t, 1> length_;
  int64_t total_ = 0;
};

}  // namespace gsd
