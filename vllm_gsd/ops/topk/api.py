"""The most probable tokens of each row of logits, and the argmax of the rows along greedy walks."""

import torch

from vllm_gsd.ops import use_kernel
from vllm_gsd.ops.dispatch import use_triton

_PART = 4096  # logits that a program looks at on a GPU
_MOST = 256  # the kernel keeps sorted lists of k entries, which are slow for a larger k


def topk_softmax(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the softmax over each row and return its k most probable tokens. Nothing is read back from a GPU.

    Args:
        logits: ``[rows, vocabulary]`` float32, bfloat16 or float16; -inf gives probability 0.
        k: from 1 to the vocabulary's size.

    Returns:
        Probabilities float32 ``[rows, k]`` and tokens int64 ``[rows, k]``, in descending order of the logits. Equal
        logits are in ascending order of the tokens. Arithmetic is in float32, and the number of threads does not change
        the result. A row without a softmax (a NaN or +inf among its logits, or only -inf) gets probabilities 0 and
        arbitrary tokens. The first probability of every other row is above 0.
    """
    if use_triton(logits):
        return _topk_softmax_triton(logits, k)
    if k > _MOST or not use_kernel(logits):
        return topk_softmax_reference(logits, k)
    return torch.ops.vllm_gsd.topk_softmax(logits, k)


def topk_softmax_reference(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`topk_softmax` in plain PyTorch; computes in float64 where ``logits`` is float64."""
    _check(logits, k)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return torch.softmax(logits, dim=1).nan_to_num(0.0).gather(1, ids), ids


def _topk_softmax_triton(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`topk_softmax` in two launches, without sorting the vocabulary."""
    from vllm_gsd.ops.topk.triton import best_of_parts_kernel, best_of_rows_kernel, triton

    _check(logits, k)
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    block = min(_PART, triton.next_power_of_2(vocabulary))
    parts = -(-vocabulary // block)
    values = torch.empty((rows, parts, k), device=logits.device)
    tokens = torch.empty((rows, parts, k), dtype=torch.int32, device=logits.device)
    highest, total = (torch.empty((rows, parts), device=logits.device) for _ in range(2))
    probs = torch.empty((rows, k), device=logits.device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    if rows:
        best_of_parts_kernel[(rows, parts)](
            values, tokens, highest, total, logits, logits.stride(0), vocabulary, k, MOST=1 << 30, BLOCK=block,
            num_warps=4,
        )  # fmt: skip
        best_of_rows_kernel[(rows,)](
            probs, ids, values, tokens, highest, total, parts, k, MOST=1 << 30, PARTS=triton.next_power_of_2(parts),
            BLOCK=triton.next_power_of_2(parts * k), num_warps=4,
        )  # fmt: skip
    return probs, ids


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


def _check(logits: torch.Tensor, k: int = 1) -> None:
    """Raise ValueError unless ``logits`` and k fit; the compiled kernel checks them itself."""
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits must be [rows, vocabulary], not {list(logits.shape)}")
    if not logits.is_floating_point():
        raise ValueError(f"logits must be float32, bfloat16 or float16, not {logits.dtype}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be from 1 to the vocabulary's {logits.shape[1]}, not {k}")
