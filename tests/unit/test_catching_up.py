"""How much cached text, which the draft has not read yet, it reads in one step."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_gsd.config import GSDConfig
from vllm_gsd.engine.draft.block_drafter import BlockDrafter, block_shape
from vllm_gsd.engine.draft.level_drafter import LevelDrafter
from vllm_gsd.engine.draft.limits import TOO_LONG, num_lookahead_tokens, within_reach
from vllm_gsd.engine.draft.model import NoDraft
from vllm_gsd.engine.observe.stats import GraphStats
from vllm_gsd.engine.speculation import Speculation
from vllm_gsd.engine.v2.plan import COPIES_ONLY, DRAFTED, NO_GRAPH, Phase, Plan
from vllm_gsd.engine.v2.speculator import GraphSpeculator
from vllm_gsd.method.constants import NGRAM, NUM_SOURCES
from vllm_gsd.planner.costs import Costs
from vllm_gsd.planner.planner import PROBE_EVERY, Planner


def test_least_missed_first_and_none_beyond():
    assert within_reach(np.array([90, 10, 101, 5, 40]), 100).tolist() == [3, 1, 4, 0]  # 55 before the last
    assert within_reach(np.array([100, 100]), 100).tolist() == [0]
    assert within_reach(np.array([], np.int64), 100).tolist() == []


@pytest.mark.parametrize("nodes", [3, 16])
def test_slots_for_what_is_drafted(tmp_path, nodes):
    """The root's slot, and one for each node that a draft runs or each row of a block that stands behind the root."""

    def reserved(model):
        return num_lookahead_tokens(GSDConfig(method="gsd", model=model, num_speculative_tokens=nodes))

    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3DSparkModel"]}')
    assert reserved(None) == 0 and reserved("a-hub/model") == 1 + 2 * nodes and reserved(str(tmp_path)) == 1 + nodes
    assert all(block_shape(anchored, 99, 6, nodes)[0] <= 1 + nodes for anchored in (True, False))


def drafters(longest):
    """Drafts that read ``longest`` tokens: a language model, an EAGLE-3 head and one of blocks of 8 rows."""
    for shift in (0, 1):
        drafter = LevelDrafter.__new__(LevelDrafter)
        drafter.model, drafter.max_positions = SimpleNamespace(shift=shift), longest
        yield drafter, longest + shift
    block = BlockDrafter.__new__(BlockDrafter)
    block.num_rows, block.max_positions = 8, longest
    yield block, longest - 7


@pytest.mark.parametrize("kind", range(3))
def test_texts_that_are_too_long_for_the_draft_are_counted(kind):
    drafter, most = [*drafters(100)][kind]
    length = np.array([most, most + 1, 5000])
    tracker = SimpleNamespace(lengths=lambda ids: np.array([most - 3, most, 0]))
    speculation = Speculation.__new__(Speculation)
    speculation.stats, speculation.most_missed = GraphStats(), 4097
    speculation.planner = SimpleNamespace(drafting=True, probing=False, alone=False, wants_drafts=lambda *_: True)
    missed = drafter.missed(tracker, ["a", "b", "c"], length)
    assert speculation.choose_drafting(np.arange(3), np.zeros(0), 1.0, missed).tolist() == [True, False, False]
    assert speculation.stats.counts["drafts_skipped"] == 2


@pytest.mark.parametrize("costs", [None, Costs(np.array([1, 64]), np.array([10.0, 11.0]), np.array([0.1, 0.1]), 0.0)])
@pytest.mark.parametrize("runner", [1, 2])
def test_nothing_is_drafted_while_all_texts_are_too_long(runner, costs):
    """Copies of such texts do not pay, and are not tried more often than usual."""
    speculation = Speculation.__new__(Speculation)
    speculation.stats, speculation.most_missed, speculation.num_nodes = GraphStats(), 4097, 4
    speculation.planner, speculation.drafter = Planner(4, 6, 4, costs), SimpleNamespace()
    speculation.request_tables, speculation.copies = lambda: [()], []
    plan, tried = Plan(speculation, num_slots=2, num_nodes=4, num_levels=6), 0

    def step(*missed):
        """Whether each of two requests is drafted for, and the gauge."""
        batch = SimpleNamespace(token_rows=np.arange(2), length=np.full(2, 9))
        speculation.planner.begin(2, 200)
        if runner == 1:
            drafts = speculation.choose_drafting(np.arange(2), np.zeros(0), 1.0, np.array(missed)).tolist()
        else:
            kinds = plan.choose(batch, np.ones(2, np.bool_), np.array(missed))
            drafts = (kinds == DRAFTED).tolist()
        return drafts, speculation.take_stats()["state"]["drafting"]

    assert step(3, TOO_LONG) == ([True, runner == 2 and costs is None], 1)
    for _ in range(200):
        drafts, gauge = step(TOO_LONG, TOO_LONG)
        assert gauge == 0 and (drafts == [False] * 2 or (runner == 2 and costs is None))
        tried += speculation.planner.due
    assert tried == 2  # after 40 steps and 80 more
    assert step(3, 3) == ([True, True], 1)


def test_v2_reads_no_more_of_prompts():
    """Three prompts have 7, 5000 and 300 unread tokens, one request opted out, and one has finished its prompt."""
    done = {"a": 3, "b": 1000, "c": 5700, "d": 0, "e": 20}
    length, prompts = np.array([10, 6000, 6000, 50, 30]), np.array([True, True, True, True, False])
    caught_up, sent = [], []
    tracker = SimpleNamespace(length=done, lengths=lambda ids: np.array([done[request_id] for request_id in ids]))

    def catch_up(batch, tracker, due, wanted):
        caught_up.append(due.tolist())
        for request, tokens in zip(batch.request_ids, due.tolist(), strict=True):
            tracker.length[request] = max(tracker.length[request], tokens)

    drafter = SimpleNamespace(
        missed=lambda tracker, ids, known: known - np.array([tracker.length[i] for i in ids]), catch_up=catch_up
    )
    speculator = GraphSpeculator.__new__(GraphSpeculator)
    speculator.speculation = SimpleNamespace(
        drafter=drafter, draft_kv=tracker, most_missed=4097, draft_model=NoDraft(),
        copies=SimpleNamespace(packed=lambda *_: None),
        trust=SimpleNamespace(of=lambda ids: np.ones((len(ids), NUM_SOURCES))),
        planner=SimpleNamespace(calibration=SimpleNamespace(factor=None), drafts_pay=lambda: True),
    )  # fmt: skip
    requests = SimpleNamespace(
        request_ids=[*done],
        length=length,
        sampled=np.ones(5, np.bool_),
        capacity=length,
        block_table=torch.zeros(5, 1),
        token_rows=np.arange(5),
    )
    speculator.proposals = SimpleNamespace(fresh=np.ones(5, np.bool_))
    speculator.plan = SimpleNamespace(phase=Phase(), active=False)
    speculator.ends, speculator.num_rows = length, 16
    speculator.drafting = SimpleNamespace(propose=lambda known, table, levels: sent.append(known), tree_words=0)
    batch = SimpleNamespace(idx_mapping_np=np.arange(5), is_prefilling_np=prompts, prefill_len_np=np.full(5, 6000))
    speculates, missed = np.arange(5) != 3, drafter.missed(tracker, requests.request_ids, length)
    speculator._grow_on_device(batch, np.arange(5), requests, np.full(5, DRAFTED), speculates, missed)
    assert caught_up == [[10, 0, 6000, 0, 0]]
    assert sent[0].draft_length.tolist() == [10, 1000, 6000, 0, -1]  # -1: only the device knows
    # The draft reads unfinished prompts together with the target, unless nothing will be drafted after them.
    requests.sampled[:] = False
    for answer, read in ((2, []), (3, [[10, 0, 6000, 0, 0]])):
        caught_up.clear()
        done.update(a=3, c=5700)
        speculator.ends = np.full(5, 6000 + answer)
        speculator._grow_on_device(batch, np.arange(5), requests, np.full(5, NO_GRAPH), speculates, missed)
        assert caught_up == read
    # Graphs of a probe have no copies, since the planner learns nothing from graphs that have.
    speculator.plan.phase, kinds = Phase(alone=True), np.array([DRAFTED, COPIES_ONLY, NO_GRAPH, NO_GRAPH, DRAFTED])
    speculator._grow_on_device(batch, np.arange(5), requests, kinds, speculates, missed)
    assert sent[-1].trust[:, NGRAM].tolist() == [0, 1, 1, 1, 0]


@pytest.mark.parametrize("runner", [1, 2])
def test_a_probe_that_waits_for_a_text_does_not_try_copies_in_every_step(runner):
    """The draft has missed too much of both texts, and the copies that are found in every step do not pay."""
    speculation = Speculation.__new__(Speculation)
    speculation.stats, speculation.most_missed, speculation.num_nodes = GraphStats(), 4097, 4
    costs = Costs(np.array([1, 64]), np.array([10.0, 640.0]), np.array([9.0, 9.0]), 0.0)
    speculation.planner, speculation.copies = Planner(4, 6, 4, costs), [None]
    planner, plan = speculation.planner, Plan(speculation, num_slots=2, num_nodes=4, num_levels=6)
    plan.seen[:], plan.size[:], plan.value[:, 0], plan.copied[:, 0] = COPIES_ONLY, 1, 0.2, True
    missed, tried = np.array([5000, 6000]), []
    for number in range(1, 101):
        planner.begin(2, 200)
        if runner == 1:
            speculation.choose_drafting(np.arange(2), np.full(2, 0.2), 0.8, missed)
            chosen = planner.choose(plan.value, plan.size, np.full(2, 100), *np.zeros((2, 2), np.bool_))
        else:
            plan.choose(SimpleNamespace(token_rows=np.arange(2), length=np.full(2, 100)), np.ones(2, np.bool_), missed)
            chosen = plan.shares
        assert planner.drafts_pay() == (number >= PROBE_EVERY - 1)  # until there is a text that the draft has read
        tried += [number] * bool(chosen.any())
    assert tried == []
    planner.begin(2, 200)
    assert speculation.choose_drafting(np.arange(2), np.zeros(0), 1.0, np.array([5000, 9])).tolist() == [False, True]


def test_a_long_prompt_is_read_although_copies_were_better_for_the_text_before():
    """Otherwise the draft would have missed too much of it at the first token, and the answer would get no draft."""
    speculation = Speculation.__new__(Speculation)
    speculation.stats, speculation.most_missed = GraphStats(), 4097
    costs = Costs(np.array([1, 64]), np.array([10.0, 11.0]), np.array([0.1, 0.1]), 0.0)
    planner = speculation.planner = Planner(4, 6, 4, costs)
    planner.begin(2, 4000)  # an answer, and a prompt beside it
    speculation.choose_drafting(np.arange(1), np.full(16, 0.99), 0.01, np.array([1, 2000]))
    assert not planner.drafting and not planner.drafts_pay()
    for read in (4096, 8192, 9000):  # the next prompt, alone
        planner.begin(1, read)
        assert not speculation.choose_drafting(np.arange(0), np.zeros(0), 1.0, np.array([4096])).any()
        assert planner.drafts_pay()
    planner.begin(1, 9000)
    assert speculation.choose_drafting(np.arange(1), np.zeros(0), 1.0, np.array([1])).all()


def test_a_prompt_is_read_beside_an_answer_that_is_too_long_for_the_draft():
    speculation = Speculation.__new__(Speculation)
    speculation.stats, speculation.most_missed = GraphStats(), 4097
    costs = Costs(np.array([1, 64]), np.array([10.0, 11.0]), np.array([0.1, 0.1]), 0.0)
    planner = speculation.planner = Planner(4, 6, 4, costs)
    for _ in range(3):
        planner.begin(2, 20000)
        assert not speculation.choose_drafting(np.arange(1), np.zeros(0), 1.0, np.array([TOO_LONG, 4096])).any()
        assert planner.drafts_pay()
