"""The draft phase as one function over fixed buffers: what is recorded once gives what a fresh run gives."""

from functools import partial
from types import SimpleNamespace

import no_reads
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy_drafting import BLOCKS, NODES, SLOTS, STATES, VOCAB, propose, refill, toy_drafting, toy_model

from vllm_gsd.engine.draft import model as draft_model
from vllm_gsd.engine.draft.model import LOGIT_BYTES
from vllm_gsd.engine.v2.draft_graphs import DraftGraphs, sizes


def equal(ours, theirs) -> bool:
    return all(map(torch.equal, ours, theirs))


class Recorded(DraftGraphs):
    """What a CUDA graph does: the function of its capture, on the buffers of its capture."""

    def __init__(self, drafting):
        self.drafting, self.graphs, self.replayed = drafting, {}, set()
        self.stats = SimpleNamespace(counts={"cudagraph_hits": 0, "cudagraph_misses": 0})
        self.variants = {(size, of): (size, of) for size in (1, 3, 5) for of in drafting.variants}
        for variant in self.variants:
            drafting.known.fill_(-1)
            drafting.draft(*variant)
            self.graphs[variant] = partial(drafting.draft, *variant)

    def run_fullgraph(self, desc):
        addresses = [of.data_ptr() for of in (*self.drafting.graphs, *self.drafting.trees, self.drafting.known)]
        self.graphs[desc]()
        self.replayed.add(desc)
        assert addresses == [of.data_ptr() for of in (*self.drafting.graphs, *self.drafting.trees, self.drafting.known)]


@pytest.mark.parametrize("draft", [STATES, BLOCKS])
def test_a_replay_gives_what_a_fresh_run_gives(draft):
    """Of every captured number of requests and levels, with other contents, other requests, and padding."""
    drafting = toy_drafting(1, draft)
    recorded = Recorded(drafting)
    drafting.cuda_graphs = lambda: recorded
    assert not drafting.draft_length.any() and not drafting.counts.any()
    drafted = 0
    assert drafting.variants == ([1] if draft == BLOCKS else [1, 2, 3])
    requests = [0, 1, 2, 3, 4], [4], [3, 0]
    cases = [(slots, levels) for slots in requests for levels in drafting.variants] + [([2, 4, 0, 1], None)]
    for seed, (slots, levels) in enumerate(cases, start=2):
        refill(drafting, seed)
        ours = propose(drafting, slots, levels)
        fresh = toy_drafting(seed, draft)
        assert equal(ours, propose(fresh, slots, levels))
        drafted += int(ours[7].sum())
    assert drafted > 2 * NODES
    assert recorded.stats.counts == {"cudagraph_hits": len(cases), "cudagraph_misses": 0}
    assert recorded.replayed == set(recorded.variants)


class _Shapes(TorchDispatchMode):
    """What operators are called, and the shapes of their results."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.seen.append((str(function), [tuple(of.shape) for of in tree_leaves(result) if hasattr(of, "shape")]))
        return result


@pytest.mark.parametrize("draft", [STATES, BLOCKS])
def test_nothing_depends_on_data(draft):
    """The same operators with the same shapes, whatever the buffers hold, and nothing is read back."""
    drafting, seen = toy_drafting(1, draft), []
    propose(drafting)
    for padding in (False, True):
        refill(drafting, 7)
        if padding:
            drafting.known.fill_(-1)
        with _Shapes() as shapes, no_reads.refused():
            drafting.draft(SLOTS, drafting.num_levels)
        seen.append(shapes.seen)
    assert seen[0] == seen[1] and len(seen[0]) > 10


@pytest.mark.parametrize("levels", [1, 2])
def test_fewer_levels_give_the_graphs_of_a_smaller_max_depth(levels):
    drafting = toy_drafting(1)
    ours, whole = propose(drafting, levels=levels), propose(toy_drafting(1))
    assert equal(ours, propose(toy_drafting(1, max_depth=levels)))
    assert ours[7].sum() > 0 and not equal(ours, whole)
    assert drafting.drafter.stats.counts["draft_forwards"] == levels


def test_in_parts_as_at_once():
    drafting = toy_drafting(1)
    whole = propose(drafting)
    assert whole[7].sum() > 2 * NODES
    drafting.reset()
    drafting.most = 2
    assert equal(propose(drafting), whole)


def test_rows_of_a_pass_are_no_more_than_a_batch_of_tokens():
    drafting = toy_drafting(1)
    assert drafting.most == SLOTS
    states = drafting.req_states
    drafting.drafter.max_rows = 2 * (1 + NODES) + 1
    parts = type(drafting)(drafting.config, drafting.drafter, states, 60, drafting.trees, drafting.device)
    assert parts.most == 2


def test_sizes_to_capture():
    assert sizes(1) == [1] and sizes(5) == [1, 2, 3, 4, 5]
    assert sizes(64) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    for most in (7, 100, 1024):
        of = np.array(sizes(most))
        assert of[-1] == most and len(of) <= 21
        assert (of[1:] <= np.maximum(1.5 * of[:-1], of[:-1] + 1)).all()


def test_logits_in_parts(monkeypatch):
    hidden = torch.eye(VOCAB)[:7]
    whole = toy_model().most_probable(hidden, 4)
    monkeypatch.setattr(draft_model, "MAX_LOGITS_BYTES", 3 * LOGIT_BYTES * VOCAB)
    assert equal(toy_model().most_probable(hidden, 4), whole)


def test_a_request_without_a_softmax_gets_no_nodes_of_the_draft():
    """The draft's NaN of one request stays there; the others are drafted for as before."""
    drafting = toy_drafting(1)
    healthy = propose(drafting)
    run_rows = drafting.drafter.model.run_rows
    refill(drafting, 1)

    def with_nan(tokens, slots, tree, features=None):
        hidden = run_rows(tokens, slots, tree, features)
        hidden.view(SLOTS, -1, VOCAB)[1] = torch.nan
        return hidden

    drafting.drafter.model.run_rows = with_nan
    drafting.config = drafting.config.model_copy(update={"sources": ("draft",)})
    ours = propose(drafting)
    others = [of[torch.arange(SLOTS) != 1] for of in ours[:-1]]
    drafting.drafter.model.run_rows = run_rows
    refill(drafting, 1)
    expected = [of[torch.arange(SLOTS) != 1] for of in propose(drafting)[:-1]]
    assert equal(others, expected) and ours[7][1] == 0 and healthy[7][1] > 0
    assert ours[-1][4] == 1
