// Attention masks of nodes.
#pragma once

#include <algorithm>
#include <cstdint>

namespace gsd {

// Writes a node's mask: that of its parent, none if nullptr, and its own bit.
inline void write_mask(int64_t* mask, const int64_t* parent, int64_t words, int64_t own) {
  if (parent == nullptr) std::fill_n(mask, words, 0);
  else std::copy_n(parent, words, mask);
  mask[own / 64] |= static_cast<int64_t>(uint64_t{1} << (own % 64));
}

}  // namespace gsd
