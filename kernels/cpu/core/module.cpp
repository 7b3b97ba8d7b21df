// vllm_gsd._core: the host's operations in C++ without torch. Each computes what vllm_gsd/method and vllm_gsd/planner
// specify under its name. They are one translation unit, because the headers of pybind11 and NumPy take most of the
// compiler's time.
#include <pybind11/stl.h>

#include "cells.cpp"
#include "constants.h"
#include "draft_level.cpp"
#include "flatten.cpp"
#include "graph.cpp"
#include "growth.cpp"
#include "lattice.cpp"
#include "lay_out.cpp"
#include "ngram.cpp"
#include "outcome.cpp"
#include "rates.cpp"
#include "regression.cpp"
#include "text_rows.cpp"
#include "verify.cpp"

PYBIND11_MODULE(_core, module) {
  // The constants it was built with, which vllm_gsd/host.py checks.
  pybind11::dict constants;
  gsd::for_constants([&](const char* name, const auto& value) { constants[name] = pybind11::cast(value); });
  module.attr("CONSTANTS") = constants;

#define DEF(operation) module.def(#operation, &gsd::operation)
  DEF(reset_all); DEF(add_candidates); DEF(next_frontier); DEF(add_lattices); DEF(frontier_chances); DEF(keep_best);
  DEF(parent_lines); DEF(level_rows); DEF(next_rows); DEF(text_rows); DEF(kv_slots); DEF(flatten); DEF(lay_tree);
  DEF(ancestor_masks); DEF(batch_masks); DEF(graft_all_ngrams); DEF(graft_tree); DEF(step_into); DEF(follow);
  DEF(is_chain); DEF(kv_moves); DEF(tally); DEF(chances); DEF(learn); DEF(learn_of_requests); DEF(read);
  DEF(best_rate); DEF(drafts_rate); DEF(follow_children); DEF(follow_graphs); DEF(level_size); DEF(best_nodes);
  DEF(follow_clock);
#undef DEF
}
