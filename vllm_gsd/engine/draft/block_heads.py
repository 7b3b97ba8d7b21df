"""From the hidden states of a drafted block to its candidates, for each kind of block draft that vLLM loads.

Each kind scores a depth's tokens after each candidate of the depth before, as vLLM's own method does:

* DFlash: marginals, whatever the token before.
* DFlash2: the selector scores the draft's best tokens after one another.
* DSpark: a low-rank bias of the token before is added to the logits. Where a confidence head predicts how much of the
  distribution the target shares, probabilities are scaled by it.

Where only a pool of the draft's best tokens is scored, all others keep their probability without a score.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from vllm_gsd.ops.lattice.api import Scores, choose_candidates
from vllm_gsd.ops.topk.api import topk_softmax


class BlockHead(Protocol):
    """The head of a block draft, for the hidden states of one batch of blocks."""

    size: int  # tokens of a depth's pool

    def scores(self, level: int, places: torch.Tensor | None) -> Scores:
        """See ``ops.lattice.choose_candidates``."""

    def tokens(self, places: torch.Tensor) -> torch.Tensor:
        """The target's tokens at places [n, depth, k] of the depths' pools, int64."""


class DFlashHead:
    """Marginals. Arguments as for ``block_candidates``."""

    def __init__(self, model: Any, hidden: torch.Tensor, roots: torch.Tensor):
        logits = model.compute_logits(hidden.flatten(0, 1))
        self.size = logits.shape[1]
        self.logits = logits.view(*hidden.shape[:2], -1)

    def scores(self, level: int, places: torch.Tensor | None) -> Scores:
        return self.logits[:, level, None], None

    def tokens(self, places: torch.Tensor) -> torch.Tensor:
        return places


class DFlash2Head:
    """Scores of a candidate selector. Arguments as for ``block_candidates``."""

    def __init__(self, model: Any, hidden: torch.Tensor, roots: torch.Tensor):
        self.size = model.model.candidate_selector.top_k
        shape = *hidden.shape[:2], self.size
        logits = model.candidate_logits_processor(model.lm_head, hidden.flatten(0, 1))
        unary, self.ids = (best.view(shape) for best in logits.topk(self.size, dim=-1))
        self.of_pool = model.model.candidate_selector(self.ids, unary.to(hidden.dtype), hidden, roots)
        self.share = share_of_pool(self.of_pool, unary, log_total(logits).view(*shape[:2], 1))

    def scores(self, level: int, places: torch.Tensor | None) -> Scores:
        scores, share = self.of_pool[:, level], self.share[:, level]
        if places is None:
            return scores[:, :1], share[:, :1]  # all rows are those of the root
        return scores.gather(1, places[:, :, None].expand(-1, -1, self.size)), share.gather(1, places)

    def tokens(self, places: torch.Tensor) -> torch.Tensor:
        return self.ids.gather(2, places)


class DSparkHead:
    """Logits with a bias of the token before. Arguments as for ``block_candidates``."""

    def __init__(self, model: Any, hidden: torch.Tensor, roots: torch.Tensor):
        self.model, self.hidden, self.roots = model, hidden, roots
        base = model.compute_draft_logits(hidden.flatten(0, 1))
        self.pool: torch.Tensor | None = None  # of the draft's vocabulary, int64 [n, depth, pool]; None for all of it
        if (size := getattr(model.config, "dspark_draft_topk", None)) is not None:
            self.whole = log_total(base).view(*hidden.shape[:2], 1)
            base, pool = base.topk(size, dim=-1)
            self.pool = pool.view(*hidden.shape[:2], -1)
        self.size = base.shape[1]
        self.base = base.view(*hidden.shape[:2], -1)

    def scores(self, level: int, places: torch.Tensor | None) -> Scores:
        before = self.roots[:, None] if places is None else self.tokens(places[:, None], level - 1)[:, 0]
        embedded = self.model.markov_embed(before.flatten())
        share = None
        if self.pool is None:
            scores = self.model.markov_bias(embedded).view(*before.shape, -1)
            scores += self.base[:, level, None]  # in place, since this is what takes most memory
        else:
            scores = self._of_pool(level, embedded.view(*before.shape, -1))
            share = share_of_pool(scores, self.base[:, level], self.whole[:, level])
        if self.model.model.confidence_head is not None:
            hidden = self.hidden[:, level, None].expand(-1, before.shape[1], -1).flatten(0, 1)
            confidence = self.model.compute_confidence(hidden, embedded).view(before.shape)
            share = confidence if share is None else share * confidence
        return scores, share

    def _of_pool(self, level: int, embedded: torch.Tensor) -> torch.Tensor:
        """Logits [n, before, pool] after tokens with embeddings [n, before, rank]. vLLM caps no bias of a pool."""
        assert self.pool is not None
        weight = self.model.model.markov_head.markov_w2
        rows = weight.quant_method.embedding(weight, self.pool[:, level])  # the weight may be packed
        base = self.base[:, level, :, None].expand(-1, -1, embedded.shape[1])
        scale = self.model.logits_processor.scale
        return torch.baddbmm(base, rows, embedded.transpose(1, 2), alpha=scale).transpose(1, 2).contiguous()

    def tokens(self, places: torch.Tensor, first: int = 0) -> torch.Tensor:
        """See ``BlockHead``; the first of the depths is ``first``."""
        pool = self.pool
        ids = places if pool is None else pool[:, first : first + places.shape[1]].gather(2, places)
        return self.model.map_draft_to_target(ids)


def log_total(logits: torch.Tensor) -> torch.Tensor:
    """The logarithm of the sum of the exponentials of each row of logits [n, vocabulary], float32 [n, 1]."""
    highest, ids = topk_softmax(logits, 1)
    return logits.gather(1, ids).float() - highest.log()


def share_of_pool(scores: torch.Tensor, base: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The probability of a pool of tokens, when all other tokens have no score.

    Args:
        scores: [..., before, pool], the pool's logits with what the token before adds.
        base: [..., pool], the pool's logits.
        whole: float32 [..., 1], ``log_total`` of all tokens.

    Returns:
        float32 [..., before].
    """
    others = (1.0 - (base.float() - whole).exp().sum(-1, keepdim=True)).clamp(min=0.0).log() + whole
    return torch.sigmoid(scores.float().logsumexp(-1) - others)


HEADS: dict[str, Callable[..., BlockHead]] = {"dflash": DFlashHead, "dflash2": DFlash2Head, "dspark": DSparkHead}


def block_candidates(
    kind: str, model: Any, hidden: torch.Tensor, roots: torch.Tensor, k: int, merge: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The candidates of a batch of drafted blocks.

    Args:
        kind: one of ``HEADS``.
        hidden: [n, depth, hidden], the draft's hidden states of the rows that predict the depths.
        roots: int64 [n], the last committed tokens.
        k: candidates of a depth; fewer where the pool has fewer.
        merge: whether several paths may lead to a candidate.

    Returns:
        their tokens, int64 [n, depth, k], and conditional probabilities, float32 [n, depth, k, k].
    """
    head = HEADS[kind](model, hidden, roots)
    places, probs = choose_candidates(head.scores, hidden.shape[1], min(k, head.size), merge)
    return head.tokens(places), probs
