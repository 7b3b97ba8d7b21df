"""Requests, a random model and trees for the tests of the walk, and plain decoding as their reference.

Random batches mix greedy, seeded and unseeded requests with top-k, top-p, min_p, penalties, bias, bad words, allowed
tokens and min_tokens, and with trees, chains, foreign rows or nothing to verify. The reference decodes each request
alone, token by token.
"""

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, BatchUpdate, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_gsd.engine.v1.walk import PLACEHOLDER, walk
from vllm_gsd.engine.verify.draft_tree import FOREIGN, WalkTrees
from vllm_gsd.method.constants import NONE

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
    min_p: float = 0.0
    bias: dict[int, float] | None = None
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
    """A model with random logits for each request and path."""

    def __init__(self, seed, sharpness=1.5):
        self.seed, self.sharpness = seed, sharpness

    def logits(self, request, path):
        random = np.random.default_rng([self.seed, request.number, *path])
        return torch.from_numpy((random.normal(size=VOCAB) * self.sharpness).astype(np.float32))


@dataclass
class Tree:
    """The nodes after the root as (place of the parent, token). With ``foreign``, the rows belong to no tree."""

    rows: list[tuple[int, int]] = field(default_factory=list)
    foreign: bool = False

    def path(self, place):
        if place == 0:
            return ()
        parent, token = self.rows[place - 1]
        return (*self.path(parent), token)

    def child(self, place, token):
        places = [i for i, row in enumerate(self.rows, start=1) if row == (place, token) and not self.foreign]
        return places[0] if places else None


def random_tree(random, model, request, shape):
    """A tree with paths that the model often samples."""
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
    """Logits and rows of a batch after the target's forward."""
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
    engine = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(requests)))
    processors = [processor(engine, torch.device("cpu"), False) for processor in BUILTIN_LOGITS_PROCESSORS]
    added = [
        (
            row,
            SamplingParams(
                min_tokens=request.min_tokens,
                stop_token_ids=request.stop,
                max_tokens=99,
                min_p=request.min_p,
                logit_bias=request.bias,
            ),
            request.prompt,
            request.output,
        )
        for row, request in enumerate(requests)
    ]
    for processor in processors:
        processor.update_state(BatchUpdate(batch_size=len(requests), removed=[], added=added, moved=[]))
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
        # vLLM omits the lists if nothing reads them.
        output_token_ids=[request.output for request in requests] if penalized or bad_words else [],
        allowed_token_ids_mask=allowed if any(r.allowed is not None for r in requests) else None,
        bad_words_token_ids=bad_words,
        logitsprocs=LogitsProcessors(processors),
        logprob_token_ids=logprob_tokens or None,
    )


# --- plain decoding ---------------------------------------------------------------------------------


def plain(sampler, model, request, count, num_logprobs=None):
    """Decode a request alone, token by token; returns its tokens, their logprobs, and its generator."""
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
    """Walk a batch; returns the output, each request's tokens, the last places, and the generators."""
    generators = [request.generator() for request in requests]
    logits, rows = lay_out(model, requests, trees)
    before = copy.deepcopy([request.output for request in requests])
    metadata = metadata_of(requests, generators, num_logprobs)
    output, paths = walk(
        sampler,
        logits,
        metadata,
        rows,
        [request.output for request in requests],
        stateful=any(request.min_tokens or request.min_p or request.bias for request in requests),
    )
    assert [request.output for request in requests] == before
    assert output.sampled_token_ids.dtype == torch.int32
    emitted = []
    for row in output.sampled_token_ids.tolist():
        count = row.index(PLACEHOLDER) if PLACEHOLDER in row else len(row)
        assert row[count:] == [PLACEHOLDER] * (len(row) - count)
        emitted.append(row[:count])
    assert paths.num_tokens.tolist() == list(map(len, emitted))
    assert paths.tokens.tolist() == output.sampled_token_ids.tolist()
    assert output.sampled_token_ids.shape[1] == max(map(len, emitted))
    return output, emitted, paths.last.tolist(), generators


def check_path(tree, tokens, place):
    """Check that the emitted tokens are a path of the tree and one token outside it."""
    at = 0
    for token in tokens[:-1]:
        at = tree.child(at, token)
        assert at is not None
    assert at == place
    assert tree.child(at, tokens[-1]) is None


def check_batch(sampler, model, requests, trees):
    """Walk a batch and compare every greedy or seeded request with plain decoding."""
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


def min_p(random, request):
    request.min_p = float(random.choice([0.05, 0.2, 0.6]))


def logit_bias(random, request):
    tokens = random.choice(VOCAB, size=3, replace=False).tolist()
    request.bias = dict(zip(tokens, random.choice([-100.0, -1.0, 1.5, 3.0], size=3).tolist(), strict=True))


PARAMETERS = {
    "sampling": [],
    "penalties": [penalties],
    "bad_words": [bad_words],
    "allowed_tokens": [allowed_tokens],
    "min_tokens": [min_tokens],
    "min_p": [min_p],
    "logit_bias": [logit_bias],
    "everything": [penalties, bad_words, allowed_tokens, min_tokens, min_p, logit_bias],
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
            # Not every request of a batch uses every parameter.
            if setter is sampling or random.random() < 0.8:
                setter(random, request)
        requests.append(request)
        trees.append(random_tree(random, model, request, random.choice(shapes)))
    return model, requests, trees
