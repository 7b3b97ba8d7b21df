"""Drafted blocks on the device: their candidates, and their lattices in graphs, as in ``method.lattice``."""

from collections.abc import Callable

import torch

from vllm_gsd.ops.dispatch import check_tensor, require_triton, warps_for
from vllm_gsd.ops.growth.api import Limits
from vllm_gsd.ops.growth.state import DeviceGraphs


def choose_candidates(
    log_probs: Callable[[int, torch.Tensor | None], torch.Tensor], depth: int, k: int, merge: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the k candidates of each depth. Nothing is read back from a GPU.

    Args:
        log_probs: called with a depth from 0 and the places chosen at the depth before, int64 ``[n, k]``, or None at
            depth 0. Returns the log-probability of every token of the depth's pool after each of them, float32
            ``[n, k or 1, pool]``.
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
        given = log_probs(level, places[-1] if places else None).nan_to_num(nan=float("-inf"))
        paths, before = (given if best is None else best[:, :, None] + given).max(dim=1)
        order = paths.scatter(1, given[:, 0].argmax(dim=1, keepdim=True), float("inf"))
        chosen = order.topk(k, dim=1).indices
        best = paths.gather(1, chosen)
        chances = given.gather(2, chosen[:, None].expand(-1, given.shape[1], -1)).exp().expand(-1, k, -1)
        if not merge and level > 0:
            own = before.gather(1, chosen)[:, None] == torch.arange(k, device=chosen.device)[:, None]
            chances = chances * own
        places.append(chosen)
        probs.append(chances)
    return torch.stack(places, dim=1), torch.stack(probs, dim=1)


def add_lattices(graphs: DeviceGraphs, tokens: torch.Tensor, probs: torch.Tensor, limits: Limits) -> None:
    """Add the candidates of drafted blocks to the graphs whose blocks were drafted; nothing is read back.

    Args:
        graphs: as ``begin`` left them, with their roots only; updated.
        tokens: int64 ``[num_graphs, depth, k]``, the candidates of each depth, different ones; negative for none.
        probs: float32 ``[num_graphs, depth, k, k]``, as ``choose_candidates`` gives them, without NaN.
        limits: of the engine.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
        RuntimeError: Triton cannot run on these tensors.
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
