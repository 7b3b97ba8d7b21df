"""The candidates of drafted blocks: ``method.lattice.choose_candidates`` for a batch, on the device."""

from collections.abc import Callable

import torch


def choose_candidates(
    log_probs: Callable[[int, torch.Tensor | None], torch.Tensor], depth: int, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the k candidates of each depth. Nothing is read back from a GPU.

    Args:
        log_probs: called with a depth from 0 and the places chosen at the depth before, int64 ``[n, k]``, or None at
            depth 0. Returns the log-probability of every token of the depth's pool after each of them, float32
            ``[n, k or 1, pool]``.
        depth: number of depths, at least 1.
        k: candidates of a depth, from 1 to the smallest pool.

    Returns:
        The candidates' places in the pool, int64 ``[n, depth, k]``, and their conditional probabilities, float32
        ``[n, depth, k, k]``. A block with a NaN gets probabilities 0 from there on.
    """
    places: list[torch.Tensor] = []
    probs: list[torch.Tensor] = []
    best: torch.Tensor | None = None
    for level in range(depth):
        given = log_probs(level, places[-1] if places else None).nan_to_num(nan=float("-inf"))
        paths = (given if best is None else best[:, :, None] + given).amax(dim=1)
        order = paths.scatter(1, given[:, 0].argmax(dim=1, keepdim=True), float("inf"))
        chosen = order.topk(k, dim=1).indices
        best = paths.gather(1, chosen)
        chances = given.gather(2, chosen[:, None].expand(-1, given.shape[1], -1)).exp()
        places.append(chosen)
        probs.append(chances.expand(-1, k, -1))
    return torch.stack(places, dim=1), torch.stack(probs, dim=1)
