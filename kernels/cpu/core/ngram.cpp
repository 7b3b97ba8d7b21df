// Hypotheses from texts, vllm_gsd/method/ngram.py.
#include <algorithm>
#include <vector>

#include "graph.h"

namespace gsd {

namespace {

float match_prob(int64_t matched) {
  return static_cast<float>(MATCH_PROB[placed(std::min(MAX_MATCH, matched), MAX_MATCH + 1, "matched")]);
}

// Probability that the surest copied child leaves to its siblings.
float left_by_copies(const Graph& graph, int32_t parent) {
  float left = 1.0f;
  for (int32_t child = graph.first_child[parent]; child != NONE; child = graph.next_sibling[child])
    if (graph.origin[child] != ORIGIN_DRAFT) left = std::min(left, 1.0f - graph.prob[child]);
  return left;
}

// ``starts`` and ``matched`` have room for ``limit`` occurrences.
template <typename T>
int64_t find_matches(const T* text, int64_t length, int64_t min_match, int32_t* starts, int32_t* matched,
                     int64_t limit) {
  if (limit == 0) return 0;
  int64_t count = 0;
  const T last = text[length - 1];
  for (int64_t end = length - 2; end >= 0; --end) {
    if (text[end] != last) continue;
    int64_t size = 1;
    while (size < MAX_MATCH && end - size >= 0 && text[end - size] == text[length - 1 - size]) ++size;
    if (size < min_match || (count == limit && matched[count - 1] >= size)) continue;
    int64_t place = std::min(count, limit - 1);
    for (; place > 0 && matched[place - 1] < size; --place) {
      starts[place] = starts[place - 1];
      matched[place] = matched[place - 1];
    }
    starts[place] = static_cast<int32_t>(end + 1);
    matched[place] = static_cast<int32_t>(size);
    count = std::min(count + 1, limit);
    if (count == limit && matched[count - 1] == MAX_MATCH) break;
  }
  return count;
}

// Adds ``depth`` copied tokens below the root; ``matched`` tokens before them agree.
template <typename T>
void insert_copy(Graph& graph, const T* tokens, int64_t depth, int64_t matched) {
  int32_t node = 0;
  for (int64_t i = 0; i < depth; ++i) {
    const float prob = match_prob(matched + i);
    int32_t child = graph.find_child(node, tokens[i]);
    if (child == NONE) {
      child = graph.add_child(node, tokens[i], prob * left_by_copies(graph, node), ORIGIN_NGRAM);
      if (child == NONE) return;
    } else {
      graph.agree(child, prob);
    }
    node = graph.beyond(child);
  }
}

template <typename T>
void graft(Graph graph, const T* text, int64_t length, int64_t max_matches, int64_t max_depth, int64_t min_match,
           std::vector<int32_t>& scratch) {
  scratch.assign(2 * max_matches, 0);
  int32_t *starts = scratch.data(), *matched = starts + max_matches;
  const int64_t count = find_matches(text, length, min_match, starts, matched, max_matches);
  for (int64_t j = 0; j < count; ++j)
    insert_copy(graph, text + starts[j], std::min(max_depth, length - starts[j]), matched[j]);
}

}  // namespace

void graft_all_ngrams(py::handle graphs, py::handle token_ids, py::handle lines, py::handle length, py::handle chosen,
                      int64_t max_matches, py::handle max_depth, int64_t min_match) {
  check_size(max_matches, 0, "max_matches");
  const Graphs batch(graphs);
  const Ints line(lines, "lines"), used(length, "length"), deepest(max_depth, "max_depth");
  const auto wanted = view<const bool, 1>(chosen, "chosen");
  check_size(line.size(), wanted.size(), "lines");
  check_size(used.size(), wanted.size(), "length");
  check_size(deepest.size(), wanted.size(), "max_depth");
  std::vector<int32_t> scratch;
  either<int32_t, int64_t, 2>(token_ids, "token_ids", [&](const auto& texts) {
    for (int64_t row = 0; row < wanted.size(); ++row) {
      if (!wanted[row]) continue;
      check_size(used[row], 1, "a text");
      check_size(texts.shape[1], used[row], "a text");
      const auto* text = texts.row(placed(line[row], texts.size(), "lines"));
      graft(batch.graph(row), text, used[row], max_matches, deepest[row], min_match, scratch);
    }
  });
}

void graft_tree(py::handle graphs, int64_t row, py::handle tokens, py::handle parents, py::handle shares,
                int64_t matched, int64_t origin) {
  Graph graph = Graphs(graphs).graph(row);
  const Ints token(tokens, "tokens"), parent(parents, "parents");
  const auto share = view<const float, 1>(shares, "shares");
  const int64_t count = token.size();
  check_size(parent.size(), count, "parents");
  check_size(share.size(), count, "shares");
  check_size(count, 1, "tokens");
  std::vector<int32_t> nodes(count, NONE);
  nodes[0] = 0;
  for (int64_t i = 1; i < count; ++i) {
    const int64_t place = placed(parent[i], count, "parents");
    const int32_t above = nodes[place];
    if (above == NONE) continue;  // the graph is full
    const float prob = divided(match_prob(matched + graph.depth[above]) * share[i], share[place]);
    int32_t child = graph.find_child(above, token[i]);
    if (child == NONE) child = graph.add_child(above, token[i], prob, origin);
    else graph.agree(child, prob);
    if (child != NONE) nodes[i] = graph.beyond(child);
  }
}

}  // namespace gsd
