// Merging of recurring n-grams, vllm_gsd/method/merge.py.
#pragma once

#include <vector>

#include "graph.h"

namespace gsd {

class Merger {
 public:
  // The native node that the candidate ``token`` below ``parent`` may continue as, or NONE.
  int32_t target(const Graph& graph, int32_t parent, int64_t token, int64_t length) {
    if (length <= 0) return NONE;
    for (int32_t node = 1; node < *graph.size; ++node) {
      if (graph.token[node] != token || graph.merged[node] != NONE || graph.parent[node] == parent) continue;
      if (same_before(graph, parent, node, length) && !reaches(graph, node, parent)) return node;
    }
    return NONE;
  }

 private:
  // One step up a path and, before the root, back through the committed text; NONE at its end.
  static int64_t step_back(const Graph& graph, int32_t& node, int64_t& back) {
    if (node != NONE) {
      const int64_t token = graph.token[node];
      node = graph.parent[node];
      return token;
    }
    const int64_t token = back < MAX_CONTEXT ? graph.context[back] : NONE;
    ++back;
    return token;
  }

  // Whether the ``length`` tokens ending below ``parent`` equal those ending at ``node``, if the last ones are equal.
  static bool same_before(const Graph& graph, int32_t parent, int32_t node, int64_t length) {
    int32_t left = parent, right = graph.parent[node];
    int64_t left_back = 0, right_back = 0;  // steps of each side before the root
    for (int64_t i = 1; i < length; ++i) {
      if (left == right && left_back == right_back) return true;  // the paths meet here, so everything before is equal
      const int64_t left_token = step_back(graph, left, left_back);
      const int64_t right_token = step_back(graph, right, right_back);
      if (left_token != right_token || left_token == NONE) return false;
    }
    return true;
  }

  bool reaches(const Graph& graph, int32_t start, int32_t goal) {
    seen_.assign(*graph.size, 0);
    stack_.assign(1, start);
    seen_[start] = 1;
    const auto visit = [&](int32_t node) {
      if (seen_[node]) return;
      seen_[node] = 1;
      stack_.push_back(node);
    };
    while (!stack_.empty()) {
      const int32_t node = stack_.back();
      stack_.pop_back();
      if (node == goal) return true;
      if (graph.merged[node] != NONE) {
        visit(graph.merged[node]);
        continue;
      }
      for (int32_t child = graph.first_child[node]; child != NONE; child = graph.next_sibling[child]) visit(child);
    }
    return false;
  }

  std::vector<char> seen_;
  std::vector<int32_t> stack_;
};

}  // namespace gsd
