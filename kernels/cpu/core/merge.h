// Merging of recurring n-grams, vllm_gsd/method/merge.py.
#pragma once

#include <vector>

#include "graph.h"

namespace gsd {

class Merger {
 public:
  // The native node that the candidate ``token`` below ``parent`` may continue as, or NONE.
  int32_t target(const Graph& graph, int32_t parent, int64_t token, int64_t length);

 private:
  bool reaches(const Graph& graph, int32_t start, int32_t goal);

  std::vector<char> seen_;
  std::vector<int32_t> stack_;
};

}  // namespace gsd
