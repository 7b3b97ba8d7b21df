// Calibrated chances, vllm_gsd/method/cells.py.
#pragma once

#include <algorithm>

#include "array.h"
#include "constants.h"

namespace gsd {

struct Cell {
  int64_t depth, bin;
};

// A node's cell among those of its source: its depth, and the bin of its survival.
template <typename T>
Cell cell(int64_t depth, T survival) {
  int64_t bin = 0;
  for (T edge = T{0.5}; bin < NUM_BINS - 1 && survival <= edge; edge /= 2) ++bin;
  return {placed(std::min(depth, NUM_DEPTHS) - 1, NUM_DEPTHS, "depth"), bin};
}

// A float [sources, depths, bins]. The shape is checked once.
template <typename F>
class Cells {
 public:
  Cells(py::handle array, const char* name) : view_(view<F, 3>(array, name)) {
    if (view_.shape[1] != NUM_DEPTHS || view_.shape[2] != NUM_BINS)
      throw py::value_error(std::string(name) + " must have an entry for every source, depth and bin");
  }

  int64_t sources() const { return view_.size(); }

  F& at(int64_t source, const Cell& place) const {
    return view_.row(placed(source, sources(), "source"), place.depth)[place.bin];
  }

 private:
  View<F, 3> view_;
};

using Factor = Cells<const float>;

template <typename T>
T calibrated(const Factor& factor, int64_t source, int64_t depth, T survival) {
  return std::min(static_cast<T>(1), survival * factor.at(source, cell(depth, survival)));
}

// Each request's trust in the sources, float32 [num_graphs, sources].
inline View<const float, 2> trust_of(py::handle trust, int64_t rows) {
  const auto result = view<const float, 2>(trust, "trust");
  check_size(result.size(), rows, "trust");
  check_size(result.shape[1], NUM_SOURCES, "a row of trust");
  return result;
}

}  // namespace gsd
