"""Checks every kernel: its error against float64, compared with PyTorch's in the same dtype, and CUDA graph replays."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from paged_cases import E4M3, E5M2, PagedCase, paged_case
from references.kv_move import move_paged_kv_reference
from references.lay_out import lay_out_rows_reference
from references.merge import merge_attention_reference
from references.walk import accept_walk_reference
from tree_batches import tree_batch

from vllm_gsd.ops.attention.merge import merge_attention
from vllm_gsd.ops.attention.xformers import load_xformers, xformers_tree_attention
from vllm_gsd.ops.kv_move.paged import PagedCaches, move_paged_kv
from vllm_gsd.ops.lay_out.api import lay_out_rows
from vllm_gsd.ops.walk.api import accept_walk

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads before tokens": {"physical": "hnd"},
    "one span": {"num_splits": 1},
    "many spans": {"num_splits": 7},
    "window": {"sliding_window": 33},
    "soft cap": {"softcap": 8.0},
    "sinks": {"sinks": True},
    "fp8 e4m3": {"kv_dtype": E4M3, "scales": True},
    "fp8 e5m2": {"kv_dtype": E5M2, "scales": True},
    **{f"head size {size}": {"head_size": size} for size in (80, 96, 128, 256)},
    "8 heads a KV head": {"num_heads": 16, "kv_heads": 2},
    "no GQA": {"num_heads": 3, "kv_heads": 3},
    "257 nodes": {"rows": (257, 3), "prefixes": (40, 20), "num_heads": 2, "kv_heads": 1},
}


def check_all(device: torch.device) -> list[dict[str, Any]]:
    """Run every check, print a line for each, and return them as ``{"check", "ok", ...}``."""
    checks = []
    for check in _checks(device):
        numbers = "  ".join(f"{name} {value:.2e}" for name, value in check.items() if isinstance(value, float))
        print(f"  {'ok   ' if check['ok'] else 'WRONG'} {check['check']}  {numbers}", flush=True)
        checks.append(check)
    return checks


def _checks(device: torch.device) -> Iterator[dict[str, Any]]:
    on_gpu = device.type == "cuda"
    for name, options in OPTIONS.items():
        for dtype in DTYPES:
            rows, prefixes = ((17, 64, 1), (3000, 700, 5000)) if on_gpu else ((5, 9), (40, 70))
            case = paged_case(**{"rows": rows, "prefixes": prefixes, "dtype": dtype, **options}, device=device)
            yield _attention(f"tree attention, {name}, {_name(dtype)}", case, on_gpu)
    yield from _exact(device, 32 if on_gpu else 2)
    if not on_gpu:
        return
    yield from _captured(device)
    try:
        load_xformers()
    except ImportError:
        return
    for dtype in DTYPES[1:]:
        case = paged_case(rows=(17, 64, 1), prefixes=(3000, 700, 5000), block_size=64, dtype=dtype, device=device)
        output = torch.empty_like(case.query)
        xformers_tree_attention(output, *case.inputs)
        ours, exact = case.run()[0].double(), case.exact()[0]
        error, theirs = (float((got - exact).abs().max()) for got in (ours, output.double()))
        yield {"check": f"beside xformers, {_name(dtype)}", "ok": error <= 2 * theirs, "error": error, "theirs": theirs}


def _attention(name: str, case: PagedCase, on_gpu: bool) -> dict[str, Any]:
    """Our largest error must be at most twice PyTorch's, the criterion of FlashAttention's own tests."""
    exact, exact_lse = case.exact()
    got, lse = case.run()
    error = float((got.double() - exact).abs().max())
    lse_error = float((lse.double() - exact_lse).abs().max())
    torch_error = float((torch_attention(case).double() - exact).abs().max())
    # Triton's interpreter truncates to bfloat16 where a GPU rounds: twice the error.
    allowed = (2 if on_gpu else 4) * torch_error + 1e-5
    return {
        "check": name, "ok": error <= allowed and lse_error <= 1e-4, "error": error, "torch": torch_error,
        "lse": lse_error,
    }  # fmt: skip


def torch_attention(case: PagedCase) -> torch.Tensor:
    """PyTorch's attention in the query's dtype, request by request over dense keys and values."""
    options, dtype = case.options, case.query.dtype
    window, sinks, softcap = options["sliding_window"], options.get("sinks"), options["softcap"]
    output = torch.zeros_like(case.query)
    block_size, kv_heads = case.key_cache.shape[1:3]
    group = case.query.shape[1] // kv_heads
    starts = case.query_start_loc.tolist()
    for request, prefix in enumerate(case.prefix_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        count = rows.stop - rows.start
        index = torch.arange(prefix + count, device=case.query.device)
        block = case.block_table[request, index // block_size].long()
        bits = case.tree_mask[rows].unsqueeze(2) >> torch.arange(64, device=index.device) & 1
        attends = torch.cat(
            [torch.ones_like(bits[:, 0, :1]).expand(count, prefix), bits.flatten(1)[:, :count]], 1
        ).bool()
        if window > 0:
            at = torch.cat([index[:prefix], case.positions[rows]])
            attends &= case.positions[rows].unsqueeze(1) - at < window
        used = attends.any(0)[:, None, None]
        key, value = (
            torch.where(used, cache[block, index % block_size].to(torch.float32), 0.0).mul(1.0 if scale is None else
            scale.view(1, -1, 1)).to(dtype).repeat_interleave(group, 1).transpose(0, 1)
            for cache, scale in (
                (case.key_cache, options.get("k_scale")), (case.value_cache, options.get("v_scale")))
        )  # fmt: skip
        query = case.query[rows].transpose(0, 1)
        if sinks is None and not softcap:
            result = F.scaled_dot_product_attention(query[None], key[None], value[None], attends, scale=case.scale)[0]
        else:
            scores = (query @ key.transpose(1, 2)).float() * case.scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores = scores.masked_fill(~attends, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks.float().view(-1, 1, 1).expand(-1, count, 1)], 2)
            result = torch.softmax(scores, 2)[:, :, : prefix + count].to(dtype) @ value
        output[rows] = result.transpose(0, 1)
    return output


class _Step:
    """A batch of graphs to verify, and the tokens sampled at its rows."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.batch = tree_batch(seed, device)
        random = torch.Generator().manual_seed(seed)
        self.num_rows = self.batch.num_rows  # read from the device now, because a capture must not read
        self.positions = torch.arange(self.num_rows, device=device)
        self.sampled = torch.randint(3, (int(self.batch.starts[-1]),), generator=random).to(device)
        self.slots = torch.randperm(self.num_rows, generator=random).to(device)

    def run(self, lay_out: Callable[..., Any], walk: Callable[..., Any]) -> list[torch.Tensor]:
        """Compute rows, masks and the walk from linear positions."""
        positions = self.positions.clone()
        mask = torch.zeros((self.num_rows, 1), dtype=torch.int64, device=positions.device)
        prefix_lens = torch.zeros(8, dtype=torch.int32, device=positions.device)
        trees = lay_out(*self.batch, positions, mask, prefix_lens)
        accepted = walk(trees, self.sampled, self.batch.starts, self.batch.batch_starts, self.slots)
        return [*trees, positions, mask, prefix_lens, *accepted]


def _exact(device: torch.device, trees: int) -> Iterator[dict[str, Any]]:
    """Check that operations without rounding give equal results."""
    for seed in range(4):
        step = _Step(device, seed)
        got, want = step.run(lay_out_rows, accept_walk), step.run(lay_out_rows_reference, accept_walk_reference)
        yield {"check": f"lay-out and walk, {seed}", "ok": all(map(torch.equal, got, want))}
    random = torch.Generator().manual_seed(0)
    src_slots, dst_slots = torch.randperm(17 * trees, generator=random)[: 2 * trees].view(2, trees, 1).to(device)
    for dtype in (*DTYPES, E4M3):
        caches = _caches(device, trees, dtype, 1)
        moved = [[cache.clone() for cache in caches] for _ in range(2)]
        move_paged_kv(PagedCaches(moved[0]), src_slots, dst_slots)
        move_paged_kv_reference(PagedCaches(moved[1]), src_slots, dst_slots)
        same = all(torch.equal(_raw(a), _raw(b)) for a, b in zip(*moved, strict=True))
        yield {"check": f"KV move, {_name(dtype)}", "ok": same}
    parts, lses = torch.randn(3, 5, 4, 80, device=device), torch.randn(3, 5, 4, device=device)
    merged, exact = torch.empty_like(parts[0]), torch.empty_like(parts[0])
    merge_attention(merged, parts, lses)
    merge_attention_reference(exact, parts, lses)
    error = float((merged - exact).abs().max())
    yield {"check": "merge", "ok": error <= 1e-6, "error": error}


def _caches(device: torch.device, trees: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    blocks = -(-17 * trees // 16)
    return [torch.randn(blocks, 16, 2, 160).to(dtype).to(device).transpose(1, 2) for _ in range(4)]


def _captured(device: torch.device) -> Iterator[dict[str, Any]]:
    """Check that each op, captured with some inputs and replayed with others, gives the same results as when eager."""
    for num_splits in (1, 4):
        yield _captured_attention(device, num_splits)
    # Two batches of the same shape.
    first, second = _Step(device, 4), _Step(device, 4)
    second.sampled, second.slots = 2 - second.sampled, second.slots.flip(0)
    caches, other_caches = (_caches(device, 8, torch.bfloat16, seed) for seed in (1, 2))
    paged = PagedCaches(caches)

    def step() -> list[torch.Tensor]:
        results = first.run(lay_out_rows, accept_walk)
        move_paged_kv(paged, *results[-2:])
        return [*results, *caches]

    inputs, others = [first.sampled, first.slots, *caches], [second.sampled, second.slots, *other_caches]
    yield _replayed("lay-out, walk and KV move", inputs, others, step)


def _captured_attention(device: torch.device, num_splits: int) -> dict[str, Any]:
    def case_of(prefixes: tuple[int, int], seed: int) -> PagedCase:
        case = paged_case(
            rows=(17, 17), prefixes=prefixes, dtype=torch.bfloat16, num_splits=num_splits, max_rows=17, seed=seed,
            device=device,
        )  # fmt: skip
        # These are two views of one tensor. Clone them, because each is later overwritten separately.
        return replace(case, key_cache=case.key_cache.clone(), value_cache=case.value_cache.clone())

    case, other = case_of((900, 300), 1), case_of((300, 900), 2)
    inputs, others = ([c.query, c.key_cache, c.value_cache, *vars(c.rows).values()] for c in (case, other))
    return _replayed(f"tree attention, {num_splits} spans", inputs, others, lambda: list(case.run()))


def _replayed(
    name: str, tensors: list[torch.Tensor], others: list[torch.Tensor], call: Callable[[], list[torch.Tensor]]
) -> dict[str, Any]:
    def fill() -> None:
        for tensor, other in zip(tensors, others, strict=True):
            tensor.copy_(other)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = call()
    fill()
    graph.replay()
    replayed = [tensor.clone() for tensor in static]
    fill()
    pairs = zip(replayed, call(), strict=True)
    return {"check": f"CUDA graph, {name}", "ok": all(torch.equal(_raw(a), _raw(b)) for a, b in pairs)}


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, so that equal NaNs compare as equal."""
    return tensor.contiguous().view(torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
