// One draft level, vllm_gsd/method/draft_level.py.
#include <algorithm>
#include <vector>

#include "cells.h"
#include "graph.h"
#include "mask.h"

namespace gsd {

py::array_t<double> frontier_chances(py::handle graphs, py::handle frontier, py::handle frontier_len,
                                     py::handle factor, py::handle trust) {
  const Graphs batch(graphs);
  const Frontier nodes(frontier, frontier_len);
  const Factor factors(factor, "factor");
  const auto trusts = trust_of(trust, nodes.rows());
  py::array_t<double> result(nodes.total());
  double* chance = result.mutable_data();
  for (int64_t row = 0; row < nodes.rows(); ++row) {
    const Graph graph = batch.graph(row);
    for (int64_t place = 0; place < nodes.length(row); ++place) {
      const int32_t node = nodes.node(row, place, graph.capacity);
      const float worth = calibrated<float>(factors, NATIVE, graph.depth[node], graph.survival[node]);
      *chance++ = std::min(1.0f, worth * trusts.row(row)[NATIVE]);
    }
  }
  return result;
}

void keep_best(py::handle frontier, py::handle frontier_len, py::handle chances, int64_t count) {
  const int64_t total = Frontier(frontier, frontier_len).total();
  const auto nodes = view<int32_t, 2>(frontier, "frontier");
  const auto length = view<int32_t, 1>(frontier_len, "frontier_len");
  const auto chance = view<const double, 1>(chances, "chances");
  if (count >= chance.size()) return;
  check_size(count, 0, "count");
  check_size(chance.size(), total, "chances");
  const std::vector<int64_t> order = falling_order(chance.data, chance.size());
  std::vector<char> kept(chance.size(), 0);
  for (int64_t i = 0; i < count; ++i) kept[order[i]] = 1;
  int64_t line = 0;
  for (int64_t row = 0; row < length.size(); ++row) {
    int32_t* node = nodes.row(row);
    int32_t left = 0;
    for (int64_t place = 0; place < length[row]; ++place, ++line)
      if (kept[line]) node[left++] = node[place];
    length[row] = left;
  }
}

py::array_t<int64_t> parent_lines(py::handle graphs, py::handle frontier, py::handle frontier_len, py::handle lines) {
  const Graphs batch(graphs);
  const Frontier nodes(frontier, frontier_len);
  const auto line_of = view<int64_t, 2>(lines, "lines");
  check_size(line_of.size(), nodes.rows(), "lines");
  py::array_t<int64_t> result(nodes.total());
  int64_t* parents = result.mutable_data();
  int64_t line = 0;
  for (int64_t row = 0; row < nodes.rows(); ++row) {
    const Graph graph = batch.graph(row);
    for (int64_t place = 0; place < nodes.length(row); ++place, ++line) {
      const int32_t node = nodes.node(row, place, std::min(graph.capacity, line_of.shape[1]));
      parents[line] = line_of.row(row)[placed(graph.parent[node], line_of.shape[1], "a parent")];
      line_of.row(row)[node] = line;
    }
  }
  return result;
}

void level_rows(py::handle graphs, py::handle slots, py::handle frontier, py::handle frontier_len, py::handle token,
                py::handle depth, py::handle slot, py::handle mask) {
  const Graphs batch(graphs);
  const Frontier nodes(frontier, frontier_len);
  const Tuple draft_slots(slots, 2, "slots must be DraftSlots");
  const auto used = view<int32_t, 1>(draft_slots[0], "slots.used");
  const auto seen = view<int64_t, 3>(draft_slots[1], "slots.mask");
  const auto tokens = view<int64_t, 1>(token, "token");
  const auto depths = view<int32_t, 1>(depth, "depth");
  const auto own_slots = view<int32_t, 1>(slot, "slot");
  const auto masks = view<int64_t, 2>(mask, "mask");
  const int64_t words = seen.shape[2];
  check_size(used.size(), nodes.rows(), "slots.used");
  check_size(seen.size(), nodes.rows(), "slots.mask");
  check_size(seen.shape[1], batch.capacity(), "a row of slots.mask");
  check_size(tokens.size(), nodes.total(), "token");
  check_size(depths.size(), nodes.total(), "depth");
  check_size(own_slots.size(), nodes.total(), "slot");
  check_size(masks.size(), nodes.total(), "mask");
  if (masks.shape[1] != words) throw py::value_error("mask must be as wide as slots.mask");

  int64_t line = 0;
  for (int64_t row = 0; row < nodes.rows(); ++row) {
    const Graph graph = batch.graph(row);
    for (int64_t place = 0; place < nodes.length(row); ++place, ++line) {
      const int32_t node = nodes.node(row, place, graph.capacity);
      const auto parent = placed(graph.parent[node], graph.capacity, "a parent");
      const int64_t own = placed(used[row], 64 * words, "slots.used");
      used[row] += 1;
      int64_t* ours = seen.row(row, node);
      // The root's key and value are in the committed text, so its children inherit no slot.
      write_mask(ours, parent == 0 ? nullptr : seen.row(row, parent), words, own);
      tokens[line] = graph.token[node];
      depths[line] = graph.depth[node];
      own_slots[line] = static_cast<int32_t>(own);
      std::copy_n(ours, words, masks.row(line));
    }
  }
}

}  // namespace gsd
