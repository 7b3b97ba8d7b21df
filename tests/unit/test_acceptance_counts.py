"""vLLM's acceptance counters count by depth, whenever the worker learns which graphs were verified.

Our counter of fallbacks counts a request once. What is kept of a request survives the chunks of its session.
"""

import itertools
from collections import Counter
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.outputs import ModelRunnerOutput

from vllm_gsd.engine.observe.recorder import Recorder
from vllm_gsd.engine.observe.stats import GraphStats
from vllm_gsd.engine.schedule.scheduler import GraphAsyncScheduler, GraphScheduling
from vllm_gsd.engine.speculation import Speculation
from vllm_gsd.engine.v2.speculator import GraphSpeculator
from vllm_gsd.upstream import wire


def test_graphs_are_counted_by_depth():
    """Two graphs of one request may arrive with one output, as on GPUs. Each counts with its own depth."""
    stats = GraphStats()
    stats.verified.update([(3, 8, 2), (1, 2, 1), (3, 8, 2)])
    scheduler = SimpleNamespace(num_spec_tokens=8)
    counts = GraphScheduling._acceptance(scheduler, stats.take()["verified"])
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (3, 18, 5)
    assert counts.num_accepted_tokens_per_pos == [3, 2, 0, 0, 0, 0, 0, 0]
    assert counts.num_draft_tokens_per_pos == [3, 2, 2, 0, 0, 0, 0, 0]
    assert stats.verified == Counter()


def test_steps_without_graphs_count_nothing():
    assert GraphScheduling._acceptance(SimpleNamespace(num_spec_tokens=8), GraphStats().take()["verified"]) is None


def test_a_step_for_a_request_that_has_ended_is_not_counted(monkeypatch):
    """The scheduler learns with the output of a step that a request ended, when its next step is under way."""
    monkeypatch.setattr(GraphScheduling, "update_from_output", lambda *_: {})
    scheduler = GraphAsyncScheduler.__new__(GraphAsyncScheduler)
    scheduler.requests, scheduler.unneeded = {"runs": None}, 0
    reported = []
    # The worker counts a step when its results have reached the host, which may be with the output of a later one.
    for counts in {}, {"target_steps": 1, "nodes_verified": 9}, {"target_steps": 4}:
        output = ModelRunnerOutput(["runs", "ended", "in its prompt"], {"runs": 0, "ended": 1, "in its prompt": 2})
        output.sampled_token_ids = [[7], [8, 9], []]
        wire.attach(output, wire.STATS, {"counts": counts, "planned": 3})
        assert scheduler.update_from_output(None, output) == {}
        reported.append(counts)
    assert scheduler.update_from_output(None, ModelRunnerOutput(["ended"], {"ended": 0})) == {}  # nothing was sampled
    assert reported == [{}, {"target_steps": 0, "nodes_verified": 9}, {"target_steps": 2}] and scheduler.unneeded == 0


JSON = {"structured_outputs": StructuredOutputsParams(json_object=True)}
OPTING_OUT = {"extra_args": {"gsd": False}}
LENGTHS = itertools.count(1)  # the prompt of a session's chunk holds the text so far


@pytest.fixture
def speculation():
    speculation = Speculation.__new__(Speculation)
    speculation.config, speculation.trees, speculation.grammar_trees = SimpleNamespace(trace=None), {}, {}
    speculation.stats, speculation.admitted, speculation.max_model_len = GraphStats(), {}, 512
    speculation.recorder = Recorder(None, None, None, speculation.stats)
    return speculation


def chunk_of_session(**params) -> NewRequestData:
    params = SamplingParams(**{"max_tokens": 3, **params})
    prompt = [7] * next(LENGTHS)
    return NewRequestData("a", prompt, [], params, None, ([],), 0, None, prefill_token_ids=[7])


def test_a_session_of_streaming_input_is_one_request(speculation):
    """Its first chunk uses graphs; all others opt out, and the last one requests more tokens."""
    chunks = [chunk_of_session(), *(chunk_of_session(max_tokens=most, **OPTING_OUT) for most in (3, 3, 9))]
    assert speculation.uses_graph(chunks[0])
    for chunk in chunks[1:]:
        speculation.admit(chunk)
        assert not speculation.uses_graph(chunk)
    assert speculation.stats.fallbacks == {"opt_out": 1} and speculation.admitted == {"a": (False, False, 9)}


SESSIONS = [
    (({}, JSON, {}), False),
    ((JSON, {"seed": 1}), True),
    ((JSON, JSON), True),
    (({**JSON, **OPTING_OUT}, {}), True),
]


@pytest.mark.parametrize(("chunks", "grammar"), SESSIONS)
def test_a_session_of_streaming_input_keeps_the_grammar_of_its_first_chunk(speculation, chunks, grammar):
    """As vLLM's scheduler does: it would look in vain for the grammar that a later chunk names."""
    for chunk in chunks:
        speculation.admit(chunk_of_session(**chunk))
        assert speculation.admitted["a"][1] == grammar


@pytest.mark.parametrize(("chunks", "grammar"), SESSIONS)
def test_v2_keeps_that_grammar_too(speculation, chunks, grammar):
    """The worker's own copy of it follows the first chunk only, since the text of the others begins anew."""
    speculator = GraphSpeculator.__new__(GraphSpeculator)
    vars(speculator).update({name: MagicMock() for name in ("vllm_config", "proposals", "plan", "texts", "tenants")})
    speculator.speculation, speculator.requests, speculator.slots, speculator.grammars = speculation, {}, {}, None
    speculator.plain, speculator.ends = [True], [0]
    with patch("vllm_gsd.engine.v2.speculator.WorkerGrammars") as grammars:
        for chunk in chunks:
            request = chunk_of_session(**chunk)
            speculator.admit(request, 0)
            assert speculator._grows_on_host(request) == grammar
            grammars.return_value.admit.side_effect = AssertionError
    assert grammars.return_value.admit.called == (chunks[0] == JSON)
    assert grammars.return_value.forget.called == grammar
