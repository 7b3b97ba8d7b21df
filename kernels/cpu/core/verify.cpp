// The verification walk, vllm_gsd/method/verify.py.
#include <algorithm>

#include "trees.h"

namespace gsd {

void step_into(py::handle tokens, py::handle parents, py::handle starts, py::handle places, py::handle sampled,
               py::handle active) {
  const auto place = view<int32_t, 1>(places, "places");
  const Trees trees(parents, starts, place.size());
  const Ints token(tokens, "tokens"), wanted(sampled, "sampled");
  const auto going = view<bool, 1>(active, "active");
  check_size(token.size(), trees.rows(), "tokens");
  check_size(wanted.size(), place.size(), "sampled");
  check_size(going.size(), place.size(), "active");
  for (int64_t tree = 0; tree < place.size(); ++tree) {
    if (!going[tree]) continue;
    going[tree] = false;
    check_size(place[tree], 0, "places");
    const int64_t child = trees.child_carrying(token, tree, place[tree], wanted[tree]);
    if (child == NONE) continue;
    place[tree] = static_cast<int32_t>(child);
    going[tree] = true;
  }
}

int64_t follow(py::handle tokens, py::handle parents, py::handle starts, py::handle sampled, py::handle places,
               py::handle path) {
  const auto place = view<int32_t, 1>(places, "places");
  const Trees trees(parents, starts, place.size());
  const Ints token(tokens, "tokens"), drawn(sampled, "sampled");
  const auto paths = view<int32_t, 2>(path, "path");
  check_size(token.size(), trees.rows(), "tokens");
  check_size(drawn.size(), trees.rows(), "sampled");
  check_size(paths.size(), place.size(), "path");
  int64_t columns = 0;
  for (int64_t tree = 0; tree < place.size(); ++tree) {
    const int64_t first = trees.first(tree);
    int32_t* emitted = paths.row(tree);
    int64_t length = 0, here = 0;
    check_size(trees.end(tree) - first, 1, "a tree");
    for (int64_t next = 0; next != NONE; next = trees.child_carrying(token, tree, here, emitted[length - 1])) {
      here = next;
      check_size(paths.shape[1], length + 1, "a row of path");
      emitted[length++] = static_cast<int32_t>(drawn[first + here]);
    }
    place[tree] = static_cast<int32_t>(here);
    columns = std::max(columns, length);
  }
  return columns;
}

bool is_chain(py::handle parents, int64_t start, int64_t end) {
  const Ints parent(parents, "parents");
  check_size(parent.size(), end, "parents");
  for (int64_t line = start + 1; line < end; ++line)
    if (parent[placed(line, parent.size(), "start")] != line - start - 1) return false;
  return parent[placed(start, parent.size(), "start")] == NONE;
}

}  // namespace gsd
