"""The draft reads a prompt only for an answer that is long enough to make up for it."""

import numpy as np
import pytest
import torch
from test_sources_off import NODES, new_speculation

from vllm_gsd.engine.draft.batch import DraftBatch
from vllm_gsd.engine.draft.kv_validity import DraftKVTracker
from vllm_gsd.planner.costs import Costs
from vllm_gsd.planner.planner import Planner

ROWS = np.array([1, 64, 512])
# A draft that takes a tenth of the target's time.
COSTS = Costs(ROWS, 10.0 + 0.1 * ROWS, 1.0 + 0.01 * ROWS, attention=0.0)
PROMPT = 4000


def planned(costs=COSTS, num_requests=1):
    planner = Planner(4, 6, 16, costs)
    planner.begin(num_requests, 100)
    return planner


def test_long_texts_need_long_answers():
    missed, left = np.array([PROMPT, PROMPT, 20, 0, 300]), np.array([3, 500, 1, 0, 3])
    assert planned().reading_pays(missed, left).tolist() == [False, True, True, True, True]


@pytest.mark.parametrize(
    "costs",
    [
        None,
        Costs(ROWS, 10.0 + 5.0 * ROWS, 50.0 + 0.01 * ROWS, attention=0.0),  # drafts do not pay, so only probes read
        Costs(ROWS, 10.0 + 0.1 * ROWS, np.tile(1.0 + 0.01 * ROWS, (6, 1)), attention=0.0),  # of V2, for whole batches
    ],
)
def test_nothing_is_known_of_the_cost_of_reading(costs):
    assert planned(costs).reading_pays(np.array([PROMPT]), np.array([2])).all()


class Reader:
    """A draft that has read nothing, and notes what it is told to read."""

    def missed(self, tracker, request_ids, length):
        return length

    def catch_up(self, batch, tracker, due, drafting):
        self.due = due.tolist()
        return np.zeros_like(drafting), None


@pytest.mark.parametrize("rest", [None, 0, 1000 * PROMPT])  # the whole prompt was read in one step, or a part of it
@pytest.mark.parametrize(
    ("most_tokens", "ended", "reads"), [(4, False, False), (1000, False, True), (1000, True, False)]
)
def test_prompts(rest, most_tokens, ended, reads):
    """A part of a prompt is read only if the answer makes up for the whole, and has not ended with its first token."""
    sampled, reads = rest is None, reads and not rest
    speculation = new_speculation()
    speculation.planner = Planner(4, 6, NODES, COSTS)
    speculation.drafter = reader = Reader()
    speculation.draft_kv, speculation.most_missed = DraftKVTracker(0, 1), 1 << 20
    speculation.admitted, speculation.max_model_len = {"a": (True, False, most_tokens)}, 10**7
    one, reader.due = np.ones(1, np.int64), [0]
    batch = DraftBatch(
        request_ids=["a"], requests=[None], whole=one * (PROMPT + (rest or 0)),
        num_outputs=one * sampled, sampled=np.array([sampled]),
        length=one * PROMPT, token_ids=np.arange(2 * PROMPT, dtype=np.int32)[None], token_rows=0 * one,
        block_table=torch.zeros((1, 1), dtype=torch.int32), num_blocks=one, block_size=16,
        ended=np.array([ended]),
    )  # fmt: skip
    speculation.propose(batch)
    assert reader.due == [PROMPT if reads else 0]
