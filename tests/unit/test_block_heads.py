"""Candidates from the hidden states of drafted blocks.

Batches are compared with the specification, each kind of draft with a naive computation of its formula, and chains with
those of vLLM's own speculator.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from vllm_gsd.engine.draft.block_drafter import block_shape
from vllm_gsd.engine.draft.block_heads import block_candidates, share_of_pool
from vllm_gsd.method import lattice
from vllm_gsd.ops import HAVE_EXTENSION
from vllm_gsd.ops.lattice import api as lattice_api
from vllm_gsd.ops.lattice.api import choose_candidates
from vllm_gsd.upstream.drafts import normalise_keys_by_layer

VOCAB, HIDDEN, RANK, DEPTH = 24, 8, 5, 3


@pytest.fixture(params=["compiled", "specification"])
def implementation(request, monkeypatch):
    """Runs a test with the C++ operator, and with the specification that runs without it."""
    if request.param == "specification":
        monkeypatch.setattr(lattice_api, "use_kernel", lambda tensor: False)
    elif not HAVE_EXTENSION:
        pytest.skip("the extension is not built")


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_batches_equal_the_specification(seed, merge, implementation):
    random = np.random.default_rng(seed)
    count, pool, k = 3, int(random.integers(1, 9)), int(random.integers(1, 5))
    k = min(k, pool)
    scores = random.standard_normal((count, DEPTH, pool, pool)).astype(np.float32)
    shares = random.uniform(0.5, 1.0, (count, DEPTH, pool)).astype(np.float32)
    logits = torch.from_numpy(scores + random.standard_normal((count, DEPTH, pool, 1)).astype(np.float32))
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True)) - np.log(shares)[..., None]

    def of_batch(level, places):
        rows, share = logits[:, level], torch.from_numpy(shares[:, level])
        if places is None:
            return rows[:, :1], share[:, :1]
        return rows.gather(1, places[:, :, None].expand(-1, -1, pool)), share.gather(1, places)

    places, probs = choose_candidates(of_batch, DEPTH, k, merge)
    for row in range(count):

        def of_one(level, before, row=row):
            return scores[row, level, [0] if before is None else before]

        expected = lattice.choose_candidates(of_one, DEPTH, k, merge)
        assert places[row].tolist() == expected[0].tolist()
        np.testing.assert_allclose(probs[row].numpy(), expected[1], rtol=2e-6)
        assert (expected[1][:, :, 0].max(1) > 0).all()  # by which NaN is told from edges that are left out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equal_scores_are_in_the_order_of_tokens(implementation, dtype):
    scores = torch.tensor([[[1.0, 2.0, 1.0, 2.0, 1.0]]], dtype=dtype)
    assert choose_candidates(lambda level, places: (scores, None), 2, 4)[0].tolist() == [2 * [[1, 3, 0, 2]]]


def test_a_block_with_nan_has_no_candidates(implementation):
    scores = torch.full((2, 1, 4), -1.5)
    scores[1] = float("nan")
    probs = choose_candidates(lambda level, places: (scores, None), 2, 2)[1]
    assert (probs[0] > 0).all() and (probs[1] == 0).all()


class FakeDSpark:
    """The interface of vLLM's ``Qwen3DSparkForCausalLM``; its vocabulary is every second token of the target's."""

    def __init__(
        self, confidence=False, soft_cap: float | None = None, vocab=VOCAB, dtype=torch.float32, best: int | None = None
    ):
        torch.manual_seed(1)
        self.config = SimpleNamespace(dspark_draft_topk=best)
        shapes = (vocab, HIDDEN), (2 * vocab, RANK), (vocab, RANK)
        self.head, self.w1, self.w2 = (torch.randn(shape, dtype=dtype) for shape in shapes)
        self.logits_processor = SimpleNamespace(scale=1.0, soft_cap=soft_cap)
        method = SimpleNamespace(embedding=lambda layer, ids: layer.weight[ids])
        head = SimpleNamespace(markov_w2=SimpleNamespace(weight=self.w2, quant_method=method))
        self.proj = nn.Linear(HIDDEN + RANK, 1)
        self.model = SimpleNamespace(markov_head=head, confidence_head=self.proj if confidence else None)

    def compute_draft_logits(self, hidden):
        return hidden @ self.head.T

    def markov_embed(self, tokens):
        return self.w1[tokens]

    def markov_bias(self, embedded):
        """Compute the bias, which ``LogitsProcessor`` caps, too."""
        cap, bias = self.logits_processor.soft_cap, embedded @ self.w2.T
        return bias if cap is None else cap * torch.tanh(bias / cap)

    def map_draft_to_target(self, ids):
        return 2 * ids

    @torch.no_grad()
    def compute_confidence(self, hidden, embedded):
        return torch.sigmoid(self.proj(torch.cat([hidden, embedded], -1))).squeeze(-1)


def chain_of(model, hidden, root):
    """The greedy tokens of vLLM's DSpark speculator, and their probabilities."""
    tokens, chances = [], []
    for row in hidden:
        logits = model.compute_draft_logits(row) + model.markov_bias(model.markov_embed(root))
        probs = torch.softmax(logits.float(), 0)
        tokens.append(2 * int(logits.argmax()))
        chances.append(float(probs.max()))
        root = tokens[-1]
    return tokens, chances


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [VOCAB, 40_000])
@pytest.mark.parametrize("soft_cap", [None, 1.5])  # as in Gemma 4's drafts, which cap logits and biases
@pytest.mark.parametrize("k", [1, 4])
def test_dspark(k, soft_cap, vocab, dtype):
    model, roots = FakeDSpark(soft_cap=soft_cap, vocab=vocab, dtype=dtype), torch.tensor([5, 40])
    hidden = torch.randn(2, DEPTH, HIDDEN).to(dtype)
    tokens, probs = block_candidates("dspark", model, hidden, roots, k)
    for row in range(2):
        chain, chances = chain_of(model, hidden[row], int(roots[row]))
        assert tokens[row, :, 0].tolist() == chain
        assert probs[row, :, 0, 0].tolist() == pytest.approx(chances, rel=1e-5)
        before, best = tokens[row, 0], probs[row, 0, 0]
        biases = torch.stack([model.markov_bias(model.markov_embed(tokens)) for tokens in before])
        edges = (model.compute_draft_logits(hidden[row, 1]) + biases).float().softmax(-1)
        torch.testing.assert_close(probs[row, 1], edges[:, tokens[row, 1] // 2])  # every edge has its own probability
        paths = (best[:, None] * edges).amax(0)
        paths[tokens[row, 1, 0] // 2] = 2
        torch.testing.assert_close(paths[tokens[row, 1] // 2], paths.topk(k).values)  # they are the best ones


def test_the_drafts_own_choice_of_its_best_tokens():
    """With vLLM's ``dspark_draft_topk``, only the best tokens are candidates, and biases are not capped."""
    model, roots = FakeDSpark(soft_cap=0.1, best=6), torch.tensor([5, 40])
    hidden = torch.randn(2, DEPTH, HIDDEN)
    tokens, probs = block_candidates("dspark", model, hidden, roots, 4)
    assert (probs.sum(-1) <= 1 + 1e-5).all()
    for row in range(2):
        before = roots[row]
        for level in range(DEPTH):
            base, pool = model.compute_draft_logits(hidden[row, level]).topk(6)
            logits = base + model.w2[pool] @ model.w1[before]
            before = 2 * pool[logits.argmax()]
            assert tokens[row, level, 0] == before
            assert set(tokens[row, level].tolist()) <= set((2 * pool).tolist())


def test_a_choice_of_all_tokens_is_the_whole_vocabulary():
    hidden, roots = torch.randn(2, DEPTH, HIDDEN), torch.tensor([5, 40])
    whole, pooled = (block_candidates("dspark", FakeDSpark(best=best), hidden, roots, 4) for best in (None, VOCAB))
    assert whole[0].equal(pooled[0])
    torch.testing.assert_close(whole[1], pooled[1], rtol=1e-4, atol=1e-6)


def test_dspark_with_a_confidence_head():
    plain, sure = FakeDSpark(), FakeDSpark(confidence=True)
    hidden, roots = torch.randn(2, DEPTH, HIDDEN), torch.tensor([5, 40])
    (tokens, probs), (own, scaled) = (block_candidates("dspark", m, hidden, roots, 1) for m in (plain, sure))
    assert tokens.equal(own)
    share = sure.compute_confidence(hidden[:, 0], sure.markov_embed(roots))
    torch.testing.assert_close(scaled[:, 0, 0, 0], share * probs[:, 0, 0, 0])


class FakeDFlash2:
    """The interface of vLLM's ``DFlash2Qwen3ForCausalLM``."""

    def __init__(self, k):
        torch.manual_seed(2)
        self.lm_head = torch.randn(VOCAB, HIDDEN)
        self.codes = torch.randn(VOCAB, RANK), torch.randn(VOCAB, RANK), torch.randn(HIDDEN, RANK)
        self.model = SimpleNamespace(candidate_selector=Selector(self.codes, k))

    def candidate_logits_processor(self, head, hidden):
        return hidden @ head.T


class Selector:
    def __init__(self, codes, top_k):
        self.codes, self.top_k = codes, top_k

    def __call__(self, ids, unary, hidden, anchors):
        before, after, projection = self.codes
        previous = torch.cat([anchors[:, None, None].expand(-1, 1, self.top_k), ids[:, :-1]], 1)
        scaled = before[previous] * (hidden @ projection)[:, :, None]
        return unary[:, :, None] + torch.einsum("blpr,blcr->blpc", scaled, after[ids])


@pytest.mark.parametrize("k", [1, 3, 8])
def test_dflash2(k):
    """The first candidates follow vLLM's greedy walk over the selector's scores.

    Tokens outside the pool keep their base probability.
    """
    model, hidden, roots = FakeDFlash2(6), torch.randn(2, DEPTH, HIDDEN), torch.tensor([5, 9])
    tokens, probs = block_candidates("dflash2", model, hidden, roots, k)
    assert tokens.shape[2] == min(k, 6)
    logits = hidden @ model.lm_head.T
    unary, ids = logits.topk(6, -1)
    scores = model.model.candidate_selector(ids, unary, hidden, roots)
    for row in range(2):
        before = 0
        for level in range(DEPTH):
            others = logits[row, level].exp().sum() - unary[row, level].exp().sum()
            rows = scores[row, level, before].exp()
            before = int(rows.argmax())
            assert tokens[row, level, 0] == ids[row, level, before]
            expected = rows[before] / (rows.sum() + others)
            torch.testing.assert_close(probs[row, level, 0, 0], expected, rtol=1e-4, atol=1e-6)


def test_dflash():
    model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    hidden = torch.randn(2, DEPTH, VOCAB)
    tokens, probs = block_candidates("dflash", model, hidden, torch.tensor([1, 2]), 3)
    best = torch.softmax(hidden, -1).topk(3, -1)
    assert tokens.equal(best.indices)
    torch.testing.assert_close(probs, best.values[:, :, None].expand(-1, -1, 3, -1))


def test_share_of_pool():
    base, whole = torch.tensor([0.5, 0.2]).log() + 3, torch.tensor([3.0])
    shares = share_of_pool(base + torch.tensor([[0.0, 0.0], [1.0, -1.0]]), base, whole)
    grown = 0.5 * np.e + 0.2 / np.e
    torch.testing.assert_close(shares.double(), torch.tensor([0.7, grown / (grown + 0.3)]).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("anchored", "size", "rows", "predicting"),
    [
        (True, 4, 4, slice(0, 4)),
        (False, 4, 4, slice(1, 4)),
        (True, None, 6, slice(0, 6)),  # as long as graphs are deep
        (True, 8, 8, slice(0, 6)),  # a trained block stays whole
        (False, 8, 8, slice(1, 7)),
        (False, 16, 11, slice(1, 7)),  # up to the room in KV blocks
    ],
)
def test_shapes_of_blocks(anchored, size, rows, predicting):
    assert block_shape(anchored, size, max_depth=6, most=10) == (rows, predicting)


def test_each_layer_normalises_its_keys():
    """As PyTorch's own norm with each layer's weights does."""
    weights, keys = torch.rand(3, 16) + 0.5, torch.randn(3, 7, 2, 16)
    model = SimpleNamespace(model=SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-6))
    normalise_keys_by_layer(model)
    for layer, found in enumerate(model.model._normalize_context_k(keys)):
        norm = nn.RMSNorm(16, eps=1e-6)
        norm.weight.data.copy_(weights[layer])
        torch.testing.assert_close(found, norm(keys[layer]))
