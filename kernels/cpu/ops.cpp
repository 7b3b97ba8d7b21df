// Registers the CPU kernels as torch.ops.vllm_gsd.*; nothing here has a gradient.
#include "ops.h"

#include <Python.h>
#include <torch/library.h>

#include "isa.h"

TORCH_LIBRARY(vllm_gsd, library) {
  library.def(
      "tree_attention(Tensor(a!) output, Tensor query, Tensor kv_cache, Tensor tables, Tensor block_table, "
      "Tensor query_start_loc, Tensor prefix_lens, Tensor positions, Tensor tree_mask, float scale, "
      "int sliding_window, float softcap, Tensor? sinks) -> ()");
  library.def("move_kv(Tensor(a!)[] kv_caches, Tensor[] tables, Tensor src_slots, Tensor dst_slots) -> ()");
  library.def("topk_softmax(Tensor logits, int k) -> (Tensor, Tensor)");
  library.def("argmax_of_walks(Tensor logits, Tensor tokens, Tensor parents, Tensor starts) -> Tensor");
  library.def("best_paths(Tensor scores, Tensor chances, Tensor ids, Tensor best, bool merge) -> (Tensor, Tensor, Tensor)");
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def("read_rows(Tensor states, Tensor rows, Tensor? cleared) -> Tensor");
  library.def("write_rows(Tensor(a!) states, Tensor rows, Tensor values) -> ()");
  library.def("move_rows(Tensor(a!) states, Tensor sources, Tensor destinations) -> ()");
  library.def("set_isa_limit(int level) -> int", &gsd::set_isa_limit);
  library.def("current_isa() -> int", [] { return static_cast<int64_t>(gsd::current_isa()); });
}

TORCH_LIBRARY_IMPL(vllm_gsd, CPU, library) {
  library.impl("tree_attention", &gsd::tree_attention);
  library.impl("move_kv", &gsd::move_kv);
  library.impl("topk_softmax", &gsd::topk_softmax);
  library.impl("argmax_of_walks", &gsd::argmax_of_walks);
  library.impl("best_paths", &gsd::best_paths);
  library.impl("linear", &gsd::linear);
  library.impl("read_rows", &gsd::read_rows);
  library.impl("write_rows", &gsd::write_rows);
  library.impl("move_rows", &gsd::move_rows);
}

// Importing vllm_gsd._C loads this library, which registers the operators; the module itself is empty.
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
