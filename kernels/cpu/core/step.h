// The step of a verification walk, vllm_gsd/method/verify.py.
#pragma once

#include <cstdint>

namespace gsd {

// The place of the first child of ``place`` that carries ``token``, or -1, in the tree with the rows ``first`` to
// ``end``. Children come after their parent.
template <typename Parents, typename Tokens>
int64_t child_carrying(const Parents& parents, const Tokens& tokens, int64_t first, int64_t end, int64_t place,
                       int64_t token) {
  for (int64_t row = first + place + 1; row < end; ++row)
    if (parents[row] == place && tokens[row] == token) return row - first;
  return -1;
}

}  // namespace gsd
