"""A source that misleads is switched off, for a request or for all, and tried again later, also if it is the only."""

import numpy as np
import pytest
import torch

from vllm_gsd.config import GSDConfig
from vllm_gsd.engine.draft.batch import DraftBatch
from vllm_gsd.engine.draft.copies import Copies
from vllm_gsd.engine.draft.kv_validity import DraftKVTracker
from vllm_gsd.engine.observe.recorder import Recorder
from vllm_gsd.engine.observe.stats import GraphStats
from vllm_gsd.engine.speculation import Speculation
from vllm_gsd.engine.verify.draft_tree import Paths
from vllm_gsd.engine.verify.step import lay_out
from vllm_gsd.host import follow
from vllm_gsd.method.constants import NGRAM, OFF_BELOW, ORIGIN_DRAFT
from vllm_gsd.method.graph import add_child, new_graphs
from vllm_gsd.planner.calibration import SourceTrust
from vllm_gsd.planner.costs import Costs
from vllm_gsd.planner.planner import PROBE_EVERY, Planner

NODES = 8
CONFIG = GSDConfig(method="gsd", model=None, num_speculative_tokens=NODES)
COSTS = Costs(np.array([1, 8, 64]), np.array([20.0, 21.0, 77.0]), np.array([1.0, 1.2, 3.0]), attention=0.0)


def new_speculation() -> Speculation:
    speculation = Speculation.__new__(Speculation)
    speculation.config, speculation.stats, speculation.trust = CONFIG, GraphStats(), SourceTrust()
    speculation.planner = Planner(CONFIG.top_k, CONFIG.max_depth, NODES)
    speculation.copies, speculation.num_nodes, speculation.max_model_len = Copies(CONFIG, NODES), NODES, 10**6
    speculation.graphs = new_graphs(1, 200)
    speculation.trees, speculation.grammar_trees = {}, {}
    speculation.admitted = {"a": (True, False, 10**6)}
    speculation.drafter, speculation.draft_kv = None, DraftKVTracker(0, 1)
    speculation.recorder = Recorder(CONFIG, None, None, speculation.stats)
    return speculation


def step(speculation: Speculation, text: np.ndarray, length: int) -> int:
    """Propose for the first ``length`` tokens of a text and verify that it goes on as it does; returns the new length.

    Args:
        text: int32 [n].
        length: number of committed tokens.
    """
    one = np.ones(1, np.int64)
    batch = DraftBatch(
        request_ids=["a"],
        requests=[None],
        num_outputs=one,
        sampled=np.ones(1, np.bool_),
        length=one * length,
        whole=one * length,
        token_ids=text[None],
        token_rows=0 * one,
        block_table=torch.zeros((1, 1), dtype=torch.int32),
        num_blocks=one,
        block_size=16,
    )
    (tree,) = speculation.propose(batch)
    verified = lay_out([tree if tree.num_nodes else None], 1 + one * tree.num_nodes, 1 + one * tree.num_nodes)
    places, path = np.zeros(1, np.int32), np.full((1, 1 + tree.num_nodes), -1, np.int32)
    # Rows off the text's own path are not visited.
    count = follow(*verified.trees, text[length + tree.depth].astype(np.int64), places, path)
    speculation.observe(["a"], verified, Paths(path, np.array([count]), places))
    return length + count


def test_n_grams_that_misled_are_tried_again():
    passage = np.random.default_rng(0).permutation(np.arange(1000, 1200))
    text = np.concatenate([passage, [1], passage, np.full(NODES, 2)]).astype(np.int32)
    speculation, nothing = new_speculation(), np.zeros(1, np.int64)
    for _ in range(50):  # text before, in which n-grams were always wrong
        speculation.trust.observe(["a"], nothing, nothing + NGRAM, np.full(1, 0.9), np.zeros(1, np.bool_))
    assert speculation.trust.of(["a"])[0, NGRAM] < OFF_BELOW
    length, steps = len(passage) + 3, 0
    while length < 2 * len(passage):
        length, steps = step(speculation, text, length), steps + 1
    assert steps < len(passage) / 2


def test_nodes_that_were_bad_for_a_long_time_are_soon_found_to_be_good():
    """In between, steps verify nothing, as when drafting does not pay. A few nodes then change what is expected."""
    speculation, text = new_speculation(), np.arange(3000, dtype=np.int32)  # without n-grams
    calibration, node = speculation.planner.calibration, (np.zeros(16, int), np.ones(16, int), np.full(16, 0.6))
    for _ in range(500):
        calibration.observe(*node, np.zeros(16, np.bool_))
    for length in range(1, len(text) - NODES):
        assert step(speculation, text, length) == length + 1
    for _ in range(5):
        calibration.observe(*(of[:4] for of in node), np.ones(4, np.bool_))
    assert calibration.first_level > 0.6


@pytest.mark.parametrize("emitted", [0, 1])
def test_steps_that_only_read_prompts_tell_nothing_of_copies(emitted):
    """In steps without nodes that emit tokens, what was observed of copies fades, so that they are tried again."""
    speculation, one = new_speculation(), np.ones(1, np.int64)
    calibration = speculation.planner.calibration
    for _ in range(20):
        calibration.observe(np.full(4, NGRAM), np.ones(4, int), np.full(4, 0.6), np.zeros(4, np.bool_))
    before = calibration.factor[NGRAM].min()
    for _ in range(64):
        paths = Paths(np.full((1, 1), -1, np.int32), emitted * one, np.zeros(1, np.int32))
        speculation.observe(["a"], lay_out([None], one, one), paths)
    assert (calibration.factor[NGRAM].min() > 2 * before) == (emitted > 0)


class KnowingDraft:
    """A draft that finds the next tokens of a text."""

    def __init__(self, speculation: Speculation, text: np.ndarray):
        self.planner, self.text = Planner(CONFIG.top_k, CONFIG.max_depth, NODES, COSTS), text
        speculation.planner, speculation.drafter, speculation.draft_kv = self.planner, self, object()
        speculation.most_missed = 4097

    def missed(self, tracker, request_ids, length):
        return np.ones_like(length)

    def catch_up(self, batch, tracker, due, drafting):
        self.planner.caught_up(int(drafting.sum()))
        return drafting, self if drafting.any() else None

    def grow(self, graphs, drafted, hidden, requests):
        self.planner.drafted(np.array([[0.9, 0.01, 0.01, 0.01]], np.float32))
        node = 0
        for token in self.text[requests.length[0] :][:4]:
            node = add_child(graphs, 0, node, int(token), np.float32(0.9), ORIGIN_DRAFT)


def test_a_draft_that_became_good_is_noticed_beside_copies():
    """Copies of some kind are found for every position of the text."""
    text = np.random.default_rng(0).integers(1, 4, 2000).astype(np.int32)
    speculation, length, drafted = new_speculation(), 100, []
    planner = KnowingDraft(speculation, text).planner
    planner.worth[:], planner.drafting = 0.0, False
    for _ in range(4 * PROBE_EVERY):
        length = step(speculation, text, length)
        drafted.append(planner.drafting)
    assert any(drafted) and not any(drafted[: PROBE_EVERY - 1])


class UselessDraft(KnowingDraft):
    """A draft whose only token is never right; none if its probability is 0, as with NaN in the logits."""

    prob = 0.5

    def grow(self, graphs, drafted, hidden, requests):
        self.planner.drafted(np.array([[self.prob, 0, 0, 0]], np.float32))
        if self.prob:
            add_child(graphs, 0, 0, 0, np.float32(self.prob), ORIGIN_DRAFT)


@pytest.mark.parametrize("prob", [0.0, 0.5])
@pytest.mark.parametrize("most", [9, 1 << 30])
def test_a_useless_draft_is_given_up(most, prob):
    """Also where most graphs have copies, as in a text of eight different tokens."""
    text = np.random.default_rng(0).integers(1, most, 2000).astype(np.int32)
    speculation, length, drafted = new_speculation(), 100, []
    draft = UselessDraft(speculation, text)
    draft.prob = prob
    for _ in range(600):
        length = step(speculation, text, length)
        drafted.append(draft.planner.drafting)
    assert sum(drafted[:50]) > 40 and not any(drafted[300:])
