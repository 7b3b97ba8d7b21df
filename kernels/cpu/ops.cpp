// Registers the CPU kernels as torch.ops.vllm_gsd.*; nothing here has a gradient.
#include "ops.h"

#include <Python.h>
#include <torch/library.h>

#include "isa.h"

TORCH_LIBRARY(vllm_gsd, library) {
  const auto def = [&](const char* schema, auto* kernel) { library.def(schema, torch::dispatch(at::kCPU, kernel)); };
  def("tree_attention(Tensor(a!) output, Tensor query, Tensor kv_cache, Tensor tables, Tensor block_table, "
      "Tensor query_start_loc, Tensor prefix_lens, Tensor positions, Tensor tree_mask, float scale, "
      "int sliding_window, float softcap, Tensor? sinks) -> ()",
      &gsd::tree_attention);
  def("move_kv(Tensor(a!)[] kv_caches, Tensor[] tables, Tensor src_slots, Tensor dst_slots) -> ()", &gsd::move_kv);
  def("write_kv(Tensor(a!) kv_cache, Tensor tables, Tensor key, Tensor value, Tensor slots) -> ()", &gsd::write_kv);
  def("topk_softmax(Tensor logits, int k) -> (Tensor, Tensor)", &gsd::topk_softmax);
  def("argmax_of_walks(Tensor logits, Tensor tokens, Tensor parents, Tensor starts) -> Tensor", &gsd::argmax_of_walks);
  def("best_paths(Tensor scores, Tensor chances, Tensor ids, Tensor best, bool merge) -> (Tensor, Tensor, Tensor)",
      &gsd::best_paths);
  def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", &gsd::linear);
  def("read_columns(Tensor packed, Tensor columns) -> Tensor", &gsd::read_columns);
  def("read_rows(Tensor states, Tensor rows, Tensor? cleared) -> Tensor", &gsd::read_rows);
  def("write_rows(Tensor(a!) states, Tensor rows, Tensor values) -> ()", &gsd::write_rows);
  def("move_rows(Tensor(a!) states, Tensor sources, Tensor destinations) -> ()", &gsd::move_rows);
  library.def("set_isa_limit(int level) -> int", &gsd::set_isa_limit);
  library.def("current_isa() -> int", [] { return static_cast<int64_t>(gsd::current_isa()); });
}

// Importing vllm_gsd._C loads this library, which registers the operators; the module itself is empty.
extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
