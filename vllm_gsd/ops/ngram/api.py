"""Hypotheses from texts, on the device; the results equal those of ``method.ngram`` on the host."""

import numpy as np
import torch

from vllm_gsd.method.constants import MATCH_PROB
from vllm_gsd.ops.dispatch import check_tensor, require_triton, warps_for
from vllm_gsd.ops.growth.state import DeviceGraphs

PARTS = 16  # programs that share a text
_BLOCK = 1024  # tokens that a program compares at once


def new_matches(count: int, max_matches: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate what ``graft_ngrams`` needs for ``count`` requests: ranks, and ``MATCH_PROB`` on the device."""
    ranks = torch.zeros((count, PARTS, max_matches), dtype=torch.int64, device=device)
    return ranks, torch.tensor(MATCH_PROB, device=device)


def graft_ngrams(
    graphs: DeviceGraphs, ranks: torch.Tensor, match_probs: torch.Tensor, texts: torch.Tensor, min_match: int
) -> None:
    """Insert continuations of earlier occurrences of the texts' suffixes; no node may be merged after this.

    Two launches: one finds the occurrences in parts of each text, as far as it is in use; one copies.

    Args:
        graphs: as ``begin`` and ``grow_level`` left them; updated.
        ranks: int64 ``[num_graphs, PARTS, max_matches]``, overwritten: the best occurrences of each part, 0 for none;
            the tokens that matched times 2 ** 32, and where the text continues.
        match_probs: as ``new_matches`` returns it.
        texts: int32 ``[slots, most]``.
        min_match: length of the shortest suffix that counts, at least 1.
    """
    from vllm_gsd.ops.ngram.triton import graft_kernel, match_kernel, triton

    device, count, max_matches = graphs.state.device, len(graphs.state), ranks.shape[2]
    check_tensor("texts", texts, device, 2, torch.int32)
    check_tensor("ranks", ranks, device, 3, torch.int64, rows=count)
    require_triton("graft_ngrams", texts)
    match_kernel[(count, PARTS)](
        ranks, graphs.state, texts, texts.stride(0), min_match, max_matches, COUNT=triton.next_power_of_2(max_matches),
        PARTS=PARTS, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    graft_kernel[(count,)](
        graphs.nodes, graphs.chances, graphs.state, ranks, texts, texts.stride(0), match_probs, PARTS * max_matches,
        max_matches, graphs.capacity, RANKS=triton.next_power_of_2(PARTS * max_matches),
        BLOCK=(block := triton.next_power_of_2(graphs.capacity)), num_warps=warps_for(block),
        enable_fp_fusion=False,  # the host's bits
    )  # fmt: skip


def tree_words(num_nodes: int) -> int:
    """Words of a packed suffix tree of a root and at most ``num_nodes`` nodes."""
    return 3 + 3 * (1 + num_nodes)


def pack_tree(
    words: np.ndarray, tokens: np.ndarray, parents: np.ndarray, shares: np.ndarray, matched: int, length: int
) -> None:
    """Write a suffix tree for ``graft_trees``.

    Args:
        words: int32 [tree_words(most)], overwritten.
        tokens, parents, shares, matched: as for ``method.ngram.graft_tree``, with at most ``most`` nodes.
        length: length of the text at the look-up.
    """
    count, most = len(tokens), len(words) // 3 - 1
    words[:3] = count, length, matched
    for place, values in enumerate((tokens, parents, np.asarray(shares, np.float32).view(np.int32))):
        words[3 + place * most :][:count] = values


def graft_trees(graphs: DeviceGraphs, trees: torch.Tensor, match_probs: torch.Tensor, texts: torch.Tensor) -> None:
    """Insert what suffix trees of other texts suggest, as ``method.ngram.graft_tree`` does; one launch.

    Args:
        graphs: as ``begin``, ``grow_level`` and ``graft_ngrams`` left them; updated.
        trees: int32 ``[num_graphs, tree_words(most)]``, as ``pack_tree`` writes them; all zeros for nothing.
        match_probs: as ``new_matches`` returns it.
        texts: int32 ``[slots, most]``, as far as each graph's state says; they may have grown since the look-up.
    """
    from vllm_gsd.ops.ngram.triton import graft_tree_kernel, triton

    device, count, most = graphs.state.device, len(graphs.state), trees.shape[1] // 3 - 1
    check_tensor("texts", texts, device, 2, torch.int32)
    check_tensor("trees", trees, device, 2, torch.int32, rows=count)
    require_triton("graft_trees", texts)
    graft_tree_kernel[(count,)](
        graphs.nodes, graphs.chances, graphs.state, trees, texts, texts.stride(0), match_probs, most, graphs.capacity,
        PLACES=triton.next_power_of_2(most), BLOCK=(block := triton.next_power_of_2(graphs.capacity)),
        num_warps=2 * warps_for(block),  # since the tree takes registers too
        enable_fp_fusion=False,  # the host's bits
    )  # fmt: skip
