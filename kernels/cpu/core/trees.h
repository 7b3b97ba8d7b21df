// Flattened trees of a batch. Their rows are in sequence, and each tree's first row is its root.
#pragma once

#include "array.h"
#include "constants.h"
#include "step.h"

namespace gsd {

class Trees {
 public:
  Trees(py::handle parents, py::handle starts, int64_t count)
      : parents_(parents, "parents"), starts_(starts, "starts") {
    check_size(starts_.size(), count + 1, "starts");
    for (int64_t tree = 0; tree <= count; ++tree)
      if (starts_[tree] < (tree == 0 ? 0 : starts_[tree - 1]) || starts_[tree] > rows())
        throw py::value_error("starts must rise from 0 to the number of rows");
  }

  int64_t rows() const { return parents_.size(); }
  int64_t first(int64_t tree) const { return starts_[tree]; }
  int64_t end(int64_t tree) const { return starts_[tree + 1]; }
  int64_t parent(int64_t line) const { return parents_[line]; }

  // The place of the parent, or a number below 1 at the end of the path.
  int64_t above(int64_t tree, int64_t place) const {
    const int64_t parent = parents_[first(tree) + place];
    if (parent >= place) throw py::value_error("parents must come before their children");
    return parent;
  }

  // The place of the first child that carries the token, or NONE.
  template <typename Tokens>
  int64_t child_carrying(const Tokens& tokens, int64_t tree, int64_t place, int64_t token) const {
    return gsd::child_carrying(parents_, tokens, first(tree), end(tree), place, token);
  }

  int64_t placed_in(int64_t tree, int64_t place) const {
    if (place > 0 && place >= end(tree) - first(tree)) throw py::index_error("places: a walk stands behind its tree");
    return place;
  }

 private:
  Ints parents_, starts_;
};

}  // namespace gsd
