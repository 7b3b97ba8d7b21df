"""Hypotheses from the requests' own texts, on the device; the results equal those of ``method.ngram`` on the host."""

from __future__ import annotations

import torch

from vllm_gsd.method.constants import MATCH_PROB, MAX_MATCH, NONE, ORIGIN_AGREED, ORIGIN_DRAFT, ORIGIN_NGRAM
from vllm_gsd.ops.dispatch import check_tensor, use_triton
from vllm_gsd.ops.growth.state import DeviceGraphs, append, find_child

# Bytes of memory per token of a text in ``longest_matches``, including the token's own four. Texts of 126 million
# tokens and more need more.
MATCH_BYTES = 12


def longest_matches(
    texts: torch.Tensor, length: torch.Tensor, min_match: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find earlier occurrences of the texts' longest suffixes.

    Args:
        texts: int64 or int32 ``[num_texts, most]``; length: int64 ``[num_texts]``, tokens in use, at least 1.
        min_match: length of the shortest suffix that counts.
        count: maximum number of occurrences per text.

    Returns:
        int64 ``[num_texts, count]`` each: the start of the continuation of the j-th best occurrence, and the number of
        tokens that matched before it; 0 if there is no such occurrence. Longer matches come first; among equal ones,
        later occurrences come first.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_tensor("length", length, length.device, 1, torch.int64)
    check_tensor("texts", texts, length.device, 2, torch.int64, torch.int32, rows=len(length))
    most = texts.shape[1]
    # Texts are long, so narrow types matter; see ``MATCH_BYTES``.
    narrow = torch.int32 if (MAX_MATCH + 1) * most < 1 << 31 else torch.int64
    end = torch.arange(most, dtype=narrow, device=length.device)
    alive = end < length[:, None] - 1
    matched = torch.zeros_like(texts, dtype=torch.int8)
    for back in range(min(MAX_MATCH, most)):
        last = texts.gather(1, (length - 1 - back).clamp(min=0)[:, None])
        alive[:, :back] = False
        alive[:, back:] &= texts[:, : most - back] == last
        matched += alive
    # All ranks differ, so the result does not depend on the sorting algorithm.
    rank = matched.to(narrow).mul_(most).add_(end)
    rank.masked_fill_(matched < max(1, min_match), NONE)
    best = rank.topk(min(count, most), dim=1).values.long()
    best = torch.nn.functional.pad(best, (0, count - best.shape[1]), value=NONE)
    found = best >= 0
    return torch.where(found, best % most + 1, 0), torch.where(found, best // most, 0)


def graft_ngrams(
    graphs: DeviceGraphs,
    texts: torch.Tensor,
    length: torch.Tensor,
    max_matches: int,
    max_depth: torch.Tensor,
    deepest: int,
    min_match: int,
) -> torch.Tensor:
    """Insert continuations of earlier occurrences of the texts' suffixes; updates ``graphs`` except ``above``.

    Args:
        texts: int64 or int32 ``[num_graphs, most]``; length: int64 ``[num_graphs]``. The last token is the root's.
        max_matches: maximum number of occurrences to use.
        max_depth: int64 ``[num_graphs]``, maximum number of tokens copied from each; 0 for none.
        deepest: upper bound of ``max_depth``.
        min_match: length of the shortest suffix that counts.

    Returns:
        int64 ``[num_graphs]``, number of occurrences found.
    """
    starts, matched = longest_matches(texts, length, min_match, max_matches)
    if not use_triton(length, node_by_node=True):
        _graft_reference(graphs, texts, length, starts, matched, max_depth, deepest)
        return (matched > 0).sum(1)
    from vllm_gsd.ops.growth.triton import graft_kernel, triton

    graft_kernel[(len(length),)](
        graphs.token, graphs.parent, graphs.depth, graphs.prob, graphs.survival, graphs.origin, graphs.merged,
        graphs.size, texts, texts.stride(0), length, starts.contiguous(), matched.contiguous(),
        max_depth.clamp(max=deepest), _match_probs(length.device), max_matches, graphs.capacity, NGRAM=ORIGIN_NGRAM,
        DRAFT=ORIGIN_DRAFT, AGREED=ORIGIN_AGREED, MAX_MATCH=MAX_MATCH, BLOCK=triton.next_power_of_2(graphs.capacity),
        num_warps=4, enable_fp_fusion=False,  # the same bits as on the host
    )  # fmt: skip
    return (matched > 0).sum(1)


def _graft_reference(
    graphs: DeviceGraphs,
    texts: torch.Tensor,
    length: torch.Tensor,
    starts: torch.Tensor,
    matched: torch.Tensor,
    max_depth: torch.Tensor,
    deepest: int,
) -> None:
    """``graft_kernel`` in plain PyTorch; ``starts`` and ``matched`` come from ``longest_matches``."""
    graphs = graphs._replace(above=graphs.above[:, :, :0])  # no node is merged after this
    capacity = graphs.capacity
    prob_of = _match_probs(matched.device)
    for j in range(matched.shape[1]):
        node = torch.zeros_like(length)[:, None]
        depth = torch.minimum(max_depth, length - starts[:, j])
        walking = matched[:, j] > 0
        for i in range(deepest):
            walking = walking & (i < depth)
            token = texts.gather(1, (starts[:, j] + i).clamp(max=texts.shape[1] - 1)[:, None]).long()
            child = find_child(graphs, node, token)
            prob = prob_of[(matched[:, j] + i).clamp(max=MAX_MATCH)][:, None]
            missing = (child == NONE) & walking[:, None]
            copied = (graphs.parent == node) & (graphs.origin != ORIGIN_DRAFT)
            left = 1.0 - torch.where(copied, graphs.prob, 0.0)[:, :capacity].amax(1, keepdim=True)
            known = torch.where(child == NONE, capacity, child)
            agreed = walking[:, None] & (graphs.origin.gather(1, known) == ORIGIN_DRAFT)
            before = graphs.prob.gather(1, known)
            graphs.prob.scatter_(1, known, torch.where(agreed, before + prob * (1.0 - before), before))
            origin = graphs.origin.gather(1, known)
            graphs.origin.scatter_(1, known, torch.where(agreed, ORIGIN_AGREED, origin))
            child = torch.where(missing, append(graphs, node, token, prob * left, missing, ORIGIN_NGRAM), child)
            walking = walking & (child < capacity).squeeze(1)
            # A merged edge continues as its target; a walk that has ended stands at the root.
            target = graphs.merged.gather(1, child.clamp(min=0))
            node = torch.where(walking[:, None], torch.where(target == NONE, child, target), 0)


def _match_probs(device: torch.device) -> torch.Tensor:
    """``MATCH_PROB`` as float32, filled on the device: every captured graph would repeat a copy from the host."""
    probs = torch.zeros(len(MATCH_PROB), device=device)
    for matched, prob in enumerate(MATCH_PROB):
        probs[matched] = prob
    return probs
