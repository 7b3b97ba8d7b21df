// Calibration, vllm_gsd/method/cells.py.
#include "cells.h"

namespace gsd {

namespace {

double faded(double value, double keep, double prior) { return value + (keep - 1) * (value - prior); }

}  // namespace

py::array_t<float> chances(py::handle factor, py::handle source, py::handle depth, py::handle survival) {
  const Factor factors(factor, "factor");
  const Ints sources(source, "source"), depths(depth, "depth");
  return either<float, double, 1>(survival, "survival", [&](const auto& survivals) {
    check_size(sources.size(), survivals.size(), "source");
    check_size(depths.size(), survivals.size(), "depth");
    py::array_t<float> result(survivals.size());
    float* chance = result.mutable_data();
    for (int64_t node = 0; node < survivals.size(); ++node)
      chance[node] = static_cast<float>(calibrated(factors, sources[node], depths[node], survivals[node]));
    return result;
  });
}

void learn(py::handle factor, py::handle promised, py::handle taken, py::handle source, py::handle depth,
           py::handle survival, py::handle accepted) {
  const Cells<float> factors(factor, "factor");
  const Cells<double> promises(promised, "promised"), takes(taken, "taken");
  const Ints sources(source, "source"), depths(depth, "depth");
  const auto accepts = view<const bool, 1>(accepted, "accepted");
  const auto each = [&](auto&& body) {
    for (int64_t s = 0; s < factors.sources(); ++s)
      for (int64_t d = 0; d < NUM_DEPTHS; ++d)
        for (int64_t b = 0; b < NUM_BINS; ++b) body(s, Cell{d, b});
  };
  each([&](int64_t s, const Cell& c) {
    promises.at(s, c) = faded(promises.at(s, c), KEEP, PRIOR);
    takes.at(s, c) = faded(takes.at(s, c), KEEP, PRIOR);
  });
  either<float, double, 1>(survival, "survival", [&](const auto& survivals) {
    check_size(sources.size(), survivals.size(), "source");
    check_size(depths.size(), survivals.size(), "depth");
    check_size(accepts.size(), survivals.size(), "accepted");
    for (int64_t node = 0; node < survivals.size(); ++node) {
      const Cell place = cell(depths[node], survivals[node]);
      promises.at(sources[node], place) += survivals[node];
      takes.at(sources[node], place) += accepts[node];
    }
  });
  each([&](int64_t s, const Cell& c) { factors.at(s, c) = static_cast<float>(takes.at(s, c) / promises.at(s, c)); });
}

void learn_of_requests(py::handle seen, py::handle row, py::handle source, py::handle chance, py::handle accepted) {
  const auto known = view<double, 3>(seen, "seen");
  const Ints rows(row, "row"), sources(source, "source");
  const auto accepts = view<const bool, 1>(accepted, "accepted");
  if (known.shape[1] != 2 || known.shape[2] != NUM_SOURCES)
    throw py::value_error("seen must have two entries for every source");
  check_size(sources.size(), rows.size(), "source");
  check_size(accepts.size(), rows.size(), "accepted");
  for (int64_t r = 0; r < known.size(); ++r)
    for (int64_t i = 0; i < 2; ++i)
      for (int64_t s = 0; s < NUM_SOURCES; ++s) known.row(r, i)[s] = faded(known.row(r, i)[s], OWN_KEEP, OWN_PRIOR);
  either<float, double, 1>(chance, "chance", [&](const auto& promised) {
    check_size(promised.size(), rows.size(), "chance");
    for (int64_t node = 0; node < rows.size(); ++node) {
      const int64_t r = placed(rows[node], known.size(), "row"), s = placed(sources[node], NUM_SOURCES, "source");
      known.row(r, 0)[s] += promised[node];
      known.row(r, 1)[s] += accepts[node];
    }
  });
}

}  // namespace gsd
