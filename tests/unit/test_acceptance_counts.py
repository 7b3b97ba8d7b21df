"""vLLM's acceptance counters count by depth, whenever the worker learns which graphs were verified."""

from collections import Counter
from types import SimpleNamespace

from vllm_gsd.engine.observe.stats import GraphStats
from vllm_gsd.engine.schedule.scheduler import GraphScheduling


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
