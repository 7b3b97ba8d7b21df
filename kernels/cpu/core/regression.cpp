// Linear functions whose weights wander, vllm_gsd/planner/regression.py.
#include <algorithm>
#include <vector>

#include "array.h"

namespace gsd {

void follow_clock(py::handle weights, py::handle covariance, py::handle prior, py::handle variance, py::handle keep,
                  py::handle parts, double took, double most) {
  const auto part = view<const double, 1>(parts, "parts");
  const int64_t count = part.size();
  const auto vector = [&]<typename T>(View<T, 1> array, const char* name) {
    check_size(array.size(), count, name);
    return array;
  };
  const auto weight = vector(view<double, 1>(weights, "weights"), "weights");
  const auto mean = vector(view<const double, 1>(prior, "prior"), "prior");
  const auto spread = vector(view<const double, 1>(variance, "variance"), "variance");
  const auto kept = vector(view<const double, 1>(keep, "keep"), "keep");
  const auto errors = view<double, 2>(covariance, "covariance");
  check_size(std::min(errors.shape[0], errors.shape[1]), count, "covariance");

  std::vector<double> shared(count);
  double known = 0.0, total = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    weight[i] = mean[i] + kept[i] * (weight[i] - mean[i]);
    double* row = errors.row(i);
    for (int64_t j = 0; j < count; ++j) row[j] *= kept[i] * kept[j];
    row[i] += (1.0 - kept[i] * kept[i]) * spread[i];
    for (int64_t j = 0; j < count; ++j) shared[i] += row[j] * part[j];
    known += weight[i] * part[i];
    total += shared[i] * part[i];
  }
  total += 1.0;
  const double error = std::min(std::max(took - known, -most), most);
  for (int64_t i = 0; i < count; ++i) {
    weight[i] += shared[i] / total * error;
    for (int64_t j = 0; j < count; ++j) errors.row(i)[j] -= shared[i] * shared[j] / total;
  }
}

}  // namespace gsd
