"""The walk samples every accepted path exactly as plain decoding with vLLM's own sampler does (see ``walk_world``).

Greedy walks equal a simple recursion over the tree. Seeded requests get the same tokens and leave their generators in
the same state, with one draw for each emitted token. Every sampling parameter reads the request's own path, and the
requests' output lists are unchanged.
"""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.request import Request as ScheduledRequest
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.sampler import Sampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from walk_world import (
    PARAMETERS,
    SEEDS,
    VOCAB,
    Model,
    Request,
    Tree,
    bad_words,
    check_batch,
    lay_out,
    metadata_of,
    penalties,
    plain,
    random_batch,
    random_tree,
    run,
    sampling,
)

from vllm_gsd.engine.v1.walk import PLACEHOLDER, walk

pytestmark = pytest.mark.usefixtures("one_thread")

# --- tokens and generators --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_walks_follow_the_tree(sampler, seed):
    # A reference without vLLM: take the argmax, and continue in the child with that token.
    model, requests, trees = random_batch(seed)

    def follow(request, tree, place):
        token = int(model.logits(request, tree.path(place)).argmax())
        child = tree.child(place, token)
        if child is None:
            return [token], place
        rest, end = follow(request, tree, child)
        return [token, *rest], end

    _, emitted, places, _ = run(sampler, model, requests, trees)
    expected = [follow(request, tree, 0) for request, tree in zip(requests, trees, strict=True)]
    assert list(zip(emitted, places, strict=True)) == expected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("what", PARAMETERS)
def test_walks_equal_plain_decoding(sampler, what, seed):
    check_batch(sampler, *random_batch(seed, sampling, *PARAMETERS[what]))


@pytest.mark.parametrize("seed", SEEDS[:10])
@pytest.mark.parametrize("what", ["sampling", "everything"])
def test_greedy_walks_equal_plain_decoding(sampler, what, seed):
    check_batch(sampler, *random_batch(seed, *PARAMETERS[what]))


@pytest.mark.parametrize("seed", SEEDS[:10])
@pytest.mark.parametrize("shape", ["none", "foreign", "chain", "tree"])
def test_batches_of_one_shape(sampler, shape, seed):
    emitted = check_batch(sampler, *random_batch(seed, sampling, shapes=[shape]))
    if shape in ("none", "foreign"):
        assert all(len(tokens) == 1 for tokens in emitted)


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_walks_with_double_precision_noise(seed):
    # vLLM can also sample with exponential noise; seeded rows take it from the requests' generators.
    check_batch(Sampler(use_fp64_gumbel=True), *random_batch(seed, sampling, penalties))


def test_the_batches_accept_something(sampler):
    lengths = [
        len(tokens) for seed in SEEDS for tokens in run(sampler, *random_batch(seed, sampling, penalties, bad_words))[1]
    ]
    assert max(lengths) >= 4
    assert sum(length > 1 for length in lengths) > len(lengths) / 4


def test_two_steps_in_a_row(sampler):
    # The generator continues where a walk left it, so consecutive walks equal one run of plain decoding.
    model = Model(5)
    request = Request(0, greedy=False, seed=11, frequency=0.5, prompt=[1, 2], output=[3])
    generator = request.generator()
    first, emitted = copy.deepcopy(request), []
    for _ in range(4):
        path = tuple(emitted)
        random = np.random.default_rng([7, len(path)])
        shifted = SimpleNamespace(logits=lambda r, p, path=path: model.logits(r, (*path, *p)))
        tree = random_tree(random, shifted, request, "tree")
        logits, rows = lay_out(shifted, [request], [tree])
        metadata = metadata_of([request], [generator])
        output, _ = walk(sampler, logits, metadata, rows, [request.output], stateful=False)
        tokens = output.sampled_token_ids[0].tolist()
        emitted += tokens
        request.output += tokens
    expected, _, expected_generator = plain(sampler, model, first, len(emitted))
    assert emitted == expected
    assert len(emitted) > 4
    assert torch.equal(generator.get_state(), expected_generator.get_state())


REPETITION = RepetitionDetectionParams(max_pattern_size=2, min_count=2)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(stop_token_ids=[0, 1, 2]),
        SamplingParams(repetition_detection=REPETITION),
        SamplingParams(repetition_detection=REPETITION, min_tokens=4, max_tokens=9),
    ],
    ids=["stop tokens", "repetition", "minimum"],
)
def test_seeded_walks_end_with_the_text(sampler, params):
    """A session of streaming input goes on with the generator, so nothing is drawn behind the end of a text."""
    ended = 0
    for seed in range(250):
        model, requests, trees = random_batch(seed, sampling)
        generators = [request.generator() for request in requests]
        logits, rows = lay_out(model, requests, trees)
        outputs, ends = [request.output for request in requests], [params] * len(requests)
        output, paths = walk(sampler, logits, metadata_of(requests, generators), rows, outputs, False, ends)
        walks = zip(requests, generators, trees, paths.last.tolist(), output.sampled_token_ids.tolist(), strict=True)
        for request, generator, tree, place, line in walks:
            if generator is None:
                continue
            tokens = [token for token in line if token != PLACEHOLDER]
            expected, _, left = plain(sampler, model, request, len(tokens))
            assert tokens == expected
            assert not any(ends_by_vllm(params, request.output + tokens[:count]) for count in range(1, len(tokens)))
            assert tree.path(place) == (*tokens[:-1],)
            assert torch.equal(generator.get_state(), left.get_state())
            ended += tree.child(place, tokens[-1]) is not None
    assert ended > 5


def ends_by_vllm(params, output):
    """Whether vLLM's scheduler ends a text with these output tokens."""
    record = ScheduledRequest("", prompt_token_ids=[1], sampling_params=params, pooling_params=None)
    record.max_tokens = 99
    record.append_output_token_ids(output)
    return check_stop(record, 99)


@pytest.mark.parametrize("seed", SEEDS[:10])
@pytest.mark.parametrize("setters", [[], [sampling, penalties]], ids=["best tokens", "by level"])
def test_nan_among_logits_chooses_as_plain_decoding(sampler, setters, seed):
    class WithNan(Model):
        def logits(self, request, path):
            logits = super().logits(request, path)
            logits[(3 * request.number + len(path)) % VOCAB :: 4] = torch.nan
            return logits

    _, requests, trees = random_batch(seed, *setters)
    for request, tree in zip(requests, trees, strict=True):
        request.greedy = True
        if not tree.foreign:  # a path that these walks accept
            places = range(4)
            tree.rows = [(place, (3 * request.number + place) % VOCAB) for place in places]
    emitted = check_batch(sampler, WithNan(seed), requests, trees)
    if not setters:
        assert [len(tokens) > 1 for tokens in emitted] == [not tree.foreign for tree in trees]


# --- parameters that read the path ------------------------------------------------------------------


def test_a_bad_word_that_the_path_completes(sampler):
    # Greedy text would be 1 2 3. "2 3" is banned, and its first token is on the path.
    class Script:
        def logits(self, request, path):
            return torch.nn.functional.one_hot(torch.tensor((len(path) + 1) % VOCAB), VOCAB).float() * 5 + (
                torch.arange(VOCAB) == 6
            )

    tree = Tree([(0, 1), (1, 2), (2, 3), (2, 6)])
    other = Request(1, prompt=[0])
    for requests, trees in (
        ([Request(0, bad_words=[[2, 3]], prompt=[0])], [tree]),
        ([other, Request(0, bad_words=[[2, 3]], prompt=[0])], [Tree(), tree]),
        ([Request(0, bad_words=[[2, 3]], prompt=[0]), other], [tree, Tree([(0, 1)])]),
    ):
        _, emitted, places, _ = run(sampler, Script(), requests, trees)
        banned = next(i for i, request in enumerate(requests) if request.bad_words)
        assert emitted[banned] == [1, 2, 6, 4]
        assert places[banned] == 4


def test_a_penalty_counts_the_path(sampler):
    # Token 1's logit leads by 1 everywhere and loses 0.6 for each time it is on the path, so it is chosen twice.
    class Script:
        def logits(self, request, path):
            return torch.tensor([0.0, 2.0, 1.0, *[-9.0] * (VOCAB - 3)])

    tree = Tree([(0, 1), (1, 1), (2, 1), (2, 2)])
    _, emitted, _, _ = run(sampler, Script(), [Request(0, frequency=0.6, prompt=[0])], [tree])
    assert emitted == [[1, 1, 2, 1]]


# --- thinking budgets ------------------------------------------------------------


def walk_beside_a_thinker(sampler, thinker, budget):
    """Walk for two requests: one has a thinking budget and, like all such requests, no tree; the other has a tree.

    Token 6 begins thinking, and 7 ends it. Returns the tokens of both, the other request's plain text, and vLLM's
    counts of thinking tokens that are left, after this step and after a step without the other request.
    """
    model = Model(23)
    requests = [Request(0, prompt=[1]), Request(1, prompt=[1])]
    requests[thinker].prompt, requests[thinker].output = [6, 1, 2], [3, 4]
    requests[1 - thinker].output = [5, 5, 5, 5]
    trees = [Tree(), Tree()]
    best = int(model.logits(requests[1 - thinker], ()).argmax())
    trees[1 - thinker].rows = [(0, best), (1, 0), (1, 5)]

    def holder_for(request, row, size):
        ends = SimpleNamespace(reasoning_start_token_ids=[6], reasoning_end_token_ids=[7])
        holder = ThinkingBudgetStateHolder(ends, size, 8, torch.device("cpu"), False)
        params = SamplingParams(thinking_token_budget=budget, max_tokens=99)
        added = [(row, params, request.prompt, request.output)]
        holder.sync_batch(BatchUpdate(batch_size=size, removed=[], added=added, moved=[]))
        return holder

    def walked(some, their_trees, holder):
        logits, rows = lay_out(model, some, their_trees)
        metadata = metadata_of(some, [None] * len(some))
        metadata.output_token_ids = [request.output for request in some]
        metadata.thinking_budget_state_holder = holder
        metadata.spec_token_ids = [[token for _, token in tree.rows] for tree in their_trees]
        output, _ = walk(sampler, logits, metadata, rows, [request.output for request in some], stateful=False)
        return [[t for t in line if t != PLACEHOLDER] for line in output.sampled_token_ids.tolist()]

    holder = holder_for(requests[thinker], thinker, 2)
    tokens = walked(requests, trees, holder)
    alone = holder_for(requests[thinker], 0, 1)
    assert walked([requests[thinker]], [Tree()], alone)[0] == tokens[thinker]
    other = tokens[1 - thinker]
    expected = plain(sampler, model, requests[1 - thinker], len(other))[0]
    counts = [h._state[row]["check_count_down"] for h, row in ((holder, thinker), (alone, 0))]
    return tokens[thinker], other, expected, counts


@pytest.mark.parametrize("thinker", [0, 1])
def test_a_thinking_budget_that_is_used_up(sampler, thinker):
    tokens, other, expected, _ = walk_beside_a_thinker(sampler, thinker, budget=2)
    assert tokens == [7]
    assert other == expected


@pytest.mark.parametrize("thinker", [0, 1])
def test_a_thinking_budget_that_is_not_used_up(sampler, thinker):
    _, other, expected, (counted, alone) = walk_beside_a_thinker(sampler, thinker, budget=20)
    assert other == expected
    assert counted == alone
