// The outcome of a step, vllm_gsd/method/outcome.py.
#include <algorithm>
#include <vector>

#include "cells.h"
#include "trees.h"

namespace gsd {

namespace {

template <typename T>
py::array array_of(const std::vector<T>& values) {
  // A vector<bool> would pack its bits.
  py::array_t<std::conditional_t<std::is_same_v<T, char>, bool, T>> result(static_cast<py::ssize_t>(values.size()));
  std::copy(values.begin(), values.end(), result.mutable_data());
  return result;
}

py::array_t<int64_t> zeros(int64_t count) {
  py::array_t<int64_t> result(count);
  std::fill_n(result.mutable_data(), count, 0);
  return result;
}

}  // namespace

py::tuple kv_moves(py::handle parents, py::handle starts, py::handle places, py::handle first_rows) {
  const Ints place(places, "places"), root(first_rows, "first_rows");
  const Trees trees(parents, starts, place.size());
  check_size(root.size(), place.size(), "first_rows");
  std::vector<int64_t> sources, destinations;
  for (int64_t tree = 0; tree < place.size(); ++tree) {
    const int64_t end = trees.placed_in(tree, place[tree]);
    int64_t depth = 0;
    for (int64_t node = end; node > 0; node = trees.above(tree, node)) ++depth;
    for (int64_t node = end; node > 0; node = trees.above(tree, node), --depth) {
      if (node == depth) continue;
      sources.push_back(root[tree] + node);
      destinations.push_back(root[tree] + depth);
    }
  }
  return py::make_tuple(array_of(sources), array_of(destinations));
}

py::tuple tally(py::handle parents, py::handle starts, py::handle places, py::handle counted, py::handle depth,
                py::handle source, py::handle survival) {
  const Ints place(places, "places");
  const Trees trees(parents, starts, place.size());
  const auto wanted = view<const bool, 1>(counted, "counted");
  const auto depths = view<const int32_t, 1>(depth, "depth");
  const auto sources = view<const int8_t, 1>(source, "source");
  const auto survivals = view<const float, 1>(survival, "survival");
  check_size(wanted.size(), place.size(), "counted");
  check_size(depths.size(), trees.rows(), "depth");
  check_size(sources.size(), trees.rows(), "source");
  check_size(survivals.size(), trees.rows(), "survival");

  auto counts = zeros(ACCEPTED + NUM_SOURCES);
  auto length = zeros(place.size()), deepest = zeros(place.size());
  int64_t *count = counts.mutable_data(), *lengths = length.mutable_data(), *deepests = deepest.mutable_data();
  std::vector<char> accepted(trees.rows(), 0);
  std::vector<int64_t> ordinals;
  std::vector<int8_t> own_sources;
  std::vector<int32_t> own_depths;
  std::vector<float> own_survivals;
  std::vector<char> own_accepted;
  int64_t ordinal = -1;
  for (int64_t tree = 0; tree < place.size(); ++tree) {
    if (!wanted[tree]) continue;
    ++ordinal;
    const int64_t first = trees.first(tree);
    for (int64_t node = trees.placed_in(tree, place[tree]); node > 0; node = trees.above(tree, node)) {
      accepted[first + node] = 1;
      lengths[tree] += 1;
      count[MOVED] += depths[first + node] != node;
    }
    for (int64_t line = first + 1; line < trees.end(tree); ++line) {
      if (trees.parent(line) < 0) continue;  // a row without a node
      count[VERIFIED] += 1;
      deepests[tree] = std::max<int64_t>(deepests[tree], depths[line]);
      if (sources[line] < 0) {
        count[GRAMMAR] += accepted[line];
        continue;
      }
      count[ACCEPTED + placed(sources[line], NUM_SOURCES, "source")] += accepted[line];
      ordinals.push_back(ordinal);
      own_sources.push_back(sources[line]);
      own_depths.push_back(depths[line]);
      own_survivals.push_back(survivals[line]);
      own_accepted.push_back(accepted[line]);
    }
  }
  const auto nodes = py::make_tuple(array_of(ordinals), array_of(own_sources), array_of(own_depths),
                                    array_of(own_survivals), array_of(own_accepted));
  return py::make_tuple(counts, length, deepest, nodes);
}

}  // namespace gsd
