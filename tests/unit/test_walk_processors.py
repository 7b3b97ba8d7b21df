"""Walks call stateful custom logits processors exactly once for every emitted token; texts equal plain decoding's.

One kind is vLLM's adapter with a callable for each request; the other is a processor for the whole batch. Both keep a
state that every call updates and that decides which tokens they forbid.
"""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, LogitsProcessors
from walk_world import PARAMETERS, SEEDS, VOCAB, Model, Request, Tree, lay_out, metadata_of, random_batch, sampling

from vllm_gsd.engine.v1 import processors
from vllm_gsd.engine.v1.model_runner import _has_processor
from vllm_gsd.engine.v1.walk import PLACEHOLDER, walk

pytestmark = pytest.mark.usefixtures("one_thread")


class Automaton:
    """Forbids tokens depending on a state that each call updates with the last token."""

    def __init__(self):
        self.state, self.calls = 1, []

    def __call__(self, output_ids, logits):
        self.calls.append(len(output_ids))
        self.state = (3 * self.state + (output_ids[-1] if output_ids else 0) + 1) % 101
        logits[[self.state % VOCAB, self.state // 7 % VOCAB]] = -torch.inf
        return logits


class ByRequest(AdapterLogitsProcessor):
    """An automaton for each request."""

    def __init__(self):
        super().__init__(None, torch.device("cpu"), False)

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        return Automaton()

    def calls(self, request):
        return self.req_info[request].func.calls


class WholeBatch(LogitsProcessor):
    """An automaton for each row of a batch."""

    def __init__(self):
        self.rows = []

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        for _, _, _, output in batch_update.added if batch_update else ():
            self.rows.append((Automaton(), output))

    def apply(self, logits):
        assert len(logits) == len(self.rows)
        for (automaton, output), row in zip(self.rows, logits, strict=True):
            automaton(output, row)
        return logits

    def calls(self, request):
        return self.rows[request][0].calls


class Mixed(ByRequest):
    """An adapter with its own ``apply`` counts as a processor for the whole batch."""

    def apply(self, logits):
        return super().apply(logits)


KINDS = [ByRequest, WholeBatch, Mixed]


def with_processor(metadata, processor):
    metadata.logitsprocs = LogitsProcessors([*metadata.logitsprocs.all, processor])
    return metadata


def started(kind, requests):
    """A processor that knows these requests."""
    processor = kind()
    added = [(row, None, request.prompt, request.output) for row, request in enumerate(requests)]
    processor.update_state(BatchUpdate(batch_size=len(requests), removed=[], added=added, moved=[]))
    return processor


def plain(sampler, model, request, kind, count):
    """Decode the request alone, token by token."""
    request = copy.deepcopy(request)
    generator, processor, tokens = request.generator(), started(kind, [request]), []
    for _ in range(count):
        metadata = with_processor(metadata_of([request], [generator]), processor)
        sampled = sampler(logits=model.logits(request, tokens).unsqueeze(0), sampling_metadata=metadata)
        tokens.append(int(sampled.sampled_token_ids[0, 0]))
        request.output.append(tokens[-1])
    return tokens


def walked(sampler, model, requests, trees, kind, params=()):
    """Tokens of each request, places, and the processor."""
    logits, rows = lay_out(model, requests, trees)
    processor = started(kind, requests)
    metadata = with_processor(metadata_of(requests, [request.generator() for request in requests]), processor)
    stateful = any(request.min_tokens or request.min_p or request.bias for request in requests)
    outputs = [request.output for request in requests]
    output, paths = walk(sampler, logits, metadata, rows, outputs, stateful, params)
    return [[t for t in line if t != PLACEHOLDER] for line in output.sampled_token_ids.tolist()], paths.last, processor


@pytest.mark.parametrize("what", ["sampling", "everything"])
@pytest.mark.parametrize("kind", KINDS)
def test_asked_once_for_every_token(sampler, kind, what):
    lengths, of_mixed_length = [], 0
    for seed in SEEDS[:12]:
        model, requests, trees = random_batch(seed, sampling, *PARAMETERS[what])
        emitted, places, processor = walked(sampler, model, requests, trees, kind)
        for number, (request, tree, tokens) in enumerate(zip(requests, trees, emitted, strict=True)):
            start = len(request.output)
            assert processor.calls(number) == list(range(start, start + len(tokens)))
            assert list(tree.path(places[number])) == tokens[:-1]
            if request.greedy or request.seed is not None:
                assert tokens == plain(sampler, model, request, kind, len(tokens))
        lengths += map(len, emitted)
        of_mixed_length += len({*map(len, emitted)}) > 1
    assert max(lengths) >= 2
    assert (of_mixed_length > 0) == (kind is ByRequest)  # the other kinds end all walks of a batch together


def test_walks_of_four_tokens_and_of_one(sampler):
    model = Model(3)
    long, short = Request(0, prompt=[1]), Request(1, prompt=[2])
    for kind in KINDS:
        path = plain(sampler, model, long, kind, 4)
        tree = Tree([(place, token) for place, token in enumerate(path[:3])])
        emitted, places, processor = walked(sampler, model, [long, short], [tree, Tree()], kind)
        expected = [4, 1] if kind is ByRequest else [1, 1]
        assert [len(processor.calls(request)) for request in (0, 1)] == [*map(len, emitted)] == expected
        assert places.tolist() == [expected[0] - 1, 0]
        alone, _, processor = walked(sampler, model, [long], [tree], kind)
        assert alone == [path] and processor.calls(0) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_not_asked_about_what_follows_the_end_of_a_text(sampler, kind):
    model, request = Model(3), Request(0, prompt=[1])
    path = plain(sampler, model, request, kind, 4)
    tree = Tree([(place, token) for place, token in enumerate(path[:3])])
    end = next(i for i, token in enumerate(path) if token not in path[:i] and i > 0)
    emitted, places, processor = walked(
        sampler, model, [request], [tree], kind, [SamplingParams(stop_token_ids=[path[end]])]
    )
    assert emitted == [path[: end + 1]]
    assert places.tolist() == [end]
    assert processor.calls(0) == list(range(end + 1))


def test_a_processor_that_nobody_asked_for_changes_nothing(sampler):
    class Unused(ByRequest):
        def new_req_logits_processor(self, params):
            return None

    model, requests, trees = random_batch(4)
    emitted, places, _ = walked(sampler, model, requests, trees, Unused)
    logits, rows = lay_out(model, requests, trees)
    outputs = [request.output for request in requests]
    output, paths = walk(sampler, logits, metadata_of(requests, [None] * len(requests)), rows, outputs, False)
    assert [[t for t in line if t != PLACEHOLDER] for line in output.sampled_token_ids.tolist()] == emitted
    assert np.array_equal(places, paths.last)


@pytest.mark.parametrize("count", range(4))
def test_a_minimum_length_that_is_reached_asks_for_no_processor(count):
    """All rows of a batch are sampled for a built-in processor only where it changes logits."""
    output = [5] * count
    logits = torch.zeros(1, VOCAB)
    for processor in metadata_of([Request(0, min_tokens=2, stop=[1], output=output)], [None]).logitsprocs.all:
        logits = processor.apply(logits)
    params = SamplingParams(min_tokens=2, stop_token_ids=[1], max_tokens=9)
    record = SimpleNamespace(sampling_params=params, output_token_ids=output)
    assert _has_processor(record) == (count < 2) == bool(logits.isinf().any())


def test_whole_batch_processors_are_told_of(monkeypatch):
    warnings = []
    monkeypatch.setattr(processors.logger, "warning", lambda text, *names: warnings.append(text % names))
    processors.tell_of_processors(LogitsProcessors([ByRequest(), WholeBatch()]))
    assert len(warnings) == 1 and warnings[0].startswith("The logits processor WholeBatch sees all requests of a batch")
