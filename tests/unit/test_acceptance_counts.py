"""vLLM's acceptance counters count by depth, whenever the worker learns which graphs were verified.

Our counter of fallbacks counts a request once. What is kept of a request survives the chunks of its session.
"""

from collections import Counter
from types import SimpleNamespace

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.outputs import ModelRunnerOutput

from vllm_gsd.engine.observe.recorder import Recorder
from vllm_gsd.engine.observe.stats import GraphStats
from vllm_gsd.engine.schedule.scheduler import GraphAsyncScheduler, GraphScheduling
from vllm_gsd.engine.speculation import Speculation
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
        wire.attach(output, wire.STATS, {"counts": counts})
        assert scheduler.update_from_output(None, output) == {}
        reported.append(counts)
    assert scheduler.update_from_output(None, ModelRunnerOutput(["ended"], {"ended": 0})) == {}  # nothing was sampled
    assert reported == [{}, {"target_steps": 0, "nodes_verified": 9}, {"target_steps": 2}] and scheduler.unneeded == 0


def test_a_session_of_streaming_input_is_one_request():
    """Its first chunk uses graphs; all others opt out, and the last one requests more tokens."""
    speculation = Speculation.__new__(Speculation)
    speculation.stats, speculation.admitted = GraphStats(), {}
    speculation.recorder = Recorder(None, None, None, speculation.stats)
    chunks = [SimpleNamespace(req_id="a", sampling_params=SamplingParams(max_tokens=3))]
    for most in (3, 3, 9):
        params = SamplingParams(max_tokens=most, extra_args={"gsd": False})
        chunks.append(SimpleNamespace(req_id="a", sampling_params=params))
    assert speculation.uses_graph(chunks[0])
    for chunk in chunks[1:]:
        speculation.admit(chunk)
        assert not speculation.uses_graph(chunk)
    assert speculation.stats.fallbacks == {"opt_out": 1} and speculation.admitted == {"a": (False, False, 9)}


def test_a_session_of_streaming_input_keeps_the_grammar_of_its_first_chunk():
    """As vLLM's scheduler does: it would look in vain for the grammar that a later chunk names."""
    json, opting_out = {"structured_outputs": StructuredOutputsParams(json_object=True)}, {"extra_args": {"gsd": False}}
    for chunks, grammar in (({}, json, {}), False), ((json, {}), True), (({**json, **opting_out}, {}), True):
        speculation = Speculation.__new__(Speculation)
        speculation.stats, speculation.admitted = GraphStats(), {}
        speculation.recorder = Recorder(None, None, None, speculation.stats)
        for chunk in chunks:
            speculation.admit(SimpleNamespace(req_id="a", sampling_params=SamplingParams(max_tokens=3, **chunk)))
            assert speculation.admitted["a"][1] == grammar
