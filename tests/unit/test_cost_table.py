"""The cost table that an engine measures at its start."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_gsd.engine.observe import measure
from vllm_gsd.planner.costs import Costs, rising


@pytest.mark.parametrize(("seconds", "calls"), [(0.001, 9), (0.04, 9), (0.2, 3)])
def test_what_takes_long_is_timed_less_often(monkeypatch, seconds, calls):
    """Otherwise the time for measuring is over after one or two numbers of rows."""
    now, seen = [0.0], []

    def run():
        seen.append(1)
        now[0] += seconds

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    assert measure.usual_ms([run, run], rows=8) == pytest.approx([1e3 * seconds] * 2)
    assert len(seen) == 2 * calls


def test_layers_with_windows_read_less_of_a_long_context(monkeypatch):
    """Three layers of four have a window. In each of them a long context takes as long as a short one."""
    layers = [
        SimpleNamespace(impl=SimpleNamespace(sliding_window=window), kv_cache=np.zeros((64, 1, 32, 1)))
        for window in (32, None, 32, 32)
    ]
    runner = SimpleNamespace(target_kv=SimpleNamespace(layers=layers), max_model_len=4096)
    monkeypatch.setattr(measure, "_attention", lambda layer, rows, context: (layer.impl.sliding_window, context))
    monkeypatch.setattr(
        measure, "usual_ms", lambda runs: [1.0 if window else context / 100 for window, context in runs]
    )
    assert measure._attention_ms(runner) == pytest.approx(0.01 / measure.TREE_SIZE)


def test_no_row_is_free_beyond_the_table():
    """The times of a mixture of experts may be level at the end of the table, by noise."""
    rows, times = np.array([1, 2, 4, 8, 16]), np.array([10.0, 11.0, 13.0, 18.0, 17.5])
    costs = Costs(rows, rising(rows, times), np.zeros(5), attention=0.0)
    assert costs.target_ms(16) == 17.5
    assert costs.target_ms(46) == pytest.approx(17.5 + 30 * 7.5 / 15)
