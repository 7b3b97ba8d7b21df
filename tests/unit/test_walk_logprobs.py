"""Logprobs and ranks of the accepted path, as vLLM's own code reads them, equal plain decoding's."""

import numpy as np
import pytest
import torch
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from walk_world import (
    SEEDS,
    VOCAB,
    Model,
    Request,
    Tree,
    allowed_tokens,
    min_tokens,
    penalties,
    plain,
    random_batch,
    run,
    sampling,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# --- logprobs ---------------------------------------------------------------------------------------


def logprobs_by_request(output, emitted):
    """Each request's rows of logprobs, as vLLM's bookkeeping extracts them."""
    if output.sampled_token_ids.shape[1] == 1:
        lists = output.logprobs_tensors.tolists()
    else:
        parsed, lists = RejectionSampler.parse_output(output.sampled_token_ids, VOCAB, (), output.logprobs_tensors)
        assert parsed == emitted
    return [lists.slice_request(row, len(tokens)) for row, tokens in enumerate(emitted)]


def check_logprobs(got, expected, width):
    """Compare the first ``width`` columns with plain decoding's, token by token."""
    tokens, logprobs, ranks, _ = got
    assert len(tokens) == len(expected)
    for line, plainly in enumerate(expected):
        assert tokens[line, :width].tolist() == plainly.logprob_token_ids[0, :width].tolist()
        np.testing.assert_allclose(logprobs[line, :width], plainly.logprobs[0, :width], atol=1e-6)
        assert ranks[line] == plainly.selected_token_ranks[0]


@pytest.mark.parametrize("seed", SEEDS[:12])
@pytest.mark.parametrize("num_logprobs", [0, 3])
def test_logprobs_of_the_path(sampler, num_logprobs, seed):
    model, requests, trees = random_batch(seed, sampling, penalties, allowed_tokens, min_tokens)
    output, emitted, _, _ = run(sampler, model, requests, trees, num_logprobs)
    for request, tokens, got in zip(requests, emitted, logprobs_by_request(output, emitted), strict=True):
        assert got.logprob_token_ids[:, 0].tolist() == tokens
        if request.greedy or request.seed is not None:
            expected = plain(sampler, model, request, len(tokens), num_logprobs)[1]
            check_logprobs(got, expected, num_logprobs + 1)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs"])
def test_logprobs_of_other_modes(mode):
    other = Sampler(logprobs_mode=mode)
    for seed in SEEDS[:6]:
        model, requests, trees = random_batch(seed, sampling, penalties)
        output, emitted, _, _ = run(other, model, requests, trees, 2)
        for request, tokens, got in zip(requests, emitted, logprobs_by_request(output, emitted), strict=True):
            if request.greedy or request.seed is not None:
                check_logprobs(got, plain(other, model, request, len(tokens), 2)[1], 3)


@pytest.mark.parametrize("seed", SEEDS[:12])
def test_logprobs_of_given_tokens(sampler, seed):
    # Requests have lists of different lengths, so levels that only some requests reach are narrower than the first.
    model, requests, trees = random_batch(seed, sampling)
    random = np.random.default_rng(seed)
    for request in requests:
        request.logprob_tokens = random.choice(VOCAB, size=random.integers(1, 5), replace=False).tolist()
    output, emitted, _, _ = run(sampler, model, requests, trees)
    for request, tokens, got in zip(requests, emitted, logprobs_by_request(output, emitted), strict=True):
        if request.greedy or request.seed is not None:
            expected = plain(sampler, model, request, len(tokens))[1]
            check_logprobs(got, expected, 1 + len(request.logprob_tokens))


def test_columns_without_a_token_have_no_probability(sampler):
    """Rows are as wide as the widest level's. vLLM itself fills what a request with given tokens leaves to others."""
    model, requests = Model(4), [Request(0, logprob_tokens=[3]), Request(1)]
    best = int(model.logits(requests[1], ()).argmax())
    output, emitted, _, _ = run(sampler, model, requests, [Tree(), Tree([(0, best)])], 3)
    _, second = logprobs_by_request(output, emitted)
    assert (second.logprobs[0, 1:] == -np.inf).all() and np.isfinite(second.logprobs[1]).all()


def test_all_logprobs(sampler):
    # num_logprobs -1 returns the whole vocabulary, unsorted, with empty ids and ranks, as the sampler itself does.
    model, requests, trees = random_batch(3, sampling)
    output, emitted, _, _ = run(sampler, model, requests, trees, -1)
    deepest = output.sampled_token_ids.shape[1]
    tensors = output.logprobs_tensors
    assert tensors.logprob_token_ids.numel() == tensors.selected_token_ranks.numel() == 0
    assert tensors.logprobs.shape == (len(requests) * deepest, VOCAB)
    for row, (request, tree, tokens) in enumerate(zip(requests, trees, emitted, strict=True)):
        for level in range(len(tokens)):
            assert tokens[:level] in [list(tree.path(place)) for place in range(len(tree.rows) + 1)]
            expected = model.logits(request, tokens[:level]).log_softmax(-1)
            torch.testing.assert_close(tensors.logprobs[row * deepest + level], expected)


def test_no_logprobs_unless_asked(sampler):
    assert run(sampler, *random_batch(1, sampling))[0].logprobs_tensors is None
