"""Times tree attention against causal attention of the same query length, and against copying the same bytes.

Every call is captured into a CUDA graph. Calls take turns, and the L2 cache is flushed before each. Times are medians.
"""

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from paged_cases import PagedCase, depths_and_mask, random_parents

from vllm_gsd.ops.attention.paged import TreeTiles, paged_tree_attention
from vllm_gsd.ops.attention.xformers import load_xformers, xformers_tree_attention

MOST_RATIO = 1.15  # goal for our time relative to causal attention's
LEAST_BANDWIDTH = 0.6  # goal for our bandwidth relative to the copy's, from LONG_CONTEXT on
LONG_CONTEXT = 4096

Call = Callable[[], Any]


def measure_all(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure every combination of batch, nodes and context, and print a line for each."""
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(device, options.repeats)
    print(f"copy: {bandwidth / 1e9:.0f} GB/s, read and written")
    rows = []
    for nodes, batch, context in itertools.product(options.nodes, options.batches, options.contexts):
        row = {"batch": batch, "nodes": nodes, "context": context}
        row.update(_measure(options, device, batch, nodes, context, bandwidth))
        print(f"  {row}", flush=True)
        rows.append(row)
    return {"copy_bytes_per_second": bandwidth, "rows": rows}


def _measure(options, device, batch: int, nodes: int, context: int, bandwidth: float) -> dict[str, Any]:
    case = bench_case(options, device, batch, nodes, context)
    output = torch.empty_like(case.query)
    calls: dict[str, Call] = {"ours": lambda: paged_tree_attention(output, *case.inputs, max_rows=nodes)}
    calls["causal"] = _torch_causal(case, batch, nodes, context)
    missing = {}
    for name, make in (("flashinfer", _flashinfer), ("xformers", _xformers), ("vllm_causal", _vllm_causal)):
        try:
            calls[name] = make(case, batch, nodes, context)
        except Exception as error:  # report a missing or failing competitor, and go on
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    times, captured, failed = interleaved(calls, device, options.repeats)
    read = sum(t.numel() * t.element_size() for t in (case.key_cache, case.value_cache)) * (
        (context + nodes) / (case.block_table.shape[1] * options.block_size)
    )
    moved = read + 2 * output.numel() * output.element_size()
    rate = moved / times["ours"]
    return {
        "microseconds": {name: round(1e6 * seconds, 1) for name, seconds in times.items()},
        "ratio": round(times["ours"] / times["causal"], 3),
        "bytes_per_second": rate,
        "of_copy": round(rate / bandwidth, 3),
        "captured": captured,
        "missing": {**missing, **failed},
    }


def bench_case(options, device, batch: int, nodes: int, context: int) -> PagedCase:
    """Trees of ``nodes`` rows after ``context`` tokens, with blocks in random order, created on the device."""
    dtype, size = getattr(torch, options.dtype), options.block_size
    blocks = -(-(context + nodes) // size)
    random = torch.Generator().manual_seed(0)
    depth, mask = depths_and_mask(random_parents(nodes, random), -(-nodes // 64))
    shape = (batch * blocks, size, options.kv_heads, 2 * options.head_size)
    key_cache, value_cache = torch.randn(shape, dtype=dtype, device=device).split(options.head_size, -1)
    return PagedCase(
        query=torch.randn(batch * nodes, options.heads, options.head_size, dtype=dtype, device=device),
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=torch.randperm(batch * blocks, device=device).view(batch, blocks).int(),
        query_start_loc=torch.arange(0, batch * nodes + 1, nodes, dtype=torch.int32, device=device),
        prefix_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
        positions=(context + depth).repeat(batch).to(device),
        tree_mask=mask.repeat(batch, 1).to(device),
        scale=options.head_size**-0.5,
    )


def copy_bandwidth(device: torch.device, repeats: int) -> float:
    """Bytes read and written per second while copying 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times, _, _ = interleaved({"copy": lambda: target.copy_(source)}, device, repeats)
    return 2 * source.numel() / times["copy"]


def interleaved(calls: dict[str, Call], device, repeats: int) -> tuple[dict[str, float], list[str], dict[str, str]]:
    """Median seconds of each call, the calls that ran as CUDA graphs, and those that failed. Ours may not fail."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)  # larger than any L2 cache
    ready: dict[str, Call] = {}
    captured, failed = [], {}
    for name, call in calls.items():
        try:
            for _ in range(3):
                call()
            torch.cuda.synchronize()
        except Exception as error:
            if name in ("ours", "causal", "copy"):
                raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            ready[name] = graph.replay
            captured.append(name)
        except Exception:  # it cannot be captured, so time it without a graph
            torch.cuda.synchronize()
            ready[name] = call
    events: dict[str, list] = {name: [] for name in ready}
    for _ in range(repeats):
        for name, call in ready.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            call()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    times = {name: statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3 for name, pairs in events.items()}
    return times, captured, failed


def _torch_causal(case: PagedCase, batch: int, nodes: int, context: int) -> Call:
    """PyTorch's FlashAttention over dense keys and values with a lower-right causal mask."""
    from torch.nn.attention.bias import causal_lower_right

    head_size, kv_heads = case.query.shape[2], case.key_cache.shape[2]
    key, value = (case.query.new_empty((batch, kv_heads, context + nodes, head_size)).normal_() for _ in range(2))
    query = case.query.view(batch, nodes, -1, head_size).transpose(1, 2)
    mask = causal_lower_right(nodes, context + nodes)
    return lambda: F.scaled_dot_product_attention(query, key, value, mask, scale=case.scale, enable_gqa=True)


def _vllm_causal(case: PagedCase, batch: int, nodes: int, context: int) -> Call:
    """FlashAttention as vLLM calls it, over the same blocks, if vLLM is installed."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    lengths = case.prefix_lens + nodes
    return lambda: flash_attn_varlen_func(
        case.query, case.key_cache, case.value_cache, max_seqlen_q=nodes, cu_seqlens_q=case.query_start_loc,
        max_seqlen_k=context + nodes, seqused_k=lengths, softmax_scale=case.scale, causal=True,
        block_table=case.block_table, fa_version=3 if torch.cuda.get_device_capability()[0] == 9 else 2,
    )  # fmt: skip


def _flashinfer(case: PagedCase, batch: int, nodes: int, context: int) -> Call:
    """FlashInfer's paged prefill with the tree as a custom mask, planned beforehand."""
    import flashinfer

    size, pages = case.key_cache.shape[1], case.block_table.shape[1]
    device = case.query.device
    bits = case.tree_mask[:nodes].unsqueeze(2) >> torch.arange(64, device=device) & 1
    tree = bits.flatten(1)[:, :nodes].bool()
    mask = torch.cat([torch.ones(nodes, context, dtype=torch.bool, device=device), tree], 1).flatten().repeat(batch)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=device), "NHD"
    )
    wrapper.plan(
        case.query_start_loc, torch.arange(0, batch * pages + 1, pages, dtype=torch.int32, device=device),
        case.block_table.flatten(), torch.full((batch,), (context + nodes - 1) % size + 1, dtype=torch.int32,
        device=device), case.query.shape[1], case.key_cache.shape[2], case.query.shape[2], size, custom_mask=mask,
        q_data_type=case.query.dtype,
    )  # fmt: skip
    cache = (case.key_cache, case.value_cache)
    return lambda: wrapper.run(case.query, cache)


def _xformers(case: PagedCase, batch: int, nodes: int, context: int) -> Call:
    load_xformers()
    output = torch.empty_like(case.query)
    return lambda: xformers_tree_attention(output, *case.inputs)


def tune(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Time tiles and span counts other than the op's choice, and list the fastest first for every shape."""
    results = []
    for nodes, batch, context in itertools.product(options.nodes, options.batches, options.contexts):
        calls = _variants(bench_case(options, device, batch, nodes, context), nodes)
        times, _, failed = interleaved(calls, device, max(5, options.repeats // 3))
        best = sorted(times.items(), key=lambda item: item[1])
        print(f"batch {batch}, {nodes} nodes, context {context}: chosen {1e6 * times['ours']:.1f} us", flush=True)
        for name, seconds in best[:3]:
            print(f"    {1e6 * seconds:8.1f} us  {name}")
        shape = {"batch": batch, "nodes": nodes, "context": context}
        results.append({**shape, "microseconds": {n: round(1e6 * t, 1) for n, t in best}, "failed": failed})
    return results


def _variants(case: PagedCase, nodes: int) -> dict[str, Call]:
    attention = functools.partial(paged_tree_attention, torch.empty_like(case.query), *case.inputs, max_rows=nodes)
    calls: dict[str, Call] = {"ours": attention}
    for rows, keys, warps, stages, splits in itertools.product((32, 64, 128), (32, 64), (4, 8), (2, 3), (None, 1, 8)):
        tiles = TreeTiles(rows, keys, warps, stages)
        calls[f"{tiles}, spans {splits}"] = functools.partial(attention, tiles=tiles, num_splits=splits)
    return calls


def print_table(times: dict[str, Any]) -> None:
    """Print the final table."""
    names = sorted({name for row in times["rows"] for name in row["microseconds"]} - {"ours", "causal"})
    lines: list[list[Any]] = [
        ["batch", "nodes", "context", "ours us", "causal us", "ratio", "GB/s", "of copy", *(f"{n} us" for n in names)]
    ]
    for row in times["rows"]:
        taken = row["microseconds"]
        lines.append([
            row["batch"], row["nodes"], row["context"], taken["ours"], taken["causal"], f"{row['ratio']:.2f}",
            f"{row['bytes_per_second'] / 1e9:.0f}", f"{row['of_copy']:.0%}", *(taken.get(name, "-") for name in names),
        ])  # fmt: skip
    print()
    for line in lines:
        print("  ".join(f"{value!s:>9}" for value in line))
    rows = times["rows"]
    long = [row for row in rows if row["context"] >= LONG_CONTEXT]
    print(f"\nat most {MOST_RATIO}x causal attention: {sum(row['ratio'] <= MOST_RATIO for row in rows)} of {len(rows)}")
    enough = sum(row["of_copy"] >= LEAST_BANDWIDTH for row in long)
    print(f"at least {LEAST_BANDWIDTH:.0%} of the copy from context {LONG_CONTEXT} on: {enough} of {len(long)}")
