#include "calibration.h"

#include "functions.h"

namespace gsd {

namespace {

constexpr double kPrior = 1.0, kKeep = 0.998;
constexpr double kOwnPrior = 3.0, kOwnKeep = 0.97;

double faded(double value, double keep, double prior) { return value + (keep - 1) * (value - prior); }

}  // namespace

double calibrated_one(py::handle factor, int64_t source, int64_t depth, py::handle survival) {
  const Factor factors(factor, "factor");
  const double value = PyFloat_AsDouble(survival.ptr());
  if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  // NumPy's float32 is not among Python's floats, its float64 is.
  if (PyFloat_Check(survival.ptr())) return calibrated(factors, source, depth, value);
  return calibrated(factors, source, depth, static_cast<float>(value));
}

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
      for (int64_t d = 0; d < kDepths; ++d)
        for (int64_t b = 0; b < kBins; ++b) body(s, Cell{d, b});
  };
  each([&](int64_t s, const Cell& c) {
    promises.at(s, c) = faded(promises.at(s, c), kKeep, kPrior);
    takes.at(s, c) = faded(takes.at(s, c), kKeep, kPrior);
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
  if (known.shape[1] != 2 || known.shape[2] != kSources)
    throw py::value_error("seen must have two entries for every source");
  check_size(sources.size(), rows.size(), "source");
  check_size(accepts.size(), rows.size(), "accepted");
  for (int64_t r = 0; r < known.size(); ++r)
    for (int64_t i = 0; i < 2; ++i)
      for (int64_t s = 0; s < kSources; ++s) known.row(r, i)[s] = faded(known.row(r, i)[s], kOwnKeep, kOwnPrior);
  either<float, double, 1>(chance, "chance", [&](const auto& promised) {
    check_size(promised.size(), rows.size(), "chance");
    for (int64_t node = 0; node < rows.size(); ++node) {
      const int64_t r = placed(rows[node], known.size(), "row"), s = placed(sources[node], kSources, "source");
      known.row(r, 0)[s] += promised[node];
      known.row(r, 1)[s] += accepts[node];
    }
  });
}

}  // namespace gsd
