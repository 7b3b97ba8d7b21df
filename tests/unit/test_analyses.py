"""The analyses of ``vllm-gsd bench``, without engines."""

from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from vllm_gsd.config import GSDConfig
from vllm_gsd.tools.bench import analyses


@dataclass(frozen=True)
class FakeWork:
    """The work of a bench run, with jobs that have only a concurrency."""

    batch_sizes: list[int]

    def job(self, concurrency):
        return {"concurrency": concurrency}


def fake_result(config, blocks):
    """A job's result: without merging, fewer tokens are accepted, and a draft by level drafts twice as many rows."""
    accepted = 80 if config["merge_ngram"] else 60
    rows = 8 if blocks else config["num_speculative_tokens"] * (1 if config["merge_ngram"] else 2)
    steps = 100 - accepted
    counters = {
        "vllm:spec_decode_num_accepted_tokens": accepted,
        "vllm:gsd_nodes_verified": config["num_speculative_tokens"] * steps,
        "vllm:gsd_draft_rows": rows * steps,
        "vllm:gsd_draft_forwards": steps * (1 if blocks else 4),
        "vllm:gsd_nodes_added": 200,
        "vllm:gsd_nodes_merged": 50 if config["merge_ngram"] else 0,
        "vllm:gsd_nodes_accepted_merged": 20 if config["merge_ngram"] else 0,
    }
    return {"counters": counters, "requests": [{"tokens": 100, "steps": steps, "latency": 1.0}]}


@pytest.mark.parametrize("blocks", [True, False], ids=["a block", "levels"])
def test_analyses(monkeypatch, blocks):
    """For block drafts, only two values of merge_ngram are tried, because drafting costs the same for all."""
    ran, ticks = [], []

    @contextmanager
    def running(setting, work):
        ran.append(setting.speculative)
        config = {"num_speculative_tokens": 16, **setting.speculative}
        yield SimpleNamespace(run=lambda job: fake_result(config, blocks))

    monkeypatch.setattr(analyses, "running", running)
    monkeypatch.setattr(analyses, "tokens_per_second", lambda result: 1.0)
    monkeypatch.setattr(analyses, "kind_of_model", lambda model: "dspark" if blocks else "draft_model")
    report = analyses.analyse("draft", {}, False, FakeWork([1, 8]), ticks.append)
    assert len(ticks) == analyses.num_runs("draft") > len(ran) == len({str(sorted(config.items())) for config in ran})
    assert {config["budget"] for config in ran} == {8, 16, 32} and all(c["sources"] == ["draft"] for c in ran)
    assert [row["value"] for row in report["ablations"]["max_depth"]] == [1, 2, 3, 4, 6, 8]
    merges = report["ablations"]["merge_ngram"]
    assert [row["value"] for row in merges] == ([0, 1] if blocks else [0, 1, 2, 3, 4])
    assert [row["merged_share"] for row in merges[:2]] == [0, 0.25]
    assert [row["accepted_merged_share"] for row in merges[:2]] == [0, 0.25]
    assert report["recurring_ngrams"] == ({} if blocks else dict.fromkeys("1234", 0.25))
    graph = report["forms"]["gsd"][1]
    assert graph["nodes"] == 16 and graph["tokens_per_step"] == 5
    assert graph["tokens_per_draft_forward"] == (5 if blocks else 1.25)
    assert graph["draft_rows_per_step"] == (8 if blocks else 16)
    assert graph["drafted_per_accepted"] == (2 if blocks else 4)
    assert all(row["at_equal_nodes"] == pytest.approx(2) for row in report["graph_over_tree"])
    assert all(row["at_equal_cost"] == pytest.approx(2) for row in report["graph_over_tree"])


def test_analyses_with_a_preset_take_its_thresholds(monkeypatch):
    ran = []

    @contextmanager
    def running(setting, work):
        ran.append(GSDConfig.load(setting.speculative))
        config = {"num_speculative_tokens": 16, "merge_ngram": 2, **setting.speculative}
        yield SimpleNamespace(run=lambda job: fake_result(config, False))

    monkeypatch.setattr(analyses, "running", running)
    monkeypatch.setattr(analyses, "tokens_per_second", lambda result: 1.0)
    monkeypatch.setattr(analyses, "kind_of_model", lambda model: "draft_model")
    analyses.analyse("draft", {"preset": "paper"}, False, FakeWork([1]), lambda _: None)
    assert {config.theta_prob for config in ran[:6]} == {0.2} and {config.theta_sib for config in ran[:6]} == {0.3}


def form_row(nodes, verified, cost):
    return {
        "nodes": nodes,
        "verified_per_step": verified,
        "tokens_per_step": 1 + 0.1 * verified,
        "draft_rows_per_step": cost,
    }


def test_a_tree_that_costs_as_much_has_fewer_nodes():
    graph, tree = ([form_row(n, n, cost * n) for n in (8, 16)] for cost in (1.0, 1.6))
    small, large = analyses._graph_over_tree(graph, tree)
    assert small == {"nodes": 8, "at_equal_nodes": 1, "at_equal_cost": 1}  # no tree is as cheap as this graph
    assert large["at_equal_cost"] == pytest.approx(2.6 / 2.0)  # the graph costs as much as a tree of ten nodes


def test_blocks_of_equal_nodes_cost_the_same():
    """The rows per step differ a little, because some steps draft nothing, and a small tree may leave places empty."""
    graph = [form_row(8, 8.0, 5.70), form_row(16, 15.0, 5.71)]
    tree = [form_row(8, 6.0, 5.72), form_row(16, 12.0, 5.69)]
    small, large = analyses._graph_over_tree(graph, tree)
    assert small["at_equal_nodes"] == small["at_equal_cost"] == pytest.approx(1)
    assert large["at_equal_nodes"] == large["at_equal_cost"] == pytest.approx(2.5 / 2.2)
