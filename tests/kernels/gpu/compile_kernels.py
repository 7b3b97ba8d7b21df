"""Compile every Triton kernel to machine code for one GPU architecture, without a GPU; prints JSON.

    python compile_kernels.py 90      # SM90: H100, H200

The ops are called as ever, but a launch only compiles. Needs Triton with its bundled assembler, not its interpreter.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import triton
from device_graphs import Pair, empty_trees
from paged_cases import E4M3, E5M2, paged_case
from tree_batches import tree_batch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from vllm_gsd.ops.attention import merge as merge_attention
from vllm_gsd.ops.attention import paged as paged_tree_attention
from vllm_gsd.ops.attention.merge_triton import merge_kernel
from vllm_gsd.ops.attention.paged_triton import tree_attention_kernel
from vllm_gsd.ops.flatten import api as flatten
from vllm_gsd.ops.flatten.triton import flatten_kernel
from vllm_gsd.ops.growth import api as growth
from vllm_gsd.ops.growth.triton import begin_kernel, grow_kernel
from vllm_gsd.ops.kv_move import paged as paged_kv_move
from vllm_gsd.ops.kv_move.triton import kv_move_kernel
from vllm_gsd.ops.lattice import api as lattice
from vllm_gsd.ops.lattice.triton import lattice_kernel
from vllm_gsd.ops.lay_out import api as lay_out
from vllm_gsd.ops.lay_out.triton import lay_out_kernel
from vllm_gsd.ops.ngram import api as ngram
from vllm_gsd.ops.ngram.triton import graft_kernel, match_kernel
from vllm_gsd.ops.topk import api as topk
from vllm_gsd.ops.topk.triton import best_of_parts_kernel, best_of_rows_kernel
from vllm_gsd.ops.walk import api as accept_walk
from vllm_gsd.ops.walk.triton import accept_walk_kernel

CASES = {
    "bfloat16": {"dtype": torch.bfloat16, "head_size": 128},
    "every option": {
        "dtype": torch.float16, "head_size": 128, "sliding_window": 20, "slot_window": True, "softcap": 5.0,
        "sinks": True, "num_splits": 1,
    },
    "fp8 cache": {"dtype": torch.bfloat16, "head_size": 128, "kv_dtype": E4M3, "scales": True},
    "head size 80": {"dtype": torch.bfloat16, "head_size": 80},
    "head size 256": {"dtype": torch.bfloat16, "head_size": 256},
    "float32": {"dtype": torch.float32, "head_size": 64},
}  # fmt: skip


class NoDriver:
    """As much of a driver as compiling takes."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device=None) -> int:
        return 0


def assembler_report(compiled, capability: int) -> dict:
    """Registers and spilled bytes, as the assembler tells them."""
    suffix = "a" if capability >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        # Newer GPUs have an assembler of their own in some releases.
        assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        command = [assembler, "-v", f"--gpu-name=sm_{capability}{suffix}", source, "-o", Path(folder) / "out"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr.replace(",", "").split()
    return {"registers": int(said[said.index("registers") - 1]), "spilled": int(said[said.index("spill") - 2])}


def main() -> None:
    capability = int(sys.argv[1])
    driver.set_active(NoDriver(capability))
    compiled: dict[str, list] = {}
    kernels = (tree_attention_kernel, merge_kernel, kv_move_kernel, accept_walk_kernel, lay_out_kernel)
    kernels += (begin_kernel, grow_kernel, lattice_kernel, match_kernel, graft_kernel, flatten_kernel)
    kernels += (best_of_parts_kernel, best_of_rows_kernel)
    for kernel in kernels:

        def compile_only(*arguments, launch=kernel.run, name=kernel.__name__, warmup=None, **options):
            compiled.setdefault(name, []).append(launch(*arguments, warmup=True, **options))

        kernel.run = compile_only
    # The tensors are on the CPU here.
    ops = (accept_walk, merge_attention, paged_kv_move, paged_tree_attention, lay_out, growth, lattice, ngram, flatten)
    for op in ops:
        op.require_triton = lambda *_: None
    topk.use_triton = lambda *_: True

    report = []
    for name, case in CASES.items():
        if case.get("kv_dtype") == E4M3 and capability < 89:
            case = {**case, "kv_dtype": E5M2}  # what older GPUs have
        paged_case(**{"rows": (17,), "num_heads": 32, "kv_heads": 8, "num_splits": 4, **case}).run()
        report.append({"case": name, **describe(compiled.pop("tree_attention_kernel")[0], capability)})
    cache = torch.zeros(2, 8, 16, 256, dtype=torch.bfloat16)
    slots = torch.zeros(2, 7, dtype=torch.int64)
    paged_kv_move.move_paged_kv(paged_kv_move.PagedCaches([cache]), slots, slots)
    batch = tree_batch(4, torch.device("cpu"))
    rows = torch.zeros(batch.num_rows, dtype=torch.int64)
    trees = lay_out.lay_out_rows(*batch, rows, rows[:, None].clone(), torch.zeros(8, dtype=torch.int32))
    accept_walk.accept_walk(trees, rows, batch.starts, batch.batch_starts, rows)
    grow()
    report += [{"case": name, **describe(done[0], capability)} for name, done in compiled.items()]
    print(json.dumps(report))


def grow() -> None:
    """The kernels of the draft phase, in the sizes of the default config."""
    pair = Pair(torch.device("cpu"), np.random.default_rng(0), [[1, 2]] * 3, 897, 16, 2, 8)
    pair.begin(17)
    pair.level(10, 16, 16)
    block = Pair(torch.device("cpu"), np.random.default_rng(0), [[1, 2]] * 3, 897, 16, 0, 8, max_slots=0, mask_token=7)
    block.begin(7)
    lattice.add_lattices(block.graphs, torch.zeros(3, 7, 8).long(), torch.ones(3, 7, 8, 8), block.limits)
    ranks, match_probs = ngram.new_matches(3, 8, torch.device("cpu"))
    texts, trust = torch.ones(3, 100, dtype=torch.int32), torch.ones(3, 5)
    ngram.graft_ngrams(pair.graphs, ranks, match_probs, texts, 2)
    flatten.flatten_graphs(pair.graphs, empty_trees(3, 16, torch.device("cpu")), torch.ones(5, 3, 8), trust)
    topk.topk_softmax(torch.ones(3, 128256, dtype=torch.bfloat16), 8)


def describe(done, capability: int) -> dict:
    size = len(done.asm["cubin"])
    wide = re.findall(r"cp\.async\.cg\.shared\.global [^;]*, 0x10|ld\.global\.v4\.b32", done.asm["ptx"])
    report = assembler_report(done, capability)
    return {"cubin": size, "shared": done.metadata.shared, "wide_loads": len(wide), **report}


if __name__ == "__main__":
    main()
