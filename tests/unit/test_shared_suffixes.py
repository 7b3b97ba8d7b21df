"""The index of finished responses: what it finds, what it forgets, and which requests may read what."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams

from vllm_gsd.config import GSDConfig, GSDConfigError
from vllm_gsd.method.constants import MATCH_PROB, ORIGIN_SHARED
from vllm_gsd.method.graph import new_graphs, reset
from vllm_gsd.method.ngram import graft_tree
from vllm_gsd.tools.bench.engine import forget_responses

pytest.importorskip("arctic_inference", reason="arctic-inference was not built by scripts/setup")
from vllm_gsd.engine.draft.shared_suffixes import READER, SharedSuffixes
from vllm_gsd.engine.v1.proposer import GraphProposer
from vllm_gsd.engine.v2.speculator import GraphSpeculator


def lora(adapter):
    return adapter and SimpleNamespace(lora_int_id=1, lora_name=adapter, lora_path=f"/{adapter}")


def finish(shared, request_id, response, adapter=None, **params):
    record = SimpleNamespace(lora_request=lora(adapter), sampling_params=SamplingParams(**params))
    shared.finished(request_id, record, response)


def paths(graphs):
    """The token path to every node of a graph, with the node's survival."""
    survivals = {}
    for node in range(1, graphs.size[0]):
        path, above = [], node
        while above != 0:
            path.append(int(graphs.token[0, above]))
            above = graphs.parent[0, above]
        survivals[tuple(path[::-1])] = float(graphs.survival[0, node])
    return survivals


def grafted(shared, text, adapter=None):
    graphs = new_graphs(1, 64)
    reset(graphs, 0, np.array(text, np.int64))
    shared.graft(graphs, 0, "r", lora(adapter), np.array(text, np.int32), 16)
    assert (graphs.origin[0, 1 : graphs.size[0]] == ORIGIN_SHARED).all()
    return paths(graphs)


def test_finds_what_followed():
    shared = SharedSuffixes(10)
    finish(shared, "a", [1, 2, 3, 4, 5])
    finish(shared, "b", [9, 2, 3, 4, 6])
    found = grafted(shared, [7, 2, 3])
    assert set(found) == {(4,), (4, 5), (4, 6)}
    assert found[(4,)] == pytest.approx(MATCH_PROB[2])
    assert found[(4, 5)] == pytest.approx(MATCH_PROB[2] * MATCH_PROB[3] / 2)


def test_the_bench_drops_what_methods_remember():
    """Otherwise, a turn would copy the answers of the turn before it."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    shared, upstreams = SharedSuffixes(10), SuffixDecodingCache(8, 10)
    finish(shared, "a", [1, 2, 3, 4, 5])
    for request_id in ("ended", "running"):
        upstreams.start_request(request_id, [1, 2])
        upstreams.add_active_response(request_id, [1, 2, 3, 4, 5])
    upstreams.stop_request("ended")
    forget_responses(SimpleNamespace(drafter=SimpleNamespace(suffix_cache=upstreams)))
    forget_responses(SimpleNamespace(speculation=SimpleNamespace(copies=shared)))
    forget_responses(SimpleNamespace())
    forget_responses(None)
    assert not upstreams.cached_requests
    assert grafted(shared, [7, 2, 3]) == {}
    upstreams.add_active_response("running", [6])  # a running request continues
    finish(shared, "b", [2, 3, 8])
    assert set(grafted(shared, [7, 2, 3])) == {(8,)}


def test_finds_nothing_that_never_followed():
    shared = SharedSuffixes(10)
    finish(shared, "a", [1, 2, 3, 4, 5])
    assert grafted(shared, [7, 7, 7]) == {}
    assert grafted(shared, [7, 4, 5]) == {}


def test_empty_and_placeholder_tokens_are_not_kept():
    shared = SharedSuffixes(10)
    finish(shared, "a", [])
    finish(shared, "b", [-1, -1, 5])
    assert not shared.caches


def test_what_lies_behind_the_end_of_a_response_is_not_kept():
    """A walk may go on behind an end, and with async scheduling another step runs."""
    shared = SharedSuffixes(10)
    repetition = RepetitionDetectionParams(max_pattern_size=1, min_count=3)
    finish(shared, "stop", [1, 2, 3, 4, 5], stop_token_ids=[4])
    finish(shared, "length", [11, 12, 13, 14], max_tokens=3)
    finish(shared, "repetition", [21, 22, 22, 22, 23], repetition_detection=repetition)
    finish(shared, "no end", [31, 32, 33, 34])
    found = [set(grafted(shared, [7, first, first + 1])) for first in (1, 11, 21, 31)]
    assert found == [{(3,), (3, 4)}, {(13,)}, {(22,), (22, 22)}, {(33,), (33, 34)}]


def test_adapters_and_salts_are_kept_apart():
    shared = SharedSuffixes(10)
    shared.salts["a"] = "mine"
    finish(shared, "a", [1, 2, 3, 4])
    finish(shared, "b", [1, 2, 3, 5])
    finish(shared, "c", [1, 2, 3, 6], "tuned")
    assert set(grafted(shared, [1, 2, 3])) == {(5,)}
    assert set(grafted(shared, [1, 2, 3], adapter="tuned")) == {(6,)}
    assert grafted(shared, [1, 2, 3], adapter="other") == {}
    shared.salts["r"] = "mine"
    assert set(grafted(shared, [1, 2, 3])) == {(4,)}
    shared.salts["r"] = "yours"
    assert grafted(shared, [1, 2, 3]) == {}
    assert "a" not in shared.salts


def test_the_oldest_leave_first_over_all_readers():
    shared = SharedSuffixes(3)
    shared.salts["0"] = "mine"
    for number in range(6):
        finish(shared, str(number), [10 * number + i for i in range(5)])
    assert grafted(shared, [20, 21]) == {}
    assert set(grafted(shared, [30, 31])) == {(32,), (32, 33), (32, 33, 34)}
    assert len(shared.kept) == 3
    assert list(shared.caches) == [(None, None)]
    assert len(shared.caches[None, None].cached_requests) == 4  # with the reader
    assert READER in shared.caches[None, None].active_requests


def test_a_full_graph_takes_what_fits():
    graphs = new_graphs(1, 3)
    reset(graphs, 0, np.array([1], np.int64))
    tokens, parents = np.array([1, 2, 3, 4, 5], np.int64), np.array([-1, 0, 1, 2, 0], np.int32)
    graft_tree(graphs, 0, tokens, parents, np.array([1.0, 0.5, 0.5, 0.5, 0.5], np.float32), 2, ORIGIN_SHARED)
    assert set(paths(graphs)) == {(2,), (2, 3)}


def test_refused_without_the_package(monkeypatch):
    keys = {"method": "gsd", "model": None, "sources": ["ngram", "shared"]}
    assert GSDConfig.load(keys).shared_responses == 1000
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GSDConfigError, match="arctic-inference"):
        GSDConfig.load(keys)


def test_ranks_store_responses_in_one_order():
    """The requests that end in a step are given as a set, whose order differs between processes."""
    stored: list[str] = []
    shared = SimpleNamespace(finished=lambda request_id, *_: stored.append(request_id))
    speculation = SimpleNamespace(copies=SimpleNamespace(shared=shared), forget=lambda request_ids: None)
    record = SimpleNamespace(lora_request=None, output_token_ids=[1, 2])
    runner = SimpleNamespace(requests=dict.fromkeys("abc", record))
    GraphProposer.forget(SimpleNamespace(speculation=speculation, runner=runner), ["c", "a", "b"])
    assert stored == ["a", "b", "c"]
    stored.clear()
    v2 = SimpleNamespace(
        speculation=speculation,
        requests=dict.fromkeys("abc", record),
        slots={"a": 0, "b": 1, "c": 2},
        tenants=[0, 0, 0],
        parents={},
        grammars=None,
        learn=lambda wait: None,
        late=SimpleNamespace(in_step=True),
        texts=SimpleNamespace(output=lambda slot: [1, 2]),
    )
    GraphSpeculator.forget(v2, ["c", "a", "b"])
    assert stored == ["a", "b", "c"]
