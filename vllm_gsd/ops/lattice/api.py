"""Drafted blocks on the device: their candidates, and their lattices in graphs, as in ``method.lattice``."""

from collections.abc import Callable

import numpy as np
import torch

from vllm_gsd.method import lattice
from vllm_gsd.ops import use_kernel
from vllm_gsd.ops.dispatch import check_tensor, require_triton, use_triton, warps_for
from vllm_gsd.ops.growth.api import Limits
from vllm_gsd.ops.growth.state import DeviceGraphs
from vllm_gsd.ops.topk.api import topk_softmax

# What a depth's pool of tokens scores after each candidate before: logits, [n, k or 1, pool] of any floating dtype, and
# the probability of the pool as a whole, float32 [n, k or 1]; None for 1.
Scores = tuple[torch.Tensor, torch.Tensor | None]


def choose_candidates(
    scores: Callable[[int, torch.Tensor | None], Scores], depth: int, k: int, merge: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the k candidates of each depth. Nothing is read back from a GPU.

    The k tokens that the best paths reach are among the k most probable tokens after each candidate before, so a pool
    is read once, and no probabilities of all its tokens are kept.

    Args:
        scores: called with a depth from 0 and the places chosen at the depth before, int64 ``[n, k]``, or None at
            depth 0.
        depth: number of depths, at least 1.
        k: candidates of a depth, from 1 to the smallest pool.
        merge: whether several paths may lead to a candidate; see ``method.lattice.choose_candidates``.

    Returns:
        The candidates' places in the pool, int64 ``[n, depth, k]``, and their conditional probabilities, float32
        ``[n, depth, k, k]``. A block with a NaN gets probabilities 0 from there on.
    """
    places: list[torch.Tensor] = []
    probs: list[torch.Tensor] = []
    best: torch.Tensor | None = None
    for level in range(depth):
        given, share = scores(level, places[-1] if places else None)
        chances, ids = (best.view(*given.shape[:2], k) for best in topk_softmax(given.flatten(0, 1), k))
        highest = chances[..., 0] if share is None else chances[..., 0] * share
        if best is None:
            best = highest.new_zeros((len(given), 1))
        chosen, likely, best = best_paths(given, highest, ids, best, merge)
        places.append(chosen)
        probs.append(likely)
    return torch.stack(places, dim=1), torch.stack(probs, dim=1)


def best_paths(
    scores: torch.Tensor, chances: torch.Tensor, ids: torch.Tensor, best: torch.Tensor, merge: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose a depth's candidates among the most probable tokens after each candidate before; one launch on a GPU.

    Args:
        scores: ``[n, k or 1, pool]``, of any floating dtype.
        chances: float32 ``[n, k or 1]``, the probability of the most probable token.
        ids: int64 ``[n, k or 1, k]``, the most probable tokens in descending order.
        best: float32 ``[n, k]``, log-probability of the best path to each candidate before; ``[n, 1]`` for the root.
        merge: as for ``choose_candidates``.

    Returns:
        The candidates, int64 ``[n, k]``, their conditional probabilities, float32 ``[n, k, k]``, and the
        log-probabilities of the best paths to them, float32 ``[n, k]``.
    """
    if use_triton(scores):
        return _best_paths_triton(scores, chances, ids, best, merge)
    if use_kernel(scores):
        return torch.ops.vllm_gsd.best_paths(scores, chances.contiguous(), ids, best, merge)
    return best_paths_in_numpy(scores, chances, ids, best, merge)


def best_paths_in_numpy(
    scores: torch.Tensor, chances: torch.Tensor, ids: torch.Tensor, best: torch.Tensor, merge: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`best_paths` by the specification, block by block, for tensors on the host."""
    shift = chances.log() - scores.gather(2, ids[..., :1])[..., 0].float()  # of scores to log-probabilities
    found = []
    for of_block, shifts, before in zip(scores, shift[..., None], best.numpy(), strict=True):
        log_probs = (of_block.float() + shifts).nan_to_num(nan=float("-inf"))
        found.append(lattice.best_paths(log_probs.numpy(), before, ids.shape[2], merge))
    chosen, probs, paths = (torch.from_numpy(np.stack(parts)) for parts in zip(*found, strict=True))
    return chosen, probs, paths


def _best_paths_triton(
    scores: torch.Tensor, chances: torch.Tensor, ids: torch.Tensor, best: torch.Tensor, merge: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from vllm_gsd.ops.lattice.triton import best_paths_kernel, triton

    count, rows, k = ids.shape
    chosen, probs = ids.new_empty((count, k)), best.new_empty((count, k, k))
    paths = best.new_empty((count, k))
    best_paths_kernel[(count,)](
        chosen, probs, paths, scores, chances, ids, best, scores.shape[2], scores.stride(0), scores.stride(1),
        chances.stride(1), MERGE=merge, ROWS=rows, BEFORE=best.shape[1], K=k,
        LANES=(lanes := triton.next_power_of_2(rows * k)), PLACES=triton.next_power_of_2(k), num_warps=warps_for(lanes),
    )  # fmt: skip
    return chosen, probs, paths


def add_lattices(graphs: DeviceGraphs, tokens: torch.Tensor, probs: torch.Tensor, limits: Limits) -> None:
    """Add the candidates of drafted blocks to the graphs whose blocks were drafted; nothing is read back.

    Args:
        graphs: as ``begin`` left them, with their roots only; updated.
        tokens: int64 ``[num_graphs, depth, k]``, the candidates of each depth, different ones; negative for none.
        probs: float32 ``[num_graphs, depth, k, k]``, as ``choose_candidates`` gives them, without NaN.
    """
    from vllm_gsd.ops.lattice.triton import lattice_kernel, triton

    device, count = graphs.state.device, len(graphs.state)
    check_tensor("tokens", tokens, device, 3, torch.int64, rows=count)
    check_tensor("probs", probs, device, 4, torch.float32, rows=count)
    require_triton("add_lattices", tokens)
    depth, k = tokens.shape[1:]
    if probs.shape != (count, depth, k, k):
        raise ValueError(f"probs must be [{count}, {depth}, {k}, {k}], not {list(probs.shape)}")
    places = max(2, triton.next_power_of_2(k))
    lattice_kernel[(count,)](
        graphs.nodes, graphs.chances, graphs.best, graphs.state, graphs.counts, tokens.contiguous(), probs.contiguous(),
        limits.theta_sib, limits.theta_prob, graphs.num_nodes, graphs.capacity, depth, K=k, PLACES=places,
        LEVELS=triton.next_power_of_2(depth), BEST=triton.next_power_of_2(graphs.num_nodes),
        CHUNK=max(2, min(64, 4096 // places**2)), num_warps=max(4, warps_for(8 * places**2)),
    )  # fmt: skip
