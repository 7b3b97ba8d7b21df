"""Random inputs for tree attention. What no row attends is NaN in the cache, so that reading it shows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vllm_gsd.ops import HAVE_EXTENSION
from vllm_gsd.ops.attention.cpu import tree_attention, tree_attention_reference
from vllm_gsd.ops.attention.rows import AttendingRows
from vllm_gsd.ops.kv_move.layout import KVLayout, pages_of

BF16_ISA = 3  # of isa.h
# Half a unit in the last place of the output's dtype, relative, on top of float32 arithmetic.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def random_separable(block_size: int, head_size: int, seed: int = 0) -> KVLayout:
    """A layout without any pattern: rows and columns of a matrix, both shuffled."""
    random = torch.Generator().manual_seed(seed)

    def shuffled(count: int, step: int) -> torch.Tensor:
        return (torch.randperm(count, generator=random) * step).to(torch.int32)

    return KVLayout(
        key_token=shuffled(block_size, 1),
        key_dim=shuffled(head_size, block_size),
        value_token=shuffled(block_size, head_size),
        value_dim=shuffled(head_size, 1),
    )


def plain(block_size: int, head_size: int) -> KVLayout:
    """The layout with keys and values ``[block_size, head_size]``."""
    token, dim = torch.arange(block_size, dtype=torch.int32) * head_size, torch.arange(head_size, dtype=torch.int32)
    return KVLayout(key_token=token, key_dim=dim, value_token=token, value_dim=dim)


def transposed(block_size: int, head_size: int) -> KVLayout:
    """The layout of vLLM's "vec" and "vec16": keys are ``[head_size, block_size]``, values as in ``plain``."""
    token, dim = torch.arange(block_size, dtype=torch.int32), torch.arange(head_size, dtype=torch.int32)
    return KVLayout(key_token=token, key_dim=dim * block_size, value_token=token * head_size, value_dim=dim)


def pairs_interleaved(block_size: int, head_size: int) -> KVLayout:
    """As AMX wants 16-bit operands: key dimensions in pairs, value tokens in pairs."""
    token, dim = torch.arange(block_size), torch.arange(head_size)
    return KVLayout(
        key_token=(2 * token).to(torch.int32),
        key_dim=(dim // 2 * 2 * block_size + dim % 2).to(torch.int32),
        value_token=(token // 2 * 2 * head_size + token % 2).to(torch.int32),
        value_dim=(2 * dim).to(torch.int32),
    )


LAYOUTS = {"plain": plain, "transposed": transposed, "pairs": pairs_interleaved, "shuffled": random_separable}


def tree_rows(nodes: int, words: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths ``[nodes]`` and mask words ``[nodes, words]`` of a random tree, parents before children."""
    depth = torch.zeros(nodes, dtype=torch.int64)
    attends = torch.eye(nodes, 64 * words, dtype=torch.bool)
    for node in range(1, nodes):
        parent = int(torch.randint(max(0, node - 5), node, (), generator=random))
        depth[node] = depth[parent] + 1
        attends[node] |= attends[parent]
    powers = torch.ones(64, dtype=torch.int64) << torch.arange(64)
    return depth, (attends.view(nodes, words, 64) * powers).sum(2)


@dataclass
class TreeCase:
    """One call of tree attention: what is given, or drawn, by keyword; see :func:`tree_case`."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    layout: KVLayout
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    prefix_lens: torch.Tensor
    positions: torch.Tensor
    tree_mask: torch.Tensor
    scale: float
    options: dict = field(default_factory=dict)

    def run(self, op) -> torch.Tensor:
        output = torch.full_like(self.query, 7.0)
        op(output, self.query, self.kv_cache, self.layout, self.rows, self.scale, **self.options)
        return output

    @property
    def rows(self) -> AttendingRows:
        return AttendingRows(self.query_start_loc, self.prefix_lens, self.block_table, self.positions, self.tree_mask)

    def as_text(self) -> TreeCase:
        """The same rows, which are chains, as text: their keys are the prefix's last ones, and there are no masks."""
        prefix_lens = self.prefix_lens + self.query_start_loc.diff()
        return TreeCase(**{**self.__dict__, "prefix_lens": prefix_lens, "tree_mask": self.tree_mask[:, :0]})

    def double(self) -> TreeCase:
        values = {**self.__dict__, "query": self.query.double(), "kv_cache": self.kv_cache.double()}
        return TreeCase(**values)

    def with_absolute_values(self) -> TreeCase:
        """The same attention over the values' magnitudes."""
        kv_cache = self.kv_cache.clone()
        pages_of(kv_cache)[1].abs_()
        return TreeCase(**{**self.__dict__, "kv_cache": kv_cache})


def tree_case(
    rows=(5,),
    prefixes=(40,),
    num_heads=4,
    kv_heads=2,
    head_size=64,
    block_size=32,
    dtype=torch.float32,
    layout=transposed,
    sliding_window=-1,
    softcap=0.0,
    sinks=False,
    words=2,
    chains=False,
    seed=0,
) -> TreeCase:
    """Requests with ``rows[i]`` tree nodes behind ``prefixes[i]`` tokens, in shuffled blocks."""
    random = torch.Generator().manual_seed(seed)
    layout = layout(block_size, head_size)
    lengths = [prefix + count for prefix, count in zip(prefixes, rows, strict=True)]
    most_blocks = max(1, max(-(-length // block_size) for length in lengths)) + 1
    num_blocks = sum(-(-length // block_size) for length in lengths) + 3
    free = torch.randperm(num_blocks, generator=random).to(torch.int32)
    block_table = torch.zeros(len(rows), most_blocks, dtype=torch.int32)
    kv_cache = torch.full((num_blocks, kv_heads, block_size, 2 * head_size), torch.nan, dtype=dtype)
    positions, masks = [], []
    for request, (count, prefix) in enumerate(zip(rows, prefixes, strict=True)):
        blocks = -(-lengths[request] // block_size)
        block_table[request, :blocks], free = free[:blocks], free[blocks:]
        depth, mask = tree_rows(count, words, random)
        if chains:
            depth = torch.arange(count)
            attends = torch.ones(count, 64 * words).tril().bool()
            mask = (attends.view(count, words, 64) * (1 << torch.arange(64))).sum(2)
        positions.append(prefix + depth)
        masks.append(mask)
        first = min(prefix, max(0, prefix - sliding_window + 1)) if sliding_window > 0 else 0
        index = torch.arange(first, lengths[request])
        slots = block_table[request, index // block_size].long() * block_size + index % block_size
        rows_of = torch.randn(2, len(index), kv_heads, head_size, generator=random).to(dtype)
        layout.write(kv_cache, slots, rows_of[0], rows_of[1])
    options = {"sliding_window": sliding_window, "softcap": softcap}
    if sinks:
        options["sinks"] = torch.randn(num_heads, generator=random)
    return TreeCase(
        query=torch.randn(sum(rows), num_heads, head_size, generator=random).to(dtype),
        kv_cache=kv_cache,
        layout=layout,
        block_table=block_table,
        query_start_loc=torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32),
        prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
        positions=torch.cat(positions),
        tree_mask=torch.cat(masks),
        scale=head_size**-0.5,
        options=options,
    )


def check(case) -> None:
    """Kernel and float64 reference agree to float32 arithmetic of standard normal values, plus rounding.

    A score of size 10 is off by some 2^-21 in float32, and its weight by as much relative to itself. With AVX512-BF16
    weights are rounded to bfloat16, too.
    """
    exact = case.double().run(tree_attention_reference)
    got = case.run(tree_attention).double()
    assert torch.isfinite(exact).all(), "the reference read an element that no row attends"
    allowed = 4e-6 + 1.01 * ROUNDING[case.query.dtype] * exact.abs()
    if case.query.dtype == torch.bfloat16 and HAVE_EXTENSION and torch.ops.vllm_gsd.current_isa() == BF16_ISA:
        allowed += ROUNDING[torch.bfloat16] * case.double().with_absolute_values().run(tree_attention_reference)
    worst = ((got - exact).abs() - allowed).max()
    assert worst <= 0, f"off by {float((got - exact).abs().max()):.2e} beyond what is allowed"
