"""The most probable tokens of each row of logits, and the argmax of the rows along greedy walks."""

from __future__ import annotations

import torch

from vllm_gsd.ops import use_kernel

_MOST = 256  # the kernel keeps sorted lists of k entries, which are slow for a larger k


def topk_softmax(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the softmax over each row and return its k most probable tokens. Nothing is read back from a GPU.

    Args:
        logits: ``[rows, vocabulary]`` float32, bfloat16 or float16; -inf gives probability 0.
        k: from 1 to the vocabulary's size.

    Returns:
        Probabilities float32 ``[rows, k]`` and tokens int64 ``[rows, k]``, in descending order of the logits. Equal
        logits are in ascending order of the tokens; on a GPU it is unspecified which of those equal to the k-th are
        returned. Arithmetic is in float32, and the number of threads does not change the result. A row without a
        softmax (a NaN or +inf among its logits, or only -inf) gets probabilities 0 and arbitrary tokens. The first
        probability of every other row is above 0.

    Raises:
        ValueError: shape or dtype of ``logits`` does not fit, or k is out of range.
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
    """:func:`topk_softmax` without sorting the vocabulary, which is slow on a GPU."""
    _check(logits)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be from 1 to the vocabulary's {logits.shape[1]}, not {k}")
    logits = logits.float()
    ids = logits.topk(k, dim=1).indices.sort(dim=1).values
    best, place = logits.gather(1, ids).sort(dim=1, descending=True, stable=True)
    # In a row without a softmax the first difference is NaN; the others are NaN, or -inf beside a +inf.
    return (best - logits.logsumexp(dim=1, keepdim=True)).exp().nan_to_num(0.0), ids.gather(1, place)


def argmax_of_walks(
    logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """The first token with the highest logit, for each row that the greedy walk through its tree visits.

    Most rows of a tree are not visited and need not be read. NaN ranks above all numbers, as in torch.argmax and vLLM's
    sampler.

    Args:
        logits: ``[rows, vocabulary]`` float32, bfloat16 or float16; the rows of all trees.
        tokens, parents, starts: int64 ``[rows]``, int32 ``[rows]`` and int32 ``[trees + 1]``, as for
            ``method.verify.follow``; starts rise.

    Returns:
        int64 ``[rows]``; rows that are not visited get arbitrary tokens.

    Raises:
        ValueError: a shape or dtype does not fit, or a tree has no rows.
    """
    if not use_kernel(logits):
        return argmax_of_walks_reference(logits, tokens, parents, starts)
    return torch.ops.vllm_gsd.argmax_of_walks(logits, tokens, parents, starts)


def argmax_of_walks_reference(
    logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """:func:`argmax_of_walks` in plain PyTorch, for all rows."""
    _check(logits)
    return logits.argmax(dim=1)


def _check(logits: torch.Tensor) -> None:
    """Raise ValueError unless ``logits`` fits; the compiled kernel checks it itself."""
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits must be [rows, vocabulary], not {list(logits.shape)}")
    if not logits.is_floating_point():
        raise ValueError(f"logits must be float32, bfloat16 or float16, not {logits.dtype}")
