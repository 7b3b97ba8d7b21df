// Rows of flattened graphs in a batch and their attention masks, vllm_gsd/method/lay_out.py.
#include <algorithm>

#include "mask.h"
#include "trees.h"

namespace gsd {

void lay_tree(py::handle token, py::handle parent, py::handle depth, py::handle origin, py::handle via_merge,
              py::handle survival, py::handle sources, int64_t first, int64_t count, py::handle rows) {
  const Ints tokens(token, "token"), parents(parent, "parent"), depths(depth, "depth"), origins(origin, "origin");
  const auto crossed = view<const bool, 1>(via_merge, "via_merge");
  const auto likely = view<const float, 1>(survival, "survival");
  const auto source_of = view<const int8_t, 2>(sources, "sources");
  const Tuple row(rows, 5, "rows must be a tuple of five arrays");
  const auto all_tokens = view<int64_t, 1>(row[0], "rows' token");
  const auto all_parents = view<int32_t, 1>(row[1], "rows' parent");
  const auto all_depths = view<int32_t, 1>(row[2], "rows' depth");
  const auto all_sources = view<int8_t, 1>(row[3], "rows' source");
  const auto all_survival = view<float, 1>(row[4], "rows' survival");
  check_size(std::min({tokens.size(), parents.size(), depths.size(), origins.size(), crossed.size(), likely.size()}),
             count, "a tree");
  check_size(first, 0, "first");
  check_size(std::min({all_tokens.size(), all_parents.size(), all_depths.size(), all_sources.size(),
                       all_survival.size()}),
             first + count, "rows");
  check_size(source_of.size(), 2, "sources");
  for (int64_t place = 0; place < count; ++place) {
    const int64_t line = first + place;
    all_tokens[line] = tokens[place];
    all_parents[line] = static_cast<int32_t>(parents[place]);
    all_depths[line] = static_cast<int32_t>(depths[place]);
    all_sources[line] = source_of.row(crossed[place])[placed(origins[place], source_of.shape[1], "origin")];
    all_survival[line] = likely[place];
  }
}

void ancestor_masks(py::handle parent, py::handle starts, py::handle masks) {
  const Ints parents(parent, "parent"), start(starts, "starts");
  const auto mask = view<int64_t, 2>(masks, "masks");
  const int64_t words = mask.shape[1], rows = std::min(parents.size(), mask.size());
  for (int64_t tree = 0; tree + 1 < start.size(); ++tree) {
    const int64_t first = start[tree], end = start[tree + 1];
    if (end - first > 64 * words) throw py::value_error("a tree has more rows than its attention mask has bits");
    if (first >= end) continue;
    check_size(first, 0, "starts");
    check_size(rows, end, "parent or masks");
    for (int64_t line = first; line < end; ++line) {
      const int64_t* above =
          parents[line] == NONE ? nullptr : mask.row(placed(first + parents[line], rows, "parent"));
      write_mask(mask.row(line), above, words, line - first);
    }
  }
}

void batch_masks(py::handle parents, py::handle starts, py::handle depth, py::handle has_tree, py::handle first_rows,
                 py::handle batch_starts, py::handle positions, py::handle prefix, py::handle masks) {
  const Ints root_of(first_rows, "first_rows"), bounds(batch_starts, "batch_starts"), depths(depth, "depth");
  const int64_t requests = root_of.size();
  const Trees trees(parents, starts, requests);
  const auto tree = view<const bool, 1>(has_tree, "has_tree");
  const auto position = view<int64_t, 1>(positions, "positions"), before = view<int64_t, 1>(prefix, "prefix");
  const auto mask = view<int64_t, 2>(masks, "masks");
  check_size(bounds.size(), requests + 1, "batch_starts");
  check_size(depths.size(), trees.rows(), "depth");
  check_size(tree.size(), requests, "has_tree");
  check_size(before.size(), requests, "prefix");
  const int64_t words = mask.shape[1], room = std::min(position.size(), mask.size());
  for (int64_t request = 0; request < requests; ++request) {
    const int64_t begin = bounds[request], end = bounds[request + 1], root = root_of[request];
    if (begin >= end) continue;
    check_size(begin, 0, "batch_starts");
    check_size(room, end, "positions or masks");
    if (tree[request] && (root < begin || root >= end))
      throw py::value_error("first_rows: a root is not among its request's rows");
    const int64_t text_end = tree[request] ? root : end;
    for (int64_t row = begin; row < text_end; ++row) std::fill_n(mask.row(row), words, 0);
    if (!tree[request]) {
      before[request] = position[end - 1] + 1;
      continue;
    }
    if (end - root > 64 * words) throw py::value_error("a tree has more rows than its attention mask has bits");
    check_size(trees.end(request) - trees.first(request), end - root, "a tree");
    before[request] = position[root];
    for (int64_t row = root; row < end; ++row) {
      const int64_t place = row - root, line = trees.first(request) + place, parent = trees.parent(line);
      position[row] = position[root] + depths[line];
      check_size(place, parent + 1, "parents");
      write_mask(mask.row(row), parent < 0 ? nullptr : mask.row(root + parent), words, place);
    }
  }
}

}  // namespace gsd
