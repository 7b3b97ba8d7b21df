// Recursive least squares, vllm_gsd/planner/regression.py.
#include <algorithm>
#include <vector>

#include "array.h"
#include "constants.h"

namespace gsd {

void follow_clock(py::handle squares, py::handle products, py::handle belief_squares, py::handle belief_products,
                  py::handle weights, py::handle parts, double took, double most) {
  const auto part = view<const double, 1>(parts, "parts");
  const int64_t count = part.size();
  const auto vector = [&]<typename T>(View<T, 1> array, const char* name) {
    check_size(array.size(), count, name);
    return array;
  };
  const auto matrix = [&]<typename T>(View<T, 2> array, const char* name) {
    check_size(std::min(array.shape[0], array.shape[1]), count, name);
    return array;
  };
  const auto weight = vector(view<double, 1>(weights, "weights"), "weights");
  const auto product = vector(view<double, 1>(products, "products"), "products");
  const auto believed = vector(view<const double, 1>(belief_products, "belief_products"), "belief_products");
  const auto square = matrix(view<double, 2>(squares, "squares"), "squares");
  const auto doubt = matrix(view<const double, 2>(belief_squares, "belief_squares"), "belief_squares");

  double known = 0.0;
  for (int64_t i = 0; i < count; ++i) known += weight[i] * part[i];
  took = known + std::min(std::max(took - known, -most), most);
  std::vector<double> left(count * count), right(count);
  for (int64_t i = 0; i < count; ++i) {
    product[i] = KEPT * product[i] + took * part[i];
    right[i] = product[i] + believed[i];
    for (int64_t j = 0; j < count; ++j) {
      square.row(i)[j] = KEPT * square.row(i)[j] + part[i] * part[j];
      left[i * count + j] = square.row(i)[j] + doubt.row(i)[j];
    }
  }
  // Gaussian elimination; the matrix is symmetric positive definite, so it needs no pivots.
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t row = i + 1; row < count; ++row) {
      const double factor = divided(left[row * count + i], left[i * count + i]);
      right[row] -= factor * right[i];
      for (int64_t column = i; column < count; ++column)
        left[row * count + column] -= factor * left[i * count + column];
    }
  }
  for (int64_t i = count - 1; i >= 0; --i) {
    double rest = right[i];
    for (int64_t column = i + 1; column < count; ++column) rest -= left[i * count + column] * weight[column];
    weight[i] = divided(rest, left[i * count + i]);
  }
}

}  // namespace gsd
