"""From the hidden states of a drafted block to its candidates, for each kind of block draft that vLLM loads.

Each kind gives the log-probabilities of a depth's tokens after each candidate of the depth before:

* DFlash: marginals, whatever the token before.
* DFlash2: the selector scores the draft's best tokens after one another.
* DSpark: a low-rank bias of the token before is added to the logits. Where a confidence head predicts how much of the
  distribution the target shares, probabilities are scaled by it.

Probabilities are normalised over the draft's whole vocabulary. Where that is too large, the bias is computed for the
best tokens only, and the others keep their probability without it.
"""

from typing import Any, Protocol

import torch

from vllm_gsd.ops.lattice.api import choose_candidates

# Largest vocabulary over which a DSpark head's bias is computed as a whole, and the best tokens taken of larger ones.
WHOLE_VOCABULARY = 32768
POOL = 256


class BlockHead(Protocol):
    """The head of a block draft, for the hidden states of one batch of blocks."""

    size: int  # tokens of a depth's pool

    def log_probs(self, level: int, places: torch.Tensor | None) -> torch.Tensor:
        """See ``ops.lattice.choose_candidates``."""

    def tokens(self, places: torch.Tensor) -> torch.Tensor:
        """The target's tokens at places [n, depth, k] of the depths' pools, int64."""


class DFlashHead:
    """Marginals. Arguments as for ``block_candidates``."""

    def __init__(self, model: Any, hidden: torch.Tensor, roots: torch.Tensor):
        logits = model.compute_logits(hidden.flatten(0, 1)).float()
        self.size = logits.shape[1]
        self.marginals = logits.log_softmax(-1).view(*hidden.shape[:2], -1)

    def log_probs(self, level: int, places: torch.Tensor | None) -> torch.Tensor:
        """See ``BlockHead``."""
        return self.marginals[:, level, None]

    def tokens(self, places: torch.Tensor) -> torch.Tensor:
        """See ``BlockHead``."""
        return places


class DFlash2Head:
    """Scores of a candidate selector. Arguments as for ``block_candidates``."""

    def __init__(self, model: Any, hidden: torch.Tensor, roots: torch.Tensor):
        self.size = model.model.candidate_selector.top_k
        shape = *hidden.shape[:2], self.size
        logits = model.candidate_logits_processor(model.lm_head, hidden.flatten(0, 1)).float()
        unary, self.ids = (best.view(shape) for best in logits.topk(self.size, dim=-1))
        scores = model.model.candidate_selector(self.ids, unary.to(hidden.dtype), hidden, roots).float()
        whole = logits.logsumexp(-1).view(*shape[:2], 1)
        self.scores = normalised(scores - whole[..., None], unary - whole)

    def log_probs(self, level: int, places: torch.Tensor | None) -> torch.Tensor:
        """See ``BlockHead``."""
        scores = self.scores[:, level]
        if places is None:
            return scores[:, :1]  # all rows are those of the root
        return scores.gather(1, places[:, :, None].expand(-1, -1, scores.shape[2]))

    def tokens(self, places: torch.Tensor) -> torch.Tensor:
        """See ``BlockHead``."""
        return self.ids.gather(2, places)


class DSparkHead:
    """Logits with a bias of the token before. Arguments as for ``block_candidates``."""

    def __init__(self, model: Any, hidden: torch.Tensor, roots: torch.Tensor):
        self.model, self.hidden, self.roots = model, hidden, roots
        base = model.compute_draft_logits(hidden.flatten(0, 1))
        chosen = getattr(model.config, "dspark_draft_topk", None)
        size = chosen or (POOL if base.shape[1] > WHOLE_VOCABULARY else None)
        # vLLM caps the bias of a whole vocabulary, but not of the draft's own choice of its best tokens.
        self.soft_cap = None if chosen else model.logits_processor.soft_cap
        self.pool: torch.Tensor | None = None  # of the draft's vocabulary, int64 [n, depth, pool]; None for all of it
        if size is not None:
            whole = base.float().logsumexp(-1).view(*hidden.shape[:2], 1)
            base, pool = base.topk(min(size, base.shape[1]), dim=-1)
            self.pool = pool.view(*hidden.shape[:2], -1)
            self.whole = whole
        self.size = base.shape[1]
        self.base = base.view(*hidden.shape[:2], -1)

    def log_probs(self, level: int, places: torch.Tensor | None) -> torch.Tensor:
        """See ``BlockHead``."""
        before = self.roots[:, None] if places is None else self._tokens(level - 1, places)
        embedded = self.model.markov_embed(before.flatten())
        base = self.base[:, level, None]
        if self.pool is None:
            biased = base + self.model.markov_bias(embedded).view(*before.shape, -1)
            result = biased.float().log_softmax(-1)
        else:
            bias_of = self.model.model.markov_head.markov_w2
            rows = bias_of.quant_method.embedding(bias_of, self.pool[:, level])  # its weight may be packed
            bias = torch.einsum("npr,nvr->npv", embedded.view(*before.shape, -1), rows)
            if self.soft_cap is not None:
                bias = self.soft_cap * torch.tanh(bias / self.soft_cap)
            whole = self.whole[:, level, None]
            biased = (base + self.model.logits_processor.scale * bias).float() - whole
            result = normalised(biased, base[:, 0].float() - whole[:, 0])
        if self.model.model.confidence_head is not None:
            hidden = self.hidden[:, level, None].expand(-1, before.shape[1], -1).flatten(0, 1)
            result = result + self.model.compute_confidence(hidden, embedded).log().view(*before.shape, 1)
        return result

    def _tokens(self, level: int, places: torch.Tensor) -> torch.Tensor:
        ids = places if self.pool is None else self.pool[:, level].gather(1, places)
        return self.model.map_draft_to_target(ids)

    def tokens(self, places: torch.Tensor) -> torch.Tensor:
        """See ``BlockHead``."""
        return torch.stack([self._tokens(level, places[:, level]) for level in range(places.shape[1])], dim=1)


def normalised(scores: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Normalise scores over a pool of tokens and the probability of all others, which have no score.

    Args:
        scores: float32 [..., before, pool], log-probabilities of the pool plus what the token before adds.
        base: float32 [..., pool], the pool's log-probabilities.
    """
    left = (1.0 - base.exp().sum(-1)).clamp(min=0.0).log()[..., None]
    return scores - torch.logaddexp(scores.logsumexp(-1), left)[..., None]


HEADS: dict[str, Any] = {"dflash": DFlashHead, "dflash2": DFlash2Head, "dspark": DSparkHead}


def block_candidates(
    kind: str, model: Any, hidden: torch.Tensor, roots: torch.Tensor, k: int, merge: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The candidates of a batch of drafted blocks.

    Args:
        kind: one of ``HEADS``.
        model: vLLM's draft model.
        hidden: [n, depth, hidden], the draft's hidden states of the rows that predict the depths.
        roots: int64 [n], the last committed tokens.
        k: candidates of a depth; fewer where the pool has fewer.
        merge: whether several paths may lead to a candidate.

    Returns:
        their tokens, int64 [n, depth, k], and conditional probabilities, float32 [n, depth, k, k].
    """
    head: Any = HEADS[kind](model, hidden, roots)
    places, probs = choose_candidates(head.log_probs, hidden.shape[1], min(k, head.size), merge)
    return head.tokens(places), probs
