// Rows of committed text, vllm_gsd/method/text_rows.py.
#include <algorithm>

#include "array.h"

namespace gsd {

int64_t next_rows(py::handle done, py::handle due, int64_t most, py::handle counts) {
  const Ints before(done, "done"), wanted(due, "due");
  const auto count = view<int64_t, 1>(counts, "counts");
  check_size(before.size(), wanted.size(), "done");
  check_size(count.size(), wanted.size(), "counts");
  int64_t left = most;
  for (int64_t row = 0; row < wanted.size(); ++row) {
    count[row] = std::min(std::max<int64_t>(wanted[row] - before[row], 0), left);
    left -= count[row];
  }
  return most - left;
}

void text_rows(py::handle done, py::handle counts, py::handle token_ids, py::handle token_rows, py::handle token,
               py::handle position, py::handle request) {
  const Ints before(done, "done"), count(counts, "counts"), lines(token_rows, "token_rows");
  const auto tokens = view<int64_t, 1>(token, "token"), positions = view<int64_t, 1>(position, "position");
  const auto requests = view<int64_t, 1>(request, "request");
  check_size(before.size(), count.size(), "done");
  check_size(lines.size(), count.size(), "token_rows");
  const int64_t room = std::min({tokens.size(), positions.size(), requests.size()});
  either<int32_t, int64_t, 2>(token_ids, "token_ids", [&](const auto& texts) {
    int64_t line = 0;
    for (int64_t row = 0; row < count.size(); ++row) {
      if (count[row] <= 0) continue;
      const auto* text = texts.row(placed(lines[row], texts.size(), "token_rows"));
      check_size(before[row], 0, "done");
      check_size(texts.shape[1], before[row] + count[row], "a text of token_ids");
      check_size(room, line + count[row], "token, position or request");
      for (int64_t place = 0; place < count[row]; ++place, ++line) {
        positions[line] = before[row] + place;
        tokens[line] = text[before[row] + place];
        requests[line] = row;
      }
    }
  });
}

py::array_t<int64_t> kv_slots(py::handle block_table, py::handle rows, py::handle positions, int64_t block_size) {
  const auto blocks = view<const int32_t, 2>(block_table, "block_table");
  const Ints row(rows, "rows"), position(positions, "positions");
  check_size(position.size(), row.size(), "positions");
  check_size(block_size, 1, "a block");
  py::array_t<int64_t> result(row.size());
  int64_t* slots = result.mutable_data();
  for (int64_t line = 0; line < row.size(); ++line) {
    const int64_t place = std::max<int64_t>(position[line], 0);
    const int64_t block = placed(place / block_size, blocks.shape[1], "positions");
    const int32_t* table = blocks.row(placed(row[line], blocks.size(), "rows"));
    slots[line] = table[block] * block_size + place % block_size;
  }
  return result;
}

}  // namespace gsd
