"""The walk draws every accepted path exactly as plain decoding with vLLM's own sampler would.

Random batches of requests (greedy, seeded, unseeded; top-k, top-p, penalties, bad words, allowed tokens,
min_tokens; with trees, chains, foreign rows or nothing to verify) over a random model. The reference decodes
each request alone, one token after the other. Proven: greedy walks follow the tree as a plain recursion does;
seeded requests get the same tokens and leave their generators in the same state (one draw for each emitted
token); every parameter reads the request's own path; logprobs and ranks of the path are plain decoding's as
vLLM's consumer reads them; the output lists are as before.
"""

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from vllm_gsd.core.graph import NONE
from vllm_gsd.runtime.v1.walk import FOREIGN, PLACEHOLDER, WalkTrees, walk

VOCAB = 8
SEEDS = range(25)

# --- requests, the model and trees ------------------------------------------------------------------


@dataclass
class Request:
    number: int
    greedy: bool = True
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = VOCAB
    top_p: float = 1.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bad_words: list[list[int]] = field(default_factory=list)
    allowed: list[int] | None = None
    min_tokens: int = 0
    stop: list[int] = field(default_factory=list)
    logprob_tokens: list[int] | None = None
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)

    @property
    def penalized(self):
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)

    def generator(self):
        if self.greedy or self.seed is None:
            return None
        return torch.Generator().manual_seed(self.seed)


class Model:
    """Random logits by request and path."""

    def __init__(self, seed, sharpness=1.5):
        self.seed, self.sharpness = seed, sharpness

    def logits(self, request, path):
        random = np.random.default_rng([self.seed, request.number, *path])
        return torch.from_numpy((random.normal(size=VOCAB) * self.sharpness).astype(np.float32))


@dataclass
class Tree:
    """Places after the root: (place of the parent, token); ``foreign`` rows belong to no tree."""

    rows: list[tuple[int, int]] = field(default_factory=list)
    foreign: bool = False

    def path(self, place):
        if place == 0:
            return ()
        parent, token = self.rows[place - 1]
        return (*self.path(parent), token)

    def child(self, place, token):
        found = [i for i, row in enumerate(self.rows, start=1) if row == (place, token) and not self.foreign]
        return found[0] if found else None


def random_tree(random, model, request, shape):
    """A tree whose paths the model often takes."""
    if shape == "foreign":
        return Tree([(0, int(t)) for t in random.integers(0, VOCAB, size=3)], foreign=True)
    tree = Tree()
    for _ in range({"none": 0, "chain": 5, "tree": 14}[shape]):
        place = len(tree.rows) if shape == "chain" else int(random.integers(0, len(tree.rows) + 1))
        likely = model.logits(request, tree.path(place)).argsort(descending=True)[:4]
        if request.allowed:
            likely = torch.tensor(request.allowed)
        token = int(random.choice(likely.numpy()))
        if tree.child(place, token) is None:
            tree.rows.append((place, token))
    return tree


def lay_out(model, requests, trees):
    """Rows and logits of a batch, as after the target's forward."""
    token, parent, starts, logits = [], [], [0], []
    for request, tree in zip(requests, trees, strict=True):
        token += [request.output[-1] if request.output else 0, *(t for _, t in tree.rows)]
        parent += [NONE, *(FOREIGN if tree.foreign else p for p, _ in tree.rows)]
        starts.append(len(token))
        logits += [model.logits(request, tree.path(place)) for place in range(len(tree.rows) + 1)]
    rows = WalkTrees(np.array(token, np.int64), np.array(parent, np.int32), np.array(starts, np.int32))
    return torch.stack(logits), rows


# --- sampling metadata, as vLLM's input batch makes it ----------------------------------------------


def metadata_of(requests, generators, num_logprobs=None):
    def column(name, dtype=torch.float32):
        return torch.tensor([getattr(request, name) for request in requests], dtype=dtype)

    greedy = [request.greedy for request in requests]
    penalized = any(request.penalized for request in requests)
    longest = max(len(request.prompt) for request in requests)
    prompts = [request.prompt + [VOCAB] * (longest - len(request.prompt)) for request in requests]
    allowed = torch.zeros(len(requests), VOCAB, dtype=torch.bool)
    for row, request in enumerate(requests):
        if request.allowed is not None:
            allowed[row] = True
            allowed[row, request.allowed] = False
    min_tokens = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
    added = [
        (
            row,
            SamplingParams(min_tokens=request.min_tokens, stop_token_ids=request.stop, max_tokens=99),
            request.prompt,
            request.output,
        )
        for row, request in enumerate(requests)
    ]
    min_tokens.update_state(BatchUpdate(batch_size=len(requests), removed=[], added=added, moved=[]))
    bad_words = {row: request.bad_words for row, request in enumerate(requests) if request.bad_words}
    logprob_tokens = {row: r.logprob_tokens for row, r in enumerate(requests) if r.logprob_tokens is not None}
    return SamplingMetadata(
        temperature=None
        if all(greedy)
        else torch.tensor([0.0 if request.greedy else request.temperature for request in requests]),
        all_greedy=all(greedy),
        all_random=not any(greedy),
        top_p=column("top_p") if any(request.top_p < 1 for request in requests) else None,
        top_k=column("top_k", torch.int32) if any(request.top_k < VOCAB for request in requests) else None,
        generators={row: generator for row, generator in enumerate(generators) if generator is not None},
        max_num_logprobs=num_logprobs,
        no_penalties=not penalized,
        prompt_token_ids=torch.tensor(prompts, dtype=torch.int64) if penalized else None,
        frequency_penalties=column("frequency"),
        presence_penalties=column("presence"),
        repetition_penalties=column("repetition"),
        # vLLM leaves the lists out where nothing reads them.
        output_token_ids=[request.output for request in requests] if penalized or bad_words else [],
        allowed_token_ids_mask=allowed if any(r.allowed is not None for r in requests) else None,
        bad_words_token_ids=bad_words,
        logitsprocs=LogitsProcessors([min_tokens]),
        logprob_token_ids=logprob_tokens or None,
    )


# --- plain decoding ---------------------------------------------------------------------------------


def plain(sampler, model, request, count, num_logprobs=None):
    """Decode a request alone, token by token: tokens, logprobs of each, and its generator."""
    request = copy.deepcopy(request)
    generator = request.generator()
    tokens, logprobs = [], []
    for _ in range(count):
        metadata = metadata_of([request], [generator], num_logprobs)
        logits = model.logits(request, tokens).unsqueeze(0)
        sampled = sampler(logits=logits, sampling_metadata=metadata)
        tokens.append(int(sampled.sampled_token_ids[0, 0]))
        logprobs.append(sampled.logprobs_tensors)
        request.output.append(tokens[-1])
    return tokens, logprobs, generator


def run(sampler, model, requests, trees, num_logprobs=None):
    """One walk of the batch: its output, the tokens of each request, the places and the generators."""
    generators = [request.generator() for request in requests]
    logits, rows = lay_out(model, requests, trees)
    before = copy.deepcopy([request.output for request in requests])
    metadata = metadata_of(requests, generators, num_logprobs)
    output, places = walk(
        sampler,
        logits,
        metadata,
        rows,
        [request.output for request in requests],
        stateful=any(request.min_tokens for request in requests),
    )
    assert [request.output for request in requests] == before
    assert output.sampled_token_ids.dtype == torch.int32
    emitted = []
    for row in output.sampled_token_ids.tolist():
        count = row.index(PLACEHOLDER) if PLACEHOLDER in row else len(row)
        assert row[count:] == [PLACEHOLDER] * (len(row) - count)
        emitted.append(row[:count])
    assert output.sampled_token_ids.shape[1] == max(map(len, emitted))
    return output, emitted, places.tolist(), generators


def check_path(tree, tokens, place):
    """The emitted tokens are a path of the tree and one token that leaves it."""
    at = 0
    for token in tokens[:-1]:
        at = tree.child(at, token)
        assert at is not None
    assert at == place
    assert tree.child(at, tokens[-1]) is None


def check_batch(sampler, model, requests, trees):
    """Walk a batch and compare every request that is not left to chance with plain decoding."""
    _, emitted, places, generators = run(sampler, model, requests, trees)
    for request, tree, tokens, place, generator in zip(requests, trees, emitted, places, generators, strict=True):
        check_path(tree, tokens, place)
        if not request.greedy and request.seed is None:
            continue
        expected, _, expected_generator = plain(sampler, model, request, len(tokens))
        assert tokens == expected
        if generator is not None:
            assert torch.equal(generator.get_state(), expected_generator.get_state())
    return emitted


# --- random batches ---------------------------------------------------------------------------------


def sampling(random, request):
    """Make a request greedy, seeded or unseeded."""
    kind = random.choice(["greedy", "seeded", "seeded", "unseeded"])
    request.greedy = kind == "greedy"
    request.seed = int(random.integers(1, 1000)) if kind == "seeded" else None
    request.temperature = float(random.choice([0.5, 1.0, 1.6]))
    request.top_k = int(random.choice([VOCAB, VOCAB, 3]))
    request.top_p = float(random.choice([1.0, 1.0, 0.7]))


def penalties(random, request):
    request.repetition = float(random.choice([1.0, 1.5, 0.7]))
    request.presence = float(random.choice([0.0, 1.0, -1.0]))
    request.frequency = float(random.choice([0.0, 0.8, -0.8]))


def bad_words(random, request):
    lengths = random.choice([1, 2, 2, 3], size=random.integers(0, 6))
    request.bad_words = [random.integers(0, VOCAB, size=length).tolist() for length in lengths]


def allowed_tokens(random, request):
    if random.random() < 0.7:
        request.allowed = sorted(random.choice(VOCAB, size=4, replace=False).tolist())


def min_tokens(random, request):
    request.min_tokens = len(request.output) + int(random.integers(0, 4))
    request.stop = random.choice(VOCAB, size=3, replace=False).tolist()


PARAMETERS = {
    "sampling": [],
    "penalties": [penalties],
    "bad_words": [bad_words],
    "allowed_tokens": [allowed_tokens],
    "min_tokens": [min_tokens],
    "everything": [penalties, bad_words, allowed_tokens, min_tokens],
}


def random_batch(seed, *setters, shapes=("tree", "tree", "chain", "none", "foreign")):
    random = np.random.default_rng([seed, 3])
    model = Model(seed, sharpness=float(random.choice([1.0, 2.5])))
    requests, trees = [], []
    for number in range(int(random.integers(1, 6))):
        request = Request(number)
        request.prompt = random.integers(0, VOCAB, size=random.integers(1, 6)).tolist()
        request.output = random.integers(0, VOCAB, size=random.integers(0, 5)).tolist()
        for setter in setters:
            # Not every request of a batch uses what some of them do.
            if setter is sampling or random.random() < 0.8:
                setter(random, request)
        requests.append(request)
        trees.append(random_tree(random, model, request, random.choice(shapes)))
    return model, requests, trees


@pytest.fixture(scope="module")
def sampler():
    return Sampler()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Eight logits need no second thread, and waiting for it would be most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- tokens and generators --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_walks_follow_the_tree(sampler, seed):
    # Written out once more without vLLM: argmax, and on into the child that carries it.
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
    # vLLM's other way to draw: exponential noise, whose seeded rows come from the requests' generators.
    check_batch(Sampler(use_fp64_gumbel=True), *random_batch(seed, sampling, penalties))


def test_the_batches_accept_something(sampler):
    lengths = [
        len(tokens) for seed in SEEDS for tokens in run(sampler, *random_batch(seed, sampling, penalties, bad_words))[1]
    ]
    assert max(lengths) >= 4
    assert sum(length > 1 for length in lengths) > len(lengths) / 4


def test_two_steps_in_a_row(sampler):
    # The generator goes on where the walk left it: two walks give what plain decoding gives in one go.
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


# --- the own path -----------------------------------------------------------------------------------


def test_a_bad_word_that_the_path_completes(sampler):
    # Greedy text would be 1 2 3; "2 3" is banned, and its first half lies on the path.
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
    # Token 1 leads by 1 at every place; each time it is on the path it loses 0.6, so it is chosen twice.
    class Script:
        def logits(self, request, path):
            return torch.tensor([0.0, 2.0, 1.0, *[-9.0] * (VOCAB - 3)])

    tree = Tree([(0, 1), (1, 1), (2, 1), (2, 2)])
    _, emitted, _, _ = run(sampler, Script(), [Request(0, frequency=0.6, prompt=[0])], [tree])
    assert emitted == [[1, 1, 2, 1]]


# --- thinking budgets ------------------------------------------------------------


def walk_beside_a_thinker(sampler, thinker, budget):
    """Two requests: one has a thinking budget and, as all such requests, no tree; the other has one.

    Token 6 begins thinking, 7 ends it. Returns the tokens of both, the other request's plain text, and how
    many thinking tokens are left by vLLM's count after this step and after one without the other request.
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


# --- logprobs ---------------------------------------------------------------------------------------


def logprobs_by_request(output, emitted):
    """Rows of logprobs as vLLM's bookkeeping hands them to each request."""
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
    # Lists of different length: a level where only some requests go on is narrower than the first.
    model, requests, trees = random_batch(seed, sampling)
    random = np.random.default_rng(seed)
    for request in requests:
        request.logprob_tokens = random.choice(VOCAB, size=random.integers(1, 5), replace=False).tolist()
    output, emitted, _, _ = run(sampler, model, requests, trees)
    for request, tokens, got in zip(requests, emitted, logprobs_by_request(output, emitted), strict=True):
        if request.greedy or request.seed is not None:
            expected = plain(sampler, model, request, len(tokens))[1]
            check_logprobs(got, expected, 1 + len(request.logprob_tokens))


def test_all_logprobs(sampler):
    # num_logprobs -1: the whole vocabulary, unsorted; ids and ranks are empty, as from the sampler itself.
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
