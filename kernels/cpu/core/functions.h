// The operations of vllm_gsd._core; vllm_gsd/method specifies each of them under the same name.
#pragma once

#include "array.h"

namespace gsd {

// graph.cpp
void reset_all(py::handle graphs, py::handle token_ids, py::handle lines, py::handle length);

// growth.cpp
py::tuple add_candidates(py::handle graphs, py::handle frontier, py::handle frontier_len, py::handle tokens,
                         py::handle probs, py::handle num_nodes, float theta_sib, py::handle merge_ngram);
void next_frontier(py::handle graphs, py::handle first_new, py::handle num_nodes, py::handle room, float theta_prob,
                   py::handle frontier, py::handle frontier_len);

// lattice.cpp
py::tuple add_lattices(py::handle graphs, py::handle drafted, py::handle tokens, py::handle probs, py::handle num_nodes,
                       py::handle max_depth, float theta_sib, float theta_prob);

// draft_level.cpp
py::array_t<double> frontier_chances(py::handle graphs, py::handle frontier, py::handle frontier_len,
                                     py::handle factor, py::handle trust);
void keep_best(py::handle frontier, py::handle frontier_len, py::handle chances, int64_t count);
py::array_t<int64_t> parent_lines(py::handle graphs, py::handle frontier, py::handle frontier_len, py::handle lines);
void level_rows(py::handle graphs, py::handle slots, py::handle frontier, py::handle frontier_len, py::handle token,
                py::handle depth, py::handle slot, py::handle mask);

// text_rows.cpp
int64_t next_rows(py::handle done, py::handle due, int64_t most, py::handle counts);
void text_rows(py::handle done, py::handle counts, py::handle token_ids, py::handle token_rows, py::handle token,
               py::handle position, py::handle request);
py::array_t<int64_t> kv_slots(py::handle block_table, py::handle rows, py::handle positions, int64_t block_size);

// flatten.cpp
py::tuple flatten(py::handle graphs, py::handle num_nodes, py::handle max_depth, py::handle factor, py::handle trust);

// lay_out.cpp
void lay_tree(py::handle token, py::handle parent, py::handle depth, py::handle origin, py::handle via_merge,
              py::handle survival, py::handle sources, int64_t first, int64_t count, py::handle rows);
void ancestor_masks(py::handle parent, py::handle starts, py::handle masks);
void batch_masks(py::handle parents, py::handle starts, py::handle depth, py::handle has_tree, py::handle first_rows,
                 py::handle batch_starts, py::handle positions, py::handle prefix, py::handle masks);

// ngram.cpp
void graft_all_ngrams(py::handle graphs, py::handle token_ids, py::handle lines, py::handle length, py::handle chosen,
                      int64_t max_matches, py::handle max_depth, int64_t min_match);
void graft_tree(py::handle graphs, int64_t row, py::handle tokens, py::handle parents, py::handle shares,
                int64_t matched, int64_t origin);

// verify.cpp
void step_into(py::handle tokens, py::handle parents, py::handle starts, py::handle places, py::handle sampled,
               py::handle active);
int64_t follow(py::handle tokens, py::handle parents, py::handle starts, py::handle sampled, py::handle places,
               py::handle path);
bool is_chain(py::handle parents, int64_t start, int64_t end);

// outcome.cpp
py::tuple kv_moves(py::handle parents, py::handle starts, py::handle places, py::handle first_rows);
py::tuple tally(py::handle parents, py::handle starts, py::handle places, py::handle counted, py::handle depth,
                py::handle source, py::handle survival);

// cells.cpp
py::array_t<float> chances(py::handle factor, py::handle source, py::handle depth, py::handle survival);
void learn(py::handle factor, py::handle promised, py::handle taken, py::handle source, py::handle depth,
           py::handle survival, py::handle accepted);
void learn_of_requests(py::handle seen, py::handle row, py::handle source, py::handle chance, py::handle accepted);

// rates.cpp
double read(py::handle table, double rows);
double best_rate(py::handle tables, int64_t num_requests, double context, double spent, py::handle chances);
double drafts_rate(py::handle tables, int64_t num_requests, double context, double spent, py::handle found, double left,
                   int64_t num_drafted, py::handle worth, py::handle levels, py::handle share);
void follow_children(py::handle children, py::handle probs, double weight);
void follow_graphs(py::handle worth, py::handle levels, py::handle share, py::handle values, py::handle size,
                   py::handle chosen, py::handle rows, int64_t num_drafted, double weight);
int64_t level_size(py::handle tables, int64_t num_requests, double context, double plain, double spent,
                   py::handle worth, int64_t num_drafted, py::handle values, py::handle children);
py::array_t<int32_t> best_nodes(py::handle tables, int64_t num_requests, double total, py::handle values,
                                py::handle size, py::handle context, double spent, double graph);

// regression.cpp
void follow_clock(py::handle squares, py::handle products, py::handle belief_squares, py::handle belief_products,
                  py::handle weights, py::handle parts, double took, double most);

}  // namespace gsd
