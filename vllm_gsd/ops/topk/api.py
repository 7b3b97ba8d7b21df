"""The most probable tokens of each row of logits, and the first most probable one of rows along greedy walks."""

from __future__ import annotations

import torch

from vllm_gsd.ops import use_kernel

_MOST = 256  # the kernel keeps sorted lists of k: slow for more


def topk_softmax(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over each whole row, and its k most probable tokens. On a GPU nothing is read back.

    Args:
        logits: ``[rows, vocabulary]`` float32, bfloat16 or float16; -inf gives probability 0.
        k: from 1 to the vocabulary's size.

    Returns:
        Probabilities float32 ``[rows, k]`` and tokens int64 ``[rows, k]``, by falling logit, equal logits by
        rising token (on a GPU, which of the equal ones at the k-th place are among them is open). Computed in
        float32; the same whatever the number of threads. A row that has no softmax (a NaN or +inf among its logits, or
        nothing but -inf) gets k times probability 0, and its tokens mean nothing. No other row's first is 0.

    Raises:
        ValueError: ``logits`` has another shape or dtype, or k is out of range.
    """
    if logits.is_cuda:
        return _topk_softmax_selecting(logits, k)
    if k > _MOST or not use_kernel(logits):
        return topk_softmax_reference(logits, k)
    return torch.ops.vllm_gsd.topk_softmax(logits, k)


def topk_softmax_reference(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`topk_softmax` in plain PyTorch; computes in float64 where ``logits`` is float64."""
    _check(logits)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be from 1 to the vocabulary's {logits.shape[1]}, not {k}")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return torch.softmax(logits, dim=1).nan_to_num(0.0).gather(1, ids), ids


def _topk_softmax_selecting(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Without sorting the vocabulary, which a GPU is slow at."""
    _check(logits)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be from 1 to the vocabulary's {logits.shape[1]}, not {k}")
    logits = logits.float()
    ids = logits.topk(k, dim=1).indices.sort(dim=1).values
    best, place = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    # Without a softmax the difference is NaN for the first at least; beside +inf the others are exp(-inf).
    return (best - logits.logsumexp(dim=1, keepdim=True)).exp().nan_to_num(0.0), ids.gather(1, place)


def argmax_of_walks(
    logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """The first token with the highest logit of each row that a greedy walk through a tree stands on.

    Most rows of a tree are on no walk, so they need not be read. NaN is above all numbers, as for torch.argmax and
    vLLM's sampler.

    Args:
        logits: ``[rows, vocabulary]`` float32, bfloat16 or float16; the rows of all trees.
        tokens: int64 ``[rows]``, parents: int32 ``[rows]``, starts: int32 ``[trees + 1]``, rising; of
            ``method.verify.follow``.

    Returns:
        int64 ``[rows]``; what rows get that are on no walk means nothing.

    Raises:
        ValueError: a shape or dtype is another, or a tree has no rows.
    """
    if not use_kernel(logits):
        return argmax_of_walks_reference(logits, tokens, parents, starts)
    return torch.ops.vllm_gsd.argmax_of_walks(logits, tokens, parents, starts)


def argmax_of_walks_reference(
    logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """:func:`argmax_of_walks` in plain PyTorch: of all rows."""
    _check(logits)
    return logits.argmax(dim=1)


def _check(logits: torch.Tensor) -> None:
    """The kernel makes these checks itself."""
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits must be [rows, vocabulary], not {list(logits.shape)}")
    if not logits.is_floating_point():
        raise ValueError(f"logits must be float32, bfloat16 or float16, not {logits.dtype}")
