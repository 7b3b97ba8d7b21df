"""Every specialisation of every Triton kernel that engines ask for, compiled for GPUs without one; prints JSON.

    python compile_kernels.py 80 90 100              # SM80: A100; SM90: H100, H200; SM100: B200
    python compile_kernels.py --every 80 90 100      # also looks at every batch from 1 to 1024 requests

The ops are called as ever, for batches of 1 to 1024 requests and contexts up to 128k tokens, for each kind of draft,
every number of draft levels and every share of the nodes that a plan may verify. Without ``--every``, batches are those
where something could change: small ones, and those around multiples of 64. A launch looks up Triton's key of the
specialisation, and compiles once a key. Needs Triton with its bundled assembler, not its interpreter.
"""

import contextlib
import io
import json
import re
import sys

import torch
import triton
from paged_cases import E4M3, E5M2, paged_case
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from vllm_gsd.method.constants import NUM_BINS, NUM_DEPTHS, NUM_SOURCES
from vllm_gsd.ops.attention import merge, paged
from vllm_gsd.ops.attention.merge_triton import merge_kernel
from vllm_gsd.ops.attention.paged_triton import tree_attention_kernel
from vllm_gsd.ops.attention.rows import AttendingRows
from vllm_gsd.ops.flatten import api as flatten
from vllm_gsd.ops.flatten.triton import flatten_kernel
from vllm_gsd.ops.growth import api as growth
from vllm_gsd.ops.growth import state
from vllm_gsd.ops.growth.triton import begin_kernel, grow_kernel
from vllm_gsd.ops.kv_move import paged as kv_move
from vllm_gsd.ops.kv_move.triton import kv_move_kernel
from vllm_gsd.ops.lattice import api as lattice
from vllm_gsd.ops.lattice.triton import best_paths_kernel, lattice_kernel
from vllm_gsd.ops.lay_out import api as lay_out
from vllm_gsd.ops.lay_out.triton import lay_out_kernel
from vllm_gsd.ops.ngram import api as ngram
from vllm_gsd.ops.ngram.triton import graft_kernel, graft_tree_kernel, match_kernel
from vllm_gsd.ops.topk import api as topk
from vllm_gsd.ops.topk.triton import best_of_parts_kernel, best_of_rows_kernel
from vllm_gsd.ops.walk import api as walk
from vllm_gsd.ops.walk.triton import accept_walk_kernel

KERNELS = (
    tree_attention_kernel, merge_kernel, kv_move_kernel, accept_walk_kernel, lay_out_kernel, begin_kernel, grow_kernel,
    lattice_kernel, match_kernel, graft_kernel, graft_tree_kernel, flatten_kernel, best_of_parts_kernel,
    best_of_rows_kernel, best_paths_kernel,
)  # fmt: skip
# Options of attention beside those of the engines below.
ATTENTION = {
    "every option": {
        "dtype": torch.float16, "head_size": 128, "sliding_window": 20, "softcap": 5.0,
        "sinks": True,
    },
    "by row": {"dtype": torch.bfloat16, "head_size": 128, "by_row": True},
    "by row, every option": {
        "dtype": torch.bfloat16, "head_size": 256, "sliding_window": 20, "softcap": 5.0, "by_row": True,
        "sinks": True, "kv_dtype": E4M3, "scales": True,
    },
    "fp8 cache": {"dtype": torch.bfloat16, "head_size": 128, "kv_dtype": E4M3, "scales": True},
    "head size 80": {"dtype": torch.bfloat16, "head_size": 80},
    "every option, head size 256": {
        "dtype": torch.bfloat16, "head_size": 256, "sliding_window": 20, "softcap": 5.0,
        "sinks": True, "kv_dtype": E4M3, "scales": True,
    },
    "float32": {"dtype": torch.float32, "head_size": 64},
    "float32, head size 256": {"dtype": torch.float32, "head_size": 256},
}  # fmt: skip
# Engines by their graphs' shape, a default one and the largest that a gsd.json allows, and by the kind of their draft.
DEFAULT = {"nodes": 16, "top_k": 8, "max_depth": 6, "heads": 32, "kv_heads": 8, "head_size": 128}
LARGEST = {"nodes": 256, "top_k": 32, "max_depth": 4, "heads": 16, "kv_heads": 2, "head_size": 256}
ENGINES = {
    "default": DEFAULT, "largest": LARGEST, "hidden states": {**DEFAULT, "shift": 1}, "blocks": {**DEFAULT, "block": 7},
    "largest blocks": {**LARGEST, "block": 31, "causal": True, "merge": False}, "no draft": {**DEFAULT, "max_depth": 0},
}  # fmt: skip
MOST_REQUESTS, MOST_TOKENS, VOCABULARY, BLOCK_SIZE = 1024, 128 << 10, 128256, 16
CONTEXTS = (1, 255, 512, 4096, 40000, MOST_TOKENS)
SOME_BATCHES = sorted({*range(1, 34), *(64 * i + j for i in range(1, 16) for j in (-1, 0, 1)), 1023, 1024})


class NoDriver:
    """As much of a driver as compiling takes; the device's number is its compute capability."""

    capability = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device=None) -> int:
        return 0


class Launches:
    """Stands in for all launches: the specialisations that were asked for, and what they compile to."""

    def __init__(self, no_driver: NoDriver):
        self.driver, self.compiles = no_driver, True
        self.case = ""
        self.found: dict[str, dict] = {}  # by kernel and key
        self.report: list[dict] = []
        for kernel in KERNELS:
            kernel.run = lambda *arguments, kernel=kernel, launch=kernel.run, **options: self.launch(
                kernel, launch, *arguments, **options
            )

    def launch(self, kernel, launch, *arguments, grid, warmup, **options):
        """Compile, if nothing has asked for the same before on this GPU."""
        device = self.driver.capability
        _, specialisation, rest = kernel.device_caches[device][-1](*arguments, debug=False, **options)
        key = f"{device} {specialisation} {rest}"
        if key in (found := self.found.setdefault(kernel.__name__, {})):
            return
        found[key] = self.case
        if self.compiles:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                done = launch(*arguments, grid=grid, warmup=True, **options)
            self.report.append({
                "kernel": kernel.__name__, "case": self.case, "capability": device,
                **described(done, said.getvalue().replace(",", "").split()),
            })  # fmt: skip


def races(ptx: str) -> list[str]:
    """Stores and loads of one address without a barrier between them, so that warps may run them in either order.

    They are found if they name the address alike, as those of a number that all threads of a program read do.
    """
    found, seen = [], {}
    for line in ptx.splitlines():
        if "bar.sync" in line:
            seen = {}
        elif access := re.search(r"\b(ld|st)\.global.*?(\[ *%rd\d+[^]]*\])", line):
            kind, address = access.groups()
            if seen.setdefault(address, kind) != kind:
                found.append(line.strip())
    return found


def described(done, said: list[str]) -> dict:
    """Registers, spilled bytes, shared memory, loads of 16 bytes and races; ``said`` is the assembler's report."""
    wide = re.findall(r"cp\.async\.cg\.shared\.global [^;]*, 0x10|ld\.global(?:\.\w+)*\.v4\.b32", done.asm["ptx"])
    return {
        "registers": int(said[said.index("registers") - 1]), "spilled": int(said[said.index("spill") - 2]),
        "shared": done.metadata.shared, "cubin": len(done.asm["cubin"]), "wide_loads": len(wide),
        "races": races(done.asm["ptx"]) if done.metadata.num_warps > 1 else [],
    }  # fmt: skip


def attention(capability: int) -> None:
    """The options of attention, in the largest tiles."""
    for name, case in ATTENTION.items():
        if case.get("kv_dtype") == E4M3 and capability < 89:
            case = {**case, "kv_dtype": E5M2}  # what older GPUs have
        launches.case = name
        paged_case(**{"rows": (17,), "num_heads": 32, "kv_heads": 8, "num_splits": 4, **case}).run()


class Engine:
    """The launches of an engine's decode steps, over buffers of its largest batch.

    Args:
        nodes, top_k: the keys of its gsd.json; max_depth: also, 0 without a draft.
        heads, kv_heads, head_size: of the target.
        shift: 1 for a draft that reads hidden states.
        block: depth of a draft's blocks, 0 if it drafts level by level; causal, merge: of its blocks.
    """

    def __init__(
        self, nodes, top_k, max_depth, heads, kv_heads, head_size, shift=0, block=0, causal=False, merge=True
    ):  # fmt: skip
        self.nodes, self.top_k, self.block, self.merge = nodes, top_k, block, merge
        device, by_level = torch.device("cpu"), max_depth > 0 and not block
        self.limits = growth.Limits(
            top_k=top_k, theta_sib=0.0, theta_prob=0.0, max_length=MOST_TOKENS, max_positions=MOST_TOKENS,
            max_slots=2 * nodes * by_level, shift=shift, mask_token=3 if block else -1, causal=causal or not block,
        )  # fmt: skip
        capacity = 1 + min(2048, nodes * top_k * (max_depth + 1))
        merge_ngram = 3 * by_level
        self.graphs = state.new_graphs(MOST_REQUESTS, capacity, nodes, merge_ngram, self.limits.max_slots, device)
        self.width = 1 + (block or nodes)  # rows of a request in the draft's first forward
        self.text_rows = state.new_rows(MOST_REQUESTS, self.width, -(-self.width // 64), device)
        self.node_rows = state.new_rows(MOST_REQUESTS, nodes, self.graphs.slots.shape[1], device)
        self.verified = torch.zeros((MOST_REQUESTS * (1 + nodes), nodes // 64 + 1), dtype=torch.int64)
        self.widths = [min(nodes, top_k**level) for level in range(max_depth * by_level)]
        self.last, self.lengths = (torch.zeros(MOST_REQUESTS, dtype=torch.int64) for _ in range(2))
        self.total = self.lengths.int()
        if block:
            self.chances = torch.empty((MOST_REQUESTS, block, top_k, top_k))
            self.best_tokens = torch.zeros((MOST_REQUESTS, top_k, top_k), dtype=torch.int64)
        self.texts = torch.zeros((MOST_REQUESTS, MOST_TOKENS), dtype=torch.int32)
        self.floats = NUM_SOURCES * NUM_DEPTHS * NUM_BINS
        self.known = torch.zeros(self.floats + MOST_REQUESTS * (NUM_SOURCES + 5), dtype=torch.int32)
        self.ranks, self.match_probs = ngram.new_matches(MOST_REQUESTS, top_k, device)
        self.suffix_trees = torch.zeros((MOST_REQUESTS, ngram.tree_words(1 + 2 * nodes)), dtype=torch.int32)
        self.trees = flatten.DeviceTrees(*(
            torch.zeros((MOST_REQUESTS, 1 + nodes)[: 1 if name == "size" else 2], dtype=dtype)
            for name, dtype in zip(flatten.DeviceTrees._fields, DTYPES, strict=True)
        ))  # fmt: skip
        self.cache = torch.empty((4, BLOCK_SIZE, kv_heads, 2 * head_size), dtype=torch.bfloat16)
        rows = MOST_REQUESTS * (1 + nodes)
        self.query = torch.empty((rows, heads, head_size), dtype=torch.bfloat16)
        flat = torch.empty(16 * rows + VOCABULARY, dtype=torch.bfloat16)
        self.logits = flat.as_strided((rows, VOCABULARY), (16, 1))
        self.starts = torch.zeros(MOST_REQUESTS + 1, dtype=torch.int32)
        self.positions, self.slots = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)

    def step(self, count: int, context: int) -> None:
        """One decode step of ``count`` requests whose block tables hold ``context`` tokens."""
        table = torch.zeros((count, -(-context // BLOCK_SIZE)), dtype=torch.int32)
        self.verify(count, table)
        self.draft(count, table)

    def verify(self, count: int, table: torch.Tensor) -> None:
        """Lay the graphs out, attend, walk and move, with rows for all nodes, for some, and for none."""
        for most in (1, 2, 1 + self.nodes // 4, self.nodes // 2, 1 + self.nodes):
            trees = lay_out.lay_out_rows(
                self.trees, self.last[:count], self.starts[:count], self.starts, self.starts, self.positions,
                self.verified, self.total,
            )  # fmt: skip
            rows = count * most
            self.attend(rows, count, table, self.verified, 1 + self.nodes)
            for invalid in None, torch.zeros(rows).bool():  # without and with grammars
                accepted = walk.accept_walk(
                    trees, self.positions[:rows], self.starts, self.starts, self.slots, invalid
                )  # fmt: skip
            kv_move.move_paged_kv(self.caches(), accepted.src_slots, accepted.dst_slots)

    def caches(self) -> kv_move.PagedCaches:
        return kv_move.PagedCaches([self.cache.transpose(1, 2)])

    def attend(self, rows: int, count: int, table: torch.Tensor, mask: torch.Tensor, most: int) -> None:
        key, value = self.cache.split(self.query.shape[2], -1)
        query = self.query[:rows]
        paged.paged_tree_attention(
            torch.empty_like(query), query, key, value,
            AttendingRows(self.starts[: count + 1], self.total[:count], table, self.positions[:rows], mask), 1.0,
            max_rows=most,
        )  # fmt: skip

    def draft(self, count: int, table: torch.Tensor) -> None:
        """The draft phase, as ``engine.v2.device_drafting`` runs it, with every number of levels."""
        graphs, split = self.graphs.first(count), self.floats + count * NUM_SOURCES
        trust = self.known[self.floats : split].view(torch.float32).view(count, NUM_SOURCES)
        factor = self.known[: self.floats].view(torch.float32).view(NUM_SOURCES, NUM_DEPTHS, NUM_BINS)
        known = state.Known(self.known[split : split + 5 * count].view(count, 5), trust, factor)
        blocks = table, BLOCK_SIZE, self.limits
        rows = self.text_rows.first(count, self.width)
        growth.begin(graphs, rows, self.last[:count], known, self.texts, self.total, self.lengths, *blocks)
        if self.widths or self.block:
            self.attend(count * self.width, count, table, self.text_rows.mask, self.width)
        for width, following in zip(self.widths, [*self.widths[1:], 0], strict=False):
            logits = self.logits[: count * width]  # no memory of this machine would hold all rows
            probs, tokens = (of.view(count, width, -1) for of in topk.topk_softmax(logits, self.top_k))
            growth.grow_level(graphs, None, tokens, probs, *blocks)  # if this is the last level
            if following:
                rows = self.node_rows.first(count, following)
                growth.grow_level(graphs, rows, tokens, probs, *blocks)
                self.attend(count * following, count, table, self.node_rows.mask, following)
        if self.block:
            self.draft_blocks(count, graphs)
        ngram.graft_ngrams(graphs, self.ranks[:count], self.match_probs, self.texts, 2)
        ngram.graft_trees(graphs, self.suffix_trees[:count], self.match_probs, self.texts)
        flatten.flatten_graphs(graphs, self.trees, factor, trust)

    def draft_blocks(self, count: int, graphs: state.DeviceGraphs) -> None:
        """Candidates of the first depth and of others, with scores for each one before or for all, and the lattice."""
        k, best = self.top_k, self.chances[:count, 0, 0]
        for rows, before in ((1, best[:, :1].contiguous()), (1, best.contiguous()), (k, best.contiguous())):
            scores = self.logits.as_strided((count, rows, VOCABULARY), (16 * rows, 16, 1))
            highest = self.best_tokens.float()[:count, :rows, 0]
            lattice.best_paths(scores, highest, self.best_tokens[:count, :rows].contiguous(), before, self.merge)
        tokens = torch.zeros((count, self.block, k), dtype=torch.int64)
        lattice.add_lattices(graphs, tokens, self.chances[:count], self.limits)


DTYPES = (*[torch.int64] * 4, torch.bool, torch.float32, torch.float32, torch.int64)
launches: Launches


def main() -> None:
    global launches
    driver.set_active(no_driver := NoDriver())
    triton.knobs.nvidia.dump_ptxas_log = True
    launches = Launches(no_driver)
    # The tensors are on the CPU here.
    for op in (walk, merge, kv_move, paged, lay_out, growth, lattice, ngram, flatten):
        op.require_triton = lambda *_: None
    topk.use_triton = lattice.use_triton = lambda *_: True
    batches = range(1, MOST_REQUESTS + 1) if "--every" in sys.argv else SOME_BATCHES
    capabilities = [int(of) for of in sys.argv[1:] if of != "--every"]
    engines, counted = {name: Engine(**shape) for name, shape in ENGINES.items()}, {}
    for no_driver.capability in capabilities:
        paged._capability = lambda _: divmod(no_driver.capability, 10)
        paged._processors = lambda _: {80: 108, 90: 132}.get(no_driver.capability, 148)
        for name, engine in engines.items():
            launches.case = name
            engine.step(2, 512)
        attention(no_driver.capability)
        paged._compiled.clear()
    # Nothing else may be asked for by any other batch; if something is, it is counted and not compiled.
    before = {kernel: len(keys) for kernel, keys in launches.found.items()}
    launches.compiles = False
    for name, engine in engines.items():
        for count in batches:
            engine.step(count, CONTEXTS[count % len(CONTEXTS)])
        for context in CONTEXTS:
            engine.step(1, context)
        counted[name] = {kernel: len(keys) - before[kernel] for kernel, keys in launches.found.items()}
    by_kernel = {kernel: before[kernel] // len(capabilities) for kernel in before}
    print(json.dumps({"compiled": launches.report, "by_kernel": by_kernel, "later": counted}))


if __name__ == "__main__":
    main()
