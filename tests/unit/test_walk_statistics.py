"""Texts emitted by walks have the target's distribution: a chi-square test of 200,000 walks with exact probabilities.

All trials run the real ``walk`` with vLLM's real sampler, in large batches of requests with the same tree and random
logits over 16 tokens. The cells are the texts that a walk can emit; their probabilities follow from the definitions of
the parameters (``test_walk_enumeration.expected_probs``). With an exact sampler, the statistic practically never
exceeds df + 10 sqrt(2 df).
"""

import numpy as np
import pytest
import torch
from test_walk_enumeration import expected_probs
from vllm.v1.sample.sampler import Sampler
from walk_world import Request, Tree, metadata_of

from vllm_gsd.engine.v1 import walk as walk_module
from vllm_gsd.engine.verify.draft_tree import WalkTrees
from vllm_gsd.method.graph import NONE

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = 16
TRIALS = 200_000
BATCH = 10_000
FEWEST = 5  # expected trials in a cell; less likely texts share one cell
SETTINGS = {
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1.0": {},
    "temperature 1.6": {"temperature": 1.6},
    "top_k 5": {"top_k": 5},
    "top_p 0.8": {"top_p": 0.8},
    "min_p 0.1": {"min_p": 0.1},
    "all filters": {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"repetition": 1.4, "presence": 0.6, "frequency": 0.5},
}


class Target:
    """A target with random logits for each path."""

    def logits(self, request, path):
        random = np.random.default_rng([9, *path])
        return torch.from_numpy((1.5 * random.normal(size=TOKENS)).astype(np.float32))


def some_tree(target, request) -> Tree:
    """A tree with three levels. Children are among the likeliest tokens, but not always the likeliest."""
    tree = Tree()
    for place, ranks in ((0, (0, 1, 3)), (1, (0, 2)), (2, (1,)), (4, (0, 1))):
        ranked = target.logits(request, tree.path(place)).argsort(descending=True).tolist()
        tree.rows += [(place, ranked[rank]) for rank in ranks]
    return tree


def emitted(target, request, tree) -> dict[tuple[int, ...], int]:
    """Count how often walks emit each text."""
    torch.manual_seed(0)
    size = 1 + len(tree.rows)
    logits = torch.stack([target.logits(request, tree.path(place)) for place in range(size)]).repeat(BATCH, 1)
    token, parent = [0, *(t for _, t in tree.rows)], [NONE, *(p for p, _ in tree.rows)]
    starts = np.arange(BATCH + 1, dtype=np.int32) * size
    trees = WalkTrees(np.tile(np.array(token, np.int64), BATCH), np.tile(np.array(parent, np.int32), BATCH), starts)
    requests = [Request(**{**vars(request), "output": [*request.output]}) for _ in range(BATCH)]
    metadata = metadata_of(requests, [None] * BATCH)
    outputs = [one.output for one in requests]
    sampler, counts = Sampler(), {}
    for _ in range(TRIALS // BATCH):
        output, _ = walk_module.walk(sampler, logits, metadata, trees, outputs, stateful=request.min_p > 0)
        texts, times = np.unique(output.sampled_token_ids.numpy(), axis=0, return_counts=True)
        for text, count in zip(texts.tolist(), times.tolist(), strict=True):
            text = tuple(t for t in text if t != walk_module.PLACEHOLDER)
            counts[text] = counts.get(text, 0) + count
    return counts


def probabilities(target, request, tree, path=(), place=0) -> dict[tuple[int, ...], float]:
    """The exact probability of each text that a walk can emit from ``place`` on."""
    result = {}
    for token, prob in enumerate(expected_probs(target, request, path)):
        child = tree.child(place, token)
        if child is None:
            result[*path, token] = prob
        else:
            below = probabilities(target, request, tree, (*path, token), child)
            result |= {text: prob * rest for text, rest in below.items()}
    return result


def chi_square(counts, probs) -> tuple[float, int]:
    """The chi-square statistic and its degrees of freedom."""
    assert counts.keys() <= {text for text, prob in probs.items() if prob > 0}
    cells = np.array([(TRIALS * prob, counts.get(text, 0)) for text, prob in probs.items() if prob > 0])
    rare = cells[:, 0] < FEWEST
    cells = np.vstack([cells[~rare], cells[rare].sum(0)])
    cells = cells[cells[:, 0] >= FEWEST]
    return float(((cells[:, 1] - cells[:, 0]) ** 2 / cells[:, 0]).sum()), len(cells) - 1


def is_exact(keys) -> bool:
    request, target = Request(0, greedy=False, prompt=[1, 5], output=[5], **{"top_k": TOKENS, **keys}), Target()
    tree = some_tree(target, request)
    probs, counts = probabilities(target, request, tree), emitted(target, request, tree)
    assert sum(probs.values()) == pytest.approx(1) and sum(counts.values()) == TRIALS
    statistic, freedom = chi_square(counts, probs)
    assert freedom > 10
    return statistic <= freedom + 10 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("setting", SETTINGS)
def test_walks_have_the_targets_distribution(setting):
    assert is_exact(SETTINGS[setting])


def prefer_the_likeliest_child(step_into, share):
    """A faulty ``step_into``: in a ``share`` of the walks, it replaces a token outside the tree by the first child."""
    random = np.random.default_rng(1)

    def broken(tokens, parents, starts, places, sampled, active):
        size = int(starts[1])
        below = parents[:size][None] == places[:, None]
        known = (below & (tokens[:size][None] == sampled[:, None])).any(1)
        chosen = active & below.any(1) & ~known & (random.random(len(places)) < share)
        sampled[chosen] = tokens[:size][below.argmax(1)[chosen]]
        step_into(tokens, parents, starts, places, sampled, active)

    return broken


@pytest.mark.parametrize("setting", ["temperature 1.0", "temperature 1.6", "top_p 0.8", "penalties"])
def test_control_a_walk_that_prefers_the_likeliest_child_is_noticed(monkeypatch, setting):
    monkeypatch.setattr(walk_module, "step_into", prefer_the_likeliest_child(walk_module.step_into, 0.05))
    assert not is_exact(SETTINGS[setting])


def test_control_a_slightly_wrong_temperature_is_noticed(monkeypatch):
    exact = Sampler.apply_temperature
    monkeypatch.setattr(
        Sampler,
        "apply_temperature",
        staticmethod(lambda logits, temperature, all_random: exact(logits, 1.03 * temperature, all_random)),
    )
    assert not is_exact({})
