"""Random trees, block tables and paged caches. What no row attends is NaN in the cache, so that reading it shows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from references.paged import paged_tree_attention_reference

from vllm_gsd.ops.attention.paged import FP8_DTYPES, paged_tree_attention
from vllm_gsd.ops.attention.rows import AttendingRows
from vllm_gsd.ops.dispatch import interpreted

E4M3, E5M2 = FP8_DTYPES


def random_parents(nodes: int, random: torch.Generator, reach: int = 6) -> list[int]:
    """Parents of a tree's rows, the root first; each within ``reach`` rows."""
    return [-1] + [int(torch.randint(max(0, node - reach), node, (), generator=random)) for node in range(1, nodes)]


def depths_and_mask(parents: list[int], words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths ``[nodes]`` and mask words ``[nodes, words]``, the obvious way."""
    depth, attends = torch.zeros(len(parents), dtype=torch.int64), torch.eye(len(parents), 64 * words).bool()
    for node, parent in enumerate(parents):
        if parent >= 0:
            depth[node] = depth[parent] + 1
            attends[node] |= attends[parent]
    # Summing wraps where bit 63 is set, which is what two's complement wants.
    return depth, (attends.view(len(parents), words, 64) * (torch.ones(64, dtype=torch.int64) << torch.arange(64))).sum(
        2
    )


@dataclass
class PagedCase:
    """One call of ``paged_tree_attention``; see :func:`paged_case`."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    prefix_lens: torch.Tensor
    positions: torch.Tensor
    tree_mask: torch.Tensor
    scale: float
    options: dict = field(default_factory=dict)  # what changes the result
    launch: dict = field(default_factory=dict)  # what must not: splits, tiles, bounds

    @property
    def rows(self) -> AttendingRows:
        return AttendingRows(self.query_start_loc, self.prefix_lens, self.block_table, self.positions, self.tree_mask)

    @property
    def inputs(self) -> tuple:
        return self.query, self.key_cache, self.value_cache, self.rows, self.scale

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of the kernel."""
        output = torch.full_like(self.query, 7.0)
        lse = torch.full(self.query.shape[:2], 7.0, device=self.query.device)
        paged_tree_attention(output, *self.inputs, lse=lse, **self.options, **self.launch)
        return output, lse

    def exact(self, **changes) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of the reference in float64, of this case or one with other tensors."""
        case = replace(self, **changes)
        output = torch.full(self.query.shape, 7.0, dtype=torch.float64, device=self.query.device)
        lse = torch.full(self.query.shape[:2], 7.0, dtype=torch.float64, device=self.query.device)
        paged_tree_attention_reference(output, *case.inputs, lse=lse, **self.options)
        return output, lse

    def check(self) -> None:
        """Kernel and reference agree to float32 arithmetic plus rounding of weights and output to ``query.dtype``."""
        got, got_lse = self.run()
        exact, exact_lse = self.exact()
        assert torch.isfinite(exact).all(), "the reference read an element that no row attends"
        # Triton's interpreter truncates where a GPU rounds to the nearest.
        unit = torch.finfo(self.query.dtype).eps * (1.0 if interpreted() else 0.5)
        size, _ = self.exact(value_cache=self.value_cache.to(torch.float32).abs().to(self.value_cache.dtype))
        allowed = 1.05 * unit * (size + exact.abs()) + 1e-5 * (size + 0.1)
        error = (got.double() - exact).abs()
        assert (error <= allowed).all(), (
            f"off by {float(error.max()):.2e}, {float((error / allowed).max()):.1f}x too much"
        )
        infinite = exact_lse == -torch.inf
        assert torch.equal(got_lse == -torch.inf, infinite)
        lse_error = (got_lse.double() - exact_lse).masked_fill(infinite, 0).abs()
        assert (lse_error <= 2e-5 * (1 + exact_lse.masked_fill(infinite, 0).abs())).all(), float(lse_error.max())

    def to(self, device) -> PagedCase:
        """The same case on another device, the caches' strides kept."""

        def moved(value):
            return value.to(device) if isinstance(value, torch.Tensor) else value

        values = {name: moved(value) for name, value in self.__dict__.items()}
        values["options"] = {name: moved(value) for name, value in self.options.items()}
        return PagedCase(**values)


def paged_case(
    rows=(5,), prefixes=(40,), num_heads=4, kv_heads=2, head_size=64, block_size=16, dtype=torch.float32, kv_dtype=None,
    physical="nhd", sliding_window=-1, softcap=0.0, sinks=False, scales=False, words=None, seed=0, device="cpu",
    **launch,
) -> PagedCase:  # fmt: skip
    """Requests with ``rows[i]`` tree rows behind ``prefixes[i]`` tokens, in shuffled blocks.

    ``physical``: the order in memory, "nhd" (tokens before heads) or "hnd"; vLLM has both under one logical shape.
    """
    random = torch.Generator().manual_seed(seed)
    words = words or max(1, -(-max(rows) // 64))
    lengths = [prefix + count for prefix, count in zip(prefixes, rows, strict=True)]
    num_blocks = sum(-(-length // block_size) for length in lengths) + 3
    table_width = max(1, max(-(-length // block_size) for length in lengths)) + 1
    free = torch.randperm(num_blocks, generator=random).int()
    block_table = torch.zeros(len(rows), table_width, dtype=torch.int32)
    order = (num_blocks, block_size, kv_heads, 2 * head_size) if physical == "nhd" else (
        num_blocks, kv_heads, block_size, 2 * head_size)  # fmt: skip
    kv_cache = torch.full(order, torch.nan).to(kv_dtype or dtype)
    tokens_first = kv_cache if physical == "nhd" else kv_cache.transpose(1, 2)
    positions, masks = [], []
    for request, (count, prefix) in enumerate(zip(rows, prefixes, strict=True)):
        blocks = -(-lengths[request] // block_size)
        block_table[request, :blocks], free = free[:blocks], free[blocks:]
        depth, mask = depths_and_mask(random_parents(count, random), words) if count else (
            torch.zeros(0, dtype=torch.int64), torch.zeros(0, words, dtype=torch.int64))  # fmt: skip
        positions.append(prefix + depth)
        masks.append(mask)
        # Keys that have left every row's window are NaN: their blocks may have been given away.
        index = torch.arange(max(0, prefix - sliding_window + 1) if sliding_window > 0 else 0, lengths[request])
        index = index[(index < prefix) | (count > 0)]
        values = torch.randn(len(index), kv_heads, 2 * head_size, generator=random).to(kv_dtype or dtype)
        block = block_table[request, index // block_size].long()
        tokens_first[block, index % block_size] = values
    options = {"sliding_window": sliding_window, "softcap": softcap}
    if sinks:
        options["sinks"] = torch.randn(num_heads, generator=random)
    if scales:
        options["k_scale"] = torch.rand(1, generator=random) + 0.5
        options["v_scale"] = torch.rand(kv_heads, generator=random) + 0.5
    key_cache, value_cache = tokens_first.split(head_size, -1)
    case = PagedCase(
        query=torch.randn(sum(rows), num_heads, head_size, generator=random).to(dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        query_start_loc=torch.tensor([0, *rows]).cumsum(0).int(),
        prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
        positions=torch.cat(positions),
        tree_mask=torch.cat(masks),
        scale=head_size**-0.5,
        options=options,
        launch=launch,
    )
    return case if str(device) == "cpu" else case.to(device)
