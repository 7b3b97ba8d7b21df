// Flattening, vllm_gsd/method/flatten.py.
#include <algorithm>
#include <vector>

#include "cells.h"
#include "graph.h"

namespace gsd {

namespace {

// A place that may be laid out next.
struct Place {
  float value, survival;
  int64_t order;  // order of discovery, which breaks ties
  int32_t node, parent, depth;
  bool crossed;  // whether the path crosses a merged edge

  // Whether it comes after the other, which std::push_heap calls "less".
  bool operator<(const Place& other) const {
    return value == other.value ? order > other.order : value < other.value;
  }
};

// Lists the places of one graph after the other: the root, then the nodes, best first.
class Flattener {
 public:
  Flattener(const Factor& factor) : factor_(factor) {}

  // Writes the root and at most ``most`` nodes no deeper than ``deepest`` to ``write(place number, place)``; returns how
  // many nodes.
  template <typename Write>
  int64_t run(const Graph& graph, int64_t most, int64_t deepest, const float* trust, Write&& write) {
    heap_.clear();
    order_ = 0;
    Place from{1.0f, 1.0f, 0, 0, NONE, 0, false};
    for (int32_t place = 0;; ++place) {
      write(place, from);
      if (from.depth < deepest) discover(graph, from, place, trust);
      if (place >= most || heap_.empty()) return place;
      std::pop_heap(heap_.begin(), heap_.end());
      from = heap_.back();
      heap_.pop_back();
    }
  }

 private:
  // Adds the children of ``from``, which is laid out at ``place``.
  void discover(const Graph& graph, const Place& from, int32_t place, const float* trust) {
    const bool crossed = from.crossed || graph.merged[from.node] != NONE;
    int32_t child = graph.first_child[graph.beyond(from.node)];
    for (; child != NONE; child = graph.next_sibling[child]) {
      const float survival = from.survival * graph.prob[child];
      const int64_t source = source_of(graph, child, crossed);
      const float own = trust[source] * calibrated<float>(factor_, source, from.depth + 1, survival);
      heap_.push_back({std::min(from.value, own), survival, ++order_, child, place, from.depth + 1, crossed});
      std::push_heap(heap_.begin(), heap_.end());
    }
  }

  static int64_t source_of(const Graph& graph, int32_t node, bool crossed) {
    switch (graph.origin[node]) {
      case ORIGIN_NGRAM: return NGRAM;
      case ORIGIN_SHARED: return SHARED;
      case ORIGIN_AGREED: return AGREED;
      default: return crossed || graph.merged[node] != NONE ? MERGED : NATIVE;
    }
  }

  const Factor& factor_;
  std::vector<Place> heap_;
  int64_t order_ = 0;
};

// A field of FlatTrees.
template <typename T>
struct Output {
  py::array_t<T> array;
  T* data;
  int64_t width;

  Output(int64_t rows, int64_t columns, T filling = T{})
      : array({rows, columns}), data(array.mutable_data()), width(columns) {
    std::fill_n(data, rows * columns, filling);
  }
  T* row(int64_t index) const { return data + index * width; }
};

}  // namespace

py::tuple flatten(py::handle graphs, py::handle num_nodes, py::handle max_depth, py::handle factor,
                  py::handle trust) {
  const Graphs batch(graphs);
  const Ints most(num_nodes, "num_nodes"), deepest(max_depth, "max_depth");
  const Factor factors(factor, "factor");
  const auto trusts = trust_of(trust, most.size());
  check_size(deepest.size(), most.size(), "max_depth");
  const int64_t count = most.size();
  int64_t width = 1;
  for (int64_t row = 0; row < count; ++row) width = std::max(width, 1 + most[row]);
  const Output<int64_t> token(count, width);
  const Output<int32_t> parent(count, width, NONE), depth(count, width), node(count, width);
  const Output<int8_t> origin(count, width);
  const Output<bool> via_merge(count, width);
  const Output<float> survival(count, width), value(count, width);
  py::array_t<int32_t> size(count);

  Flattener flattener(factors);
  for (int64_t row = 0; row < count; ++row) {
    const Graph graph = batch.graph(row);
    const auto write = [&](int32_t place, const Place& from) {
      token.row(row)[place] = graph.token[from.node];
      parent.row(row)[place] = from.parent;
      depth.row(row)[place] = from.depth;
      node.row(row)[place] = from.node;
      origin.row(row)[place] = graph.origin[from.node];
      via_merge.row(row)[place] = from.crossed || graph.merged[from.node] != NONE;
      survival.row(row)[place] = from.survival;
      value.row(row)[place] = from.value;
    };
    size.mutable_data()[row] = static_cast<int32_t>(flattener.run(graph, most[row], deepest[row], trusts.row(row), write));
  }
  return py::make_tuple(token.array, parent.array, depth.array, node.array, origin.array, via_merge.array,
                        survival.array, value.array, size);
}

}  // namespace gsd
