"""The planner knows from the first step on how many rows a drafted block has."""

import numpy as np
import pytest

from vllm_gsd.planner.costs import Costs
from vllm_gsd.planner.planner import Planner

ROWS = np.array([1, 8, 64, 512])
# Rows are cheap for the target and dear for the draft.
COSTS = Costs(ROWS, 10.0 + 0.01 * ROWS, 1.0 + 0.5 * ROWS, attention=0.0)


def planner_of(rows):
    planner = Planner(4, 2, 16, COSTS, rows)
    planner.begin(8, 800)
    return planner


def test_a_block_is_dearer_than_a_level():
    assert planner_of(1).wants_drafts(8, np.zeros(0))
    assert not planner_of(16).wants_drafts(8, np.zeros(0))


def test_all_rows_of_a_block_count_however_few_levels_there_are():
    planner = planner_of(16)
    planner.caught_up(8 * 16)
    planner.drafted(np.full((8, 4), 0.3))
    assert planner.forwards_ms() == pytest.approx(COSTS.draft_ms(8 * 16))
    planner.forget()
    assert planner.levels[0] == 16
