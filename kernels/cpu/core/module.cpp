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

  module.def("reset_all", &gsd::reset_all);
  module.def("add_candidates", &gsd::add_candidates);
  module.def("next_frontier", &gsd::next_frontier);
  module.def("add_lattices", &gsd::add_lattices);
  module.def("frontier_chances", &gsd::frontier_chances);
  module.def("keep_best", &gsd::keep_best);
  module.def("parent_lines", &gsd::parent_lines);
  module.def("level_rows", &gsd::level_rows);
  module.def("next_rows", &gsd::next_rows);
  module.def("text_rows", &gsd::text_rows);
  module.def("kv_slots", &gsd::kv_slots);
  module.def("flatten", &gsd::flatten);
  module.def("lay_tree", &gsd::lay_tree);
  module.def("ancestor_masks", &gsd::ancestor_masks);
  module.def("batch_masks", &gsd::batch_masks);
  module.def("graft_all_ngrams", &gsd::graft_all_ngrams);
  module.def("graft_tree", &gsd::graft_tree);
  module.def("step_into", &gsd::step_into);
  module.def("follow", &gsd::follow);
  module.def("is_chain", &gsd::is_chain);
  module.def("kv_moves", &gsd::kv_moves);
  module.def("tally", &gsd::tally);
  module.def("chances", &gsd::chances);
  module.def("learn", &gsd::learn);
  module.def("learn_of_requests", &gsd::learn_of_requests);
  module.def("read", &gsd::read);
  module.def("best_rate", &gsd::best_rate);
  module.def("drafts_rate", &gsd::drafts_rate);
  module.def("follow_children", &gsd::follow_children);
  module.def("follow_graphs", &gsd::follow_graphs);
  module.def("level_size", &gsd::level_size);
  module.def("best_nodes", &gsd::best_nodes);
  module.def("follow_clock", &gsd::follow_clock);
}
