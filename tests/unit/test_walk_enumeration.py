"""Exact enumeration of walks with every parameter: each text has the same probability as under plain sampling.

Only the last step of vLLM's sampler, the random draw, is replaced: the replacement takes given tokens and records their
probabilities. In this way, every outcome of a walk is visited without sampling. The expected probabilities follow from
the definitions of the parameters, computed below in float64 without vLLM. No text that a walk can emit is a prefix of
another, and their probabilities sum to 1. If each is as probable as under plain sampling, a walk followed by plain
sampling has plain sampling's distribution of sequences.
"""

import functools

import numpy as np
import pytest
import torch
from toy_grammar import Manager, ToyGrammar, toy_request
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler
from walk_world import (
    VOCAB,
    Model,
    Request,
    Tree,
    allowed_tokens,
    bad_words,
    check_path,
    logit_bias,
    min_p,
    min_tokens,
    penalties,
    random_batch,
    random_tree,
    run,
)

from vllm_gsd.engine.schedule.grammar import ProposedTree, allowed_nodes, tree_bitmask
from vllm_gsd.method.constants import NONE

pytestmark = pytest.mark.usefixtures("one_thread")
SEEDS = range(4)
# The sampler computes in float32, the reference in float64.
EXACT = 1e-6


# --- expected probabilities ---------------------------------------------------------------------------


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def expected_probs(model, request, path):
    """The probability of each token after ``path``, by the definitions of the parameters."""
    logits = model.logits(request, path).double().numpy().copy()
    output = [*request.output, *path]
    if request.allowed is not None:
        logits[[token for token in range(VOCAB) if token not in request.allowed]] = -np.inf
    for *start, last in request.bad_words:
        if not start or output[-len(start) :] == start:
            logits[last] = -np.inf
    if len(output) < request.min_tokens:
        logits[request.stop] = -np.inf
    for token, bias in (request.bias or {}).items():
        logits[token] += bias
    for token in set(request.prompt) | set(output):
        logits[token] *= request.repetition if logits[token] < 0 else 1 / request.repetition
    for token in set(output):
        logits[token] -= request.frequency * output.count(token) + request.presence
    logits /= request.temperature
    probs = softmax(logits)
    logits[probs < request.min_p * probs.max()] = -np.inf
    logits[logits < np.sort(logits)[-request.top_k]] = -np.inf
    probs, order = softmax(logits), np.argsort(logits)
    unlikely = np.cumsum(probs[order]) <= 1 - request.top_p
    unlikely[-1] = False
    logits[order[unlikely]] = -np.inf
    return softmax(logits)


# --- enumeration --------------------------------------------------------------------------------------


class Draws:
    """Replaces the sampler's random draw: the studied request takes the tokens of ``script``, then any possible ones.

    It is recognised by its generator. The other requests' tokens are random.
    """

    def __init__(self, seed, script, random):
        self.seed, self.script, self.random = seed, script, random
        self.probs = []

    def __call__(self, logits, generators, k, p):
        probs = apply_top_k_top_p(logits, k, p).double().softmax(-1).numpy()
        tokens = np.array([self.random.choice(VOCAB, p=line) for line in probs])
        for row, generator in generators.items():
            if generator.initial_seed() == self.seed:
                level = len(self.probs)
                tokens[row] = self.script[level] if level < len(self.script) else np.flatnonzero(probs[row])[0]
                self.probs.append(probs[row])
        return torch.from_numpy(tokens), None


def outcomes(model, requests, trees, studied, seed):
    """The probability of each text that a walk can emit for one request of a batch."""
    sampler, random = Sampler(), np.random.default_rng(seed)
    result: dict[tuple[int, ...], float] = {}
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        script = scripts.pop()
        draws = sampler.topk_topp_sampler.forward = Draws(requests[studied].seed, script, random)
        _, emitted, places, _ = run(sampler, model, requests, trees)
        text = tuple(emitted[studied])
        assert text[: len(script)] == script and len(draws.probs) == len(text)
        check_path(trees[studied], list(text), places[studied])
        assert text not in result
        result[text] = float(np.prod([probs[token] for probs, token in zip(draws.probs, text, strict=True)]))
        for level in range(len(script), len(text)):
            others = set(np.flatnonzero(draws.probs[level]).tolist()) - {text[level]}
            scripts += [(*text[:level], token) for token in others]
    return result


def check_enumeration(model, requests, trees, seed):
    """Compare all outcomes of every request of a batch with plain sampling's; returns the longest text."""
    for number, request in enumerate(requests):
        request.greedy, request.seed = False, 100 + number
    longest = 0
    for studied, request in enumerate(requests):
        probs_after = functools.cache(functools.partial(expected_probs, model, request))
        probs = outcomes(model, requests, trees, studied, seed)
        assert sum(probs.values()) == pytest.approx(1, abs=EXACT)
        for text, prob in probs.items():
            expected = np.prod([probs_after(text[:level])[token] for level, token in enumerate(text)])
            assert prob == pytest.approx(expected, abs=EXACT)
        longest = max(longest, *map(len, probs))
    return longest


def sampled(random, request):
    request.temperature = float(random.choice([0.5, 1.0, 1.6]))
    request.top_k = int(random.choice([VOCAB, VOCAB, 3]))
    request.top_p = float(random.choice([1.0, 1.0, 0.7]))


def some_bad_words(random, request):
    bad_words(random, request)
    del request.bad_words[3:]  # more of them might forbid all tokens


WITH = {
    "sampling": [],
    "penalties": [penalties],
    "logit_bias": [logit_bias],
    "min_p": [min_p],
    "allowed_tokens": [allowed_tokens],
    "bad_words": [some_bad_words],
    "min_tokens": [min_tokens],
    "processors-and-penalties": [penalties, min_p, logit_bias, min_tokens],
    "masks-and-penalties": [penalties, allowed_tokens, min_p],
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("what", WITH)
def test_every_outcome_has_its_probability(what, seed):
    check_enumeration(*random_batch(seed, sampled, *WITH[what], shapes=("tree", "tree", "chain", "none")), seed)


# --- grammars -----------------------------------------------------------------------------------------

TOY = (VOCAB, 4, None)  # each token allows four others


class Masked:
    """A model whose logits have the grammars' masks applied to each row, as the model runner does."""

    def __init__(self, model, masks):
        self.model, self.masks = model, masks

    def logits(self, request, path):
        logits = self.model.logits(request, path)
        if request.number not in self.masks:
            return logits
        bits = self.masks[request.number].get(tuple(path))
        if bits is None:  # beyond the tree, needed only by the reference
            grammar = ToyGrammar(*TOY)
            grammar.accept_tokens("", path)
            bits = sum(1 << token for token in grammar.next_tokens())
        return logits.masked_fill(torch.tensor([not bits >> token & 1 for token in range(VOCAB)]), -torch.inf)


def with_grammars(model, requests, seed):
    """A model masked by toy grammars, and trees cut to allowed nodes. Every third request has no grammar."""
    random = np.random.default_rng([seed, 5])
    manager, grammars = Manager(), {str(r.number): toy_request(*TOY) for r in requests if r.number % 3 != 2}
    trees, kept = [], {}
    for request in requests:
        tree = random_tree(random, model, request, "tree")
        name = str(request.number)
        if name in grammars:
            tokens, parents = [0, *(token for _, token in tree.rows)], [NONE, *(parent for parent, _ in tree.rows)]
            kept[name] = allowed_nodes(manager, grammars[name], ProposedTree(tokens, parents, budget=8))
            paths = kept[name].paths
            tree = Tree([(paths.index(path[:-1]), path[-1]) for path in paths[1:]])
        trees.append(tree)
    scheduled = {name: tree.tokens[1:] for name, tree in kept.items()}
    bits = iter(tree_bitmask(manager, grammars, list(grammars), scheduled, kept)[:, 0].tolist())
    masks = {int(name): {tuple(path): next(bits) for path in kept[name].paths} for name in grammars}
    return Masked(model, masks), requests, trees


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("what", ["sampling", "penalties", "logit_bias", "min_p", "processors-and-penalties"])
def test_every_outcome_under_grammars_has_its_probability(what, seed):
    setters = [setter for setter in WITH[what] if setter is not min_tokens]
    model, requests, _ = random_batch(seed, sampled, *setters)
    check_enumeration(*with_grammars(model, requests, seed), seed)


# --- controls for the check ---------------------------------------------------------------------------


def test_paths_are_accepted_with_and_without_grammars():
    seeds = SEEDS[:3]
    assert min(check_enumeration(*random_batch(seed, penalties, shapes=["tree"]), seed) for seed in seeds) >= 3
    assert min(check_enumeration(*with_grammars(*random_batch(seed)[:2], seed), seed) for seed in seeds) >= 3


def test_control_penalties_that_do_not_count_the_path_are_noticed(monkeypatch):
    model, request = Model(3), Request(0, frequency=0.8, presence=0.5, repetition=1.3, prompt=[1], output=[2])
    tree = random_tree(np.random.default_rng(3), model, request, "tree")
    check_enumeration(model, [request], [tree], 0)
    upstream = Sampler.apply_penalties
    monkeypatch.setattr(
        Sampler,
        "apply_penalties",
        staticmethod(lambda logits, metadata, outputs: upstream(logits, metadata, [output[:1] for output in outputs])),
    )
    with pytest.raises(AssertionError):
        check_enumeration(model, [request], [tree], 0)
