// Calibrated chances, vllm_gsd/method/calibration.py.
#pragma once

#include <algorithm>
#include <cmath>

#include "array.h"

namespace gsd {

enum Source { kNative = 0, kMerged = 1, kNgram = 2, kShared = 3, kAgreed = 4 };
constexpr int64_t kSources = 5, kDepths = 3, kBins = 8;

struct Cell {
  int64_t depth, bin;
};

// A node's cell among those of its source. ``T`` is that of the survival: rounding is its own.
template <typename T>
Cell cell(int64_t depth, T survival) {
  const T bin = -std::ceil(std::log2(std::max(survival, static_cast<T>(1e-9f))));
  // Written so that what is no number has a bin, too.
  const int64_t bounded = bin >= kBins - 1 ? kBins - 1 : bin >= 0 ? static_cast<int64_t>(bin) : 0;
  return {placed(std::min(depth, kDepths) - 1, kDepths, "depth"), bounded};
}

// A float [sources, depths, bins], checked once and read often.
template <typename F>
class Cells {
 public:
  Cells(py::handle array, const char* name) : view_(view<F, 3>(array, name)) {
    if (view_.shape[1] != kDepths || view_.shape[2] != kBins)
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

// How far each request's own experience differs, float32 [num_graphs, sources].
inline View<const float, 2> trust_of(py::handle trust, int64_t rows) {
  const auto result = view<const float, 2>(trust, "trust");
  check_size(result.size(), rows, "trust");
  check_size(result.shape[1], kSources, "a row of trust");
  return result;
}

}  // namespace gsd
