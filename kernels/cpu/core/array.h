// NumPy arrays without conversion or copy; arrays that do not fit are refused by name.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

namespace gsd {

namespace py = pybind11;

// A pointer and its shape. Rows may have gaps between them, but the elements of a row are contiguous.
template <typename T, int N>
struct View {
  T* data;
  int64_t shape[N];
  int64_t stride[N];  // in elements; the last is 1

  int64_t size() const { return shape[0]; }
  T& operator[](int64_t i) const
    requires(N == 1)
  {
    return data[i];
  }
  T* row(int64_t i) const
    requires(N == 2)
  {
    return data + i * stride[0];
  }
  T* row(int64_t i, int64_t j) const
    requires(N == 3)
  {
    return data + i * stride[0] + j * stride[1];
  }
  T* row(int64_t i, int64_t j, int64_t k) const
    requires(N == 4)
  {
    return data + i * stride[0] + j * stride[1] + k * stride[2];
  }
};

[[noreturn]] inline void refuse_type(py::handle array, const std::string& name, const std::string& wanted) {
  std::string got = Py_TYPE(array.ptr())->tp_name;
  if (py::isinstance<py::array>(array)) {
    const auto& actual = py::reinterpret_borrow<py::array>(array);
    got = "one of " + std::to_string(actual.ndim()) + " dimensions of " + py::str(actual.dtype()).cast<std::string>();
  }
  throw py::type_error(name + " must be " + wanted + ", not " + got);
}

inline const py::detail::PyArray_Proxy* native_array(py::handle array, int dimensions) {
  const auto& api = py::detail::npy_api::get();
  if (!api.PyArray_Check_(array.ptr())) return nullptr;
  const auto* proxy = py::detail::array_proxy(array.ptr());
  const char order = py::detail::array_descriptor_proxy(proxy->descr)->byteorder;
  return proxy->nd == dimensions && (order == '=' || order == '|') ? proxy : nullptr;
}

template <typename T>
bool has_type(const py::detail::PyArray_Proxy* array) {
  const int number = py::detail::array_descriptor_proxy(array->descr)->type_num;
  if (number == py::detail::npy_format_descriptor<std::remove_const_t<T>>::value) return true;
  // C has two names for int64.
  return std::is_same_v<std::remove_const_t<T>, int64_t> && number == py::detail::npy_api::NPY_LONGLONG_;
}

// The memory of an array of T with N dimensions, which must be writable unless T is const.
template <typename T, int N>
View<T, N> view(py::handle array, const char* name) {
  const auto* proxy = native_array(array, N);
  if (proxy == nullptr || !has_type<T>(proxy)) {
    const auto type = py::str(py::dtype::of<std::remove_const_t<T>>()).template cast<std::string>();
    refuse_type(array, name, "an array of " + std::to_string(N) + " dimensions of " + type);
  }
  if (!(proxy->flags & py::detail::npy_api::NPY_ARRAY_ALIGNED_))
    throw py::value_error(std::string(name) + " must be aligned");
  if (!std::is_const_v<T> && !(proxy->flags & py::detail::npy_api::NPY_ARRAY_WRITEABLE_))
    throw py::value_error(std::string(name) + " must be writable");
  View<T, N> result{reinterpret_cast<T*>(proxy->data), {}, {}};
  bool empty = false;
  for (int i = 0; i < N; ++i) {
    result.shape[i] = proxy->dimensions[i];
    result.stride[i] = proxy->strides[i] / static_cast<int64_t>(sizeof(T));
    if (proxy->dimensions[i] > 1 && proxy->strides[i] % static_cast<int64_t>(sizeof(T)) != 0)
      throw py::value_error(std::string(name) + " must have strides of whole elements");
    empty |= proxy->dimensions[i] == 0;  // the strides of an empty array are arbitrary
  }
  if (!empty && result.shape[N - 1] > 1 && result.stride[N - 1] != 1)
    throw py::value_error(std::string(name) + " must be contiguous in its last dimension");
  return result;
}

// Integers per request or per row, of int8, int32 or int64.
struct Ints {
  const void* data;
  int64_t count;
  int bytes;

  Ints(py::handle array, const char* name) {
    const auto* proxy = native_array(array, 1);
    if (proxy != nullptr && has_type<int64_t>(proxy)) take(view<const int64_t, 1>(array, name));
    else if (proxy != nullptr && has_type<int32_t>(proxy)) take(view<const int32_t, 1>(array, name));
    else if (proxy != nullptr && has_type<int8_t>(proxy)) take(view<const int8_t, 1>(array, name));
    else refuse_type(array, name, "an array of 1 dimension of int8, int32 or int64");
  }

  int64_t size() const { return count; }
  int64_t operator[](int64_t i) const {
    if (bytes == 8) return static_cast<const int64_t*>(data)[i];
    return bytes == 4 ? static_cast<const int32_t*>(data)[i] : static_cast<const int8_t*>(data)[i];
  }

 private:
  template <typename T>
  void take(const View<T, 1>& from) {
    data = from.data, count = from.size(), bytes = sizeof(T);
  }
};

// Calls ``body`` with a view of the type that the array has.
template <typename A, typename B, int N, typename Body>
auto either(py::handle array, const char* name, Body&& body) {
  const auto* proxy = native_array(array, N);
  if (proxy != nullptr && has_type<A>(proxy)) return body(view<const A, N>(array, name));
  return body(view<const B, N>(array, name));
}

// A tuple from Python of so many items.
class Tuple {
 public:
  Tuple(py::handle given, int count, const char* refusal) : given_(given.ptr()) {
    if (!PyTuple_Check(given_) || PyTuple_GET_SIZE(given_) != count) throw py::type_error(refusal);
  }
  py::handle operator[](int index) const { return PyTuple_GET_ITEM(given_, index); }

 private:
  PyObject* given_;
};

// Not inlined, so that the loops that call them stay small.
[[noreturn, gnu::noinline, gnu::cold]] inline void refuse_index(int64_t index, int64_t size, const char* name) {
  throw py::index_error(std::string(name) + ": " + std::to_string(index) + " is not below " + std::to_string(size));
}

[[noreturn, gnu::noinline, gnu::cold]] inline void refuse_size(int64_t size, int64_t least, const char* name) {
  throw py::value_error(std::string(name) + " has " + std::to_string(size) + " entries where " +
                        std::to_string(least) + " are needed");
}

[[noreturn, gnu::noinline, gnu::cold]] inline void refuse_division() {
  PyErr_SetString(PyExc_ZeroDivisionError, "division by zero");
  throw py::error_already_set();
}

// Checks an index from Python and returns its place. A negative one counts from the end, as in Python.
inline int64_t placed(int64_t index, int64_t size, const char* name) {
  const int64_t place = index < 0 ? index + size : index;
  if (place < 0 || place >= size) refuse_index(index, size, name);
  return place;
}

inline void check_size(int64_t size, int64_t least, const char* name) {
  if (size < least) refuse_size(size, least, name);
}

// The indices of numbers in descending order, stable; NaN goes last, as in np.argsort of the negatives.
inline std::vector<int64_t> falling_order(const double* numbers, int64_t count) {
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return numbers[a] > numbers[b] || (numbers[b] != numbers[b] && numbers[a] == numbers[a]);
  });
  return order;
}

// Division that refuses zero, as in Python.
template <typename T>
T divided(T above, T below) {
  if (below == 0) refuse_division();
  return above / below;
}

}  // namespace gsd
