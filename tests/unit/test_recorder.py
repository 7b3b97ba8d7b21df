"""Records of traced steps, with graphs built by hand, and the size-limited file for them."""

import json
import os
import stat
from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RepetitionDetectionParams

from vllm_gsd.config import GSDConfig, GSDConfigError
from vllm_gsd.engine.observe import trace_file
from vllm_gsd.engine.observe.metrics import COUNTERS
from vllm_gsd.engine.observe.recorder import Recorder, _Traced
from vllm_gsd.engine.observe.step_record import MOST_PRUNED, SOURCES, Step
from vllm_gsd.engine.observe.trace_file import TraceFile
from vllm_gsd.engine.verify.draft_tree import FlatTree, flat_tree
from vllm_gsd.engine.verify.step import lay_out
from vllm_gsd.host import add_lattices, flatten
from vllm_gsd.method.constants import NUM_BINS, NUM_DEPTHS, NUM_SOURCES, ORIGIN_DRAFT, ORIGIN_SHARED
from vllm_gsd.method.graph import add_child, new_graphs, reset
from vllm_gsd.tools.inspect.summary import KINDS
from vllm_gsd.upstream import wire

WITHOUT_TEXT = None


def test_every_source_has_a_metric_and_a_kind():
    assert [f"nodes_accepted_{name}" for name in SOURCES] == [name for name in COUNTERS if "accepted" in name]
    assert KINDS.keys() == {"target", *SOURCES}


def text(before: int, token: int) -> str:
    return f"{before}>{token}"


def grown(children):
    """A graph with root 7 and nodes ``(parent, token, prob, origin)``; a fifth item is the target of a merged edge."""
    graphs = new_graphs(1, 16)
    reset(graphs, 0, np.array([5, 7]))
    for parent, token, prob, origin, *merged in children:
        node = add_child(graphs, 0, parent, token, np.float32(prob), origin)
        graphs.merged[0, node] = merged[0] if merged else -1
    return graphs


def verified(graphs, num_nodes: int, place: int, select=None) -> Step:
    """A step that drafted this graph, verified its ``num_nodes`` best places and accepted the path to row ``place``."""
    factor, trust = np.ones((NUM_SOURCES, NUM_DEPTHS, NUM_BINS), np.float32), np.ones((1, NUM_SOURCES), np.float32)
    trees = flatten(graphs, np.array([8], np.int32), np.array([4], np.int32), factor, trust)
    step = Step()
    step.drafted(graphs, 0, trees.node[0, 1 : 1 + trees.size[0]])
    tree: FlatTree = flat_tree(trees, 0, num_nodes)
    tree = tree if select is None else tree.select(select)
    rows = len(tree.token)
    step.verified(lay_out([tree], np.array([rows]), np.array([rows])), 0, place)
    return step


def test_what_became_of_nodes():
    """Merged edge 4 continues as node 1, so token 12 has one node and two rows. The second row is accepted."""
    graphs = grown(
        [(0, 11, 0.6, ORIGIN_DRAFT), (0, 13, 0.4, ORIGIN_DRAFT), (1, 12, 0.9, ORIGIN_DRAFT),
         (2, 11, 0.8, ORIGIN_DRAFT, 1), (0, 14, 0.01, ORIGIN_DRAFT)]
    )  # fmt: skip
    step = verified(graphs, 5, place=5)
    candidates = np.array([[15, 12, 16, -1]]), np.array([[0.05, 0.04, 0.03, 0.0]], np.float32)
    step.ran([1], *candidates)
    record = step.record([13, 11, 12, 99], ["a", "b", "c", "d"], text)
    assert record["tokens"] == {
        "token": [13, 11, 12, 99],
        "text": ["a", "b", "c", "d"],
        "node": [2, 4, 3, -1],
        "source": ["native", "merged", "merged", "target"],
    }
    graph = record["graph"]
    assert graph["state"] == ["accepted", "verified", "accepted", "accepted", "accepted", "cut", "pruned", "pruned"]
    assert graph["token"] == [7, 11, 13, 12, 11, 14, 15, 16]
    assert graph["text"][:4] == ["-1>7", "7>11", "7>13", "11>12"]
    assert graph["merged"] == [-1, -1, -1, -1, 1, -1, -1, -1]
    assert graph["survival"][3] == pytest.approx(0.54, rel=1e-3)
    assert record["pruned"] == 2
    assert record["verified"] == {
        "node": [1, 3, 2, 4, 3],
        "parent": [-1, 0, -1, 2, 3],
        "source": ["native", "native", "native", "merged", "merged"],
        "accepted": [False, False, True, True, True],
    }
    json.dumps(record)


def test_copies_from_others_are_blank_unless_chosen():
    graphs = grown([(0, 21, 0.9, ORIGIN_SHARED), (1, 22, 0.8, ORIGIN_SHARED), (0, 23, 0.1, ORIGIN_DRAFT)])
    record = verified(graphs, 3, place=1).record([21, 30], ["a", "b"], text)
    assert record["graph"]["token"] == [7, 21, None, 23]
    assert record["graph"]["text"][2] == ""
    assert "22" not in json.dumps({**record, "numbers": 0})


def test_copies_raise_the_survival_of_what_follows():
    """``agree`` changes only a node's own probability."""
    graphs = grown([(0, 11, 0.5, ORIGIN_DRAFT), (1, 12, 0.5, ORIGIN_DRAFT)])
    graphs.prob[0, 1] = 0.8
    record = verified(graphs, 1, 0).record([9], ["x"], text)
    assert record["graph"]["survival"] == [1, 0.8, 0.4]


def test_nodes_that_a_grammar_added():
    from vllm_gsd.engine.schedule.grammar import GrammarTree

    graphs = grown([(0, 31, 0.9, ORIGIN_DRAFT)])
    kept = GrammarTree([7, 31, 32], [[], [31], [31, 32]], [0, 1, -1])
    record = verified(graphs, 1, 2, kept).record([31, 32, 33], ["", "", ""], text)
    assert record["tokens"]["source"] == ["native", "grammar", "target"]
    assert record["graph"]["origin"] == ["root", "draft", "grammar"]
    assert record["graph"]["state"] == ["accepted"] * 3


def test_a_step_without_a_graph():
    record = Step().record([4], ["x"], text)
    assert record["tokens"]["source"] == ["target"]
    assert record["verified"] == {"node": [], "parent": [], "source": [], "accepted": []}
    assert record["graph"]["token"] == []


def test_pruned_candidates_are_bounded():
    step, graphs = Step(), grown([(0, 11, 0.6, ORIGIN_DRAFT)])
    step.drafted(graphs, 0, np.array([1]))
    step.ran([0] * 10, np.arange(100, 200).reshape(10, 10), np.full((10, 10), 0.01, np.float32))
    record = step.record([11], ["x"], text)
    assert record["pruned"] == 100
    assert record["graph"]["state"].count("pruned") == MOST_PRUNED


def test_candidates_of_a_block_that_became_no_node():
    graphs, traced = new_graphs(2, 32), SimpleNamespace(step=Step())
    for row in range(2):
        reset(graphs, row, np.array([5, 7]))
    tokens = np.array([[[11, 12], [21, 22], [31, 32]]])
    probs = np.float32([[[[0.6, 0.01], [0.6, 0.01]], [[0.7, 0.2], [0.1, 0.0]], [[0.5, 0.3], [0.0, 0.9]]]])
    drafted = np.array([False, True])
    limits = np.full(2, 8, np.int32), np.array([3, 2], np.int32)
    add_lattices(graphs, drafted, tokens, probs, *limits, 0.1, 0.0)
    recorder = Recorder.__new__(Recorder)
    recorder.growing = [(0, None), (1, traced)]
    recorder.block(graphs, drafted, tokens, probs)
    traced.step.drafted(graphs, 1, np.arange(1, graphs.size[1]))
    found = {(node.token, traced.step.nodes[node.parent].token) for node in traced.step._pruned()}
    assert found == {(12, 7), (31, 21), (32, 21), (32, 22)}  # too weak, and below the deepest level


def test_the_answer_ends_at_a_stop_token():
    traced = _Traced("one", [1, 2], SamplingParams(stop_token_ids=[9], max_tokens=None))
    records = [traced.end_step(tokens, 2, WITHOUT_TEXT, text) for tokens in ([5], [6, 9, 7])]
    assert [record["tokens"]["text"] for record in records] == [["#5"], ["#6", "#9"]]
    assert [record["step"] for record in records] == [1, 2]
    assert traced.num_outputs == 4 and traced.ended


def test_the_answer_ends_at_max_tokens():
    traced = _Traced("one", [1], SamplingParams(max_tokens=3))
    assert traced.end_step([5, 6], 1, WITHOUT_TEXT, text)["tokens"]["token"] == [5, 6]
    assert not traced.ended
    assert traced.end_step([7, 8], 3, WITHOUT_TEXT, text)["tokens"]["token"] == [7]
    assert traced.ended


def test_the_answer_ends_where_it_repeats_itself():
    repetition = RepetitionDetectionParams(max_pattern_size=2, min_count=2)
    traced = _Traced("one", [1], SamplingParams(repetition_detection=repetition, min_tokens=4, max_tokens=None))
    records = [traced.end_step(tokens, 1, WITHOUT_TEXT, text) for tokens in ([5, 5], [6, 5, 6, 7])]
    assert [record["tokens"]["token"] for record in records] == [[5, 5], [6, 5, 6]]
    assert traced.num_outputs == 6 and traced.ended


def test_chunks_of_a_session_are_recorded_if_they_ask(tmp_path):
    recorder = Recorder.__new__(Recorder)
    recorder.file, recorder.traced, recorder.batch = TraceFile(str(tmp_path / "trace.jsonl")), {}, []
    recorder.config = GSDConfig(method="gsd", model=None)
    recorder.model_config = SimpleNamespace(model="target", skip_tokenizer_init=True)
    followed = []
    for asks in (True, True, False, True):
        params = SamplingParams(extra_args={"gsd_trace": asks})
        recorder.admit("a", SimpleNamespace(sampling_params=params, prompt_token_ids=[1, 2]))
        followed.append(recorder.traced.get("a"))
    assert [one is not None for one in followed] == [True, True, False, True]
    assert len((tmp_path / "trace.jsonl").read_text().splitlines()) == 3


def test_the_file_is_private_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "MOST_BYTES", 100)
    path = tmp_path / "trace.jsonl"
    files = [TraceFile(str(path)) for _ in range(2)]  # as two engines do
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for number in range(20):
        files[number % 2].append({"number": number})
    written = path.read_text().splitlines()
    assert [json.loads(line)["number"] for line in written] == list(range(len(written)))
    assert 80 < path.stat().st_size <= 100


def test_a_line_that_a_full_disk_has_cut_is_taken_back(tmp_path, monkeypatch):
    """Another engine may append to the file later."""
    path, write = tmp_path / "trace.jsonl", os.write
    file = TraceFile(str(path))
    file.append({"number": 1})
    monkeypatch.setattr(trace_file.os, "write", lambda opened, line: write(opened, line[:5]))
    file.append({"number": 2})
    monkeypatch.undo()
    file.append({"number": 3})  # it is full
    TraceFile(str(path)).append({"number": 4})
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [1, 4]


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(GSDConfigError, match=r'"trace" is ".*", but that file cannot be written'):
        TraceFile(str(tmp_path / "missing" / "trace.jsonl"))


@pytest.mark.parametrize(
    ("given", "allowed", "sentence"),
    [
        (None, False, None),
        (0, False, None),
        (True, True, None),
        (1, True, None),
        (True, False, 'this server allows no traces; name a file as "trace"'),
        ("yes", True, "must be true or false"),
        (2, True, "must be true or false"),
    ],
)
def test_requests_that_ask(given, allowed, sentence):
    params = SimpleNamespace(extra_args=None if given is None else {"gsd_trace": given})
    engine = SimpleNamespace(speculative_config=SimpleNamespace())
    wire.allow_traces(engine, SimpleNamespace(trace="file" if allowed else None))
    if sentence is None:
        wire.check_request(params, engine.speculative_config)
        assert wire.asks_for_trace(params) == bool(given)
        return
    with pytest.raises(VLLMValidationError, match=sentence):
        wire.check_request(params, engine.speculative_config)


@pytest.mark.parametrize(("given", "out"), [(None, False), (True, False), (1, False), (False, True), (0, True)])
def test_requests_that_opt_out(given, out):
    params = SimpleNamespace(extra_args=None if given is None else {"gsd": given})
    wire.check_request(params, SimpleNamespace())
    assert wire.opts_out(params) == out


@pytest.mark.parametrize("given", ["false", 2, None])
def test_requests_that_opt_out_by_a_wrong_value(given):
    with pytest.raises(VLLMValidationError, match=f'"gsd" is {given!r}, but must be true or false'):
        wire.check_request(SimpleNamespace(extra_args={"gsd": given}), SimpleNamespace())
