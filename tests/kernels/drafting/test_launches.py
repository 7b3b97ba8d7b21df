"""What the draft phase launches on a GPU beside the layers of each kind of draft, for plans too."""

import pytest
import torch
from step_watch import HostTensors, Operations, Watch, count_launches, layers, use_kernels
from toy_drafting import BLOCKS, SLOTS, STATES, TOKENS, refill, toy_drafting

from vllm_gsd.ops.ngram.api import tree_words

PHASE = "draft phase"


@pytest.fixture
def watch(monkeypatch):
    watch = Watch(refuse=True)
    use_kernels(monkeypatch.setattr)
    count_launches(watch, monkeypatch.setattr)
    watch.allowed, watch.phases = 0, [PHASE]
    return watch


def drafting_of(kind, depth):
    """With every source, and as many levels as ``depth``."""
    drafting = toy_drafting(1, kind, max_depth=depth)
    drafting.tree_words = tree_words(4)
    words = len(drafting.known) + SLOTS * drafting.tree_words
    drafting.known = torch.zeros(words, dtype=torch.int32)
    return drafting


def launched(watch, drafting, levels):
    """Operations beside the draft's layers, and the most of a level; reads of the device raise."""
    drafting.draft(SLOTS, levels)  # builds what is kept
    refill(drafting, 2)
    watch.begin_step()
    with HostTensors(watch), Operations(watch):
        drafting.draft(SLOTS, levels)
    watch.end_step()
    return watch.steps[-1][PHASE, False], watch.per_level


@pytest.mark.parametrize("kind", [TOKENS, STATES, BLOCKS])
def test_launches_beside_the_layers_are_few(watch, kind):
    """At most 60, of which at most six belong to each level, or to each depth of a drafted block."""
    drafting = drafting_of(kind, depth=6)
    layers(watch, drafting.drafter.model)
    whole, per_level = launched(watch, drafting, drafting.num_levels)
    assert 10 < whole <= 60 and 2 <= per_level <= 6
    if drafting.num_levels > 1:  # what a plan leaves out is not launched
        assert launched(watch, drafting, 1)[0] == whole - 5 * per_level
    copies, _ = launched(watch, drafting, 0)
    assert copies == 5  # begin, two for copies, one for suffix trees, flatten
