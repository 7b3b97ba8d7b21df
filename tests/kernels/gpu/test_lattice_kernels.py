"""Lattices on the device: rows of blocks, and node by node what the specification lays into graphs of random batches.

Among them are equal probabilities, missing candidates, full graphs, shallow limits and requests without a block.
"""

import numpy as np
import pytest
import torch
from device_graphs import LENGTH, Pair, empty_trees, random_texts, tensor

from vllm_gsd.method.constants import MATCH_PROB, NONE
from vllm_gsd.method.flatten import flatten
from vllm_gsd.method.lattice import add_lattices
from vllm_gsd.method.ngram import graft_all_ngrams
from vllm_gsd.ops.flatten.api import flatten_graphs
from vllm_gsd.ops.lattice import api
from vllm_gsd.ops.ngram.api import graft_ngrams, new_matches
from vllm_gsd.ops.topk.api import topk_softmax

MASK = 7


def random_pair(device, random, **limits):
    texts = random_texts(random, 9)
    capacity, num_nodes = int(random.choice([1, 4, 30, 200])), int(random.choice([1, 3, 8, 16]))
    pair = Pair(device, random, texts, capacity, num_nodes, 0, max_slots=0, mask_token=MASK, **limits)
    pair.known[:, 1] = random.random(pair.count) < 0.8
    pair.known[:, 3] = pair.length + random.choice([0, 2, 40], pair.count)
    pair.known[:, 4] = pair.length + random.choice([1, 2, 4, 30], pair.count)
    return pair


def random_blocks(random, count, depth, k):
    tokens = random.permuted(np.broadcast_to(np.arange(9), (count, depth, 9)), axis=2)[:, :, :k]
    tokens[random.random(tokens.shape) < 0.05] = NONE
    probs = random.dirichlet(np.full(k + 1, 0.5), (count, depth, k)).astype(np.float32)[..., :k]
    if random.random() < 0.4:
        probs = random.choice([0.0, 0.25, 0.5, 1.0], probs.shape).astype(np.float32)
    probs[:, 0] = probs[:, 0, :1]
    return np.ascontiguousarray(tokens), np.ascontiguousarray(probs)


@pytest.mark.parametrize("seed", range(40))
def test_lattices_are_the_specifications(device, seed):
    random = np.random.default_rng([seed, 21])
    thetas = float(random.choice([0.0, 0.1, 0.5])), float(random.choice([0.0, 0.02, 0.3]))
    pair = random_pair(device, random, theta_sib=thetas[0], theta_prob=thetas[1])
    depth, k, width = int(random.integers(1, 7)), int(random.choice([1, 2, 3, 4, 8])), int(random.integers(1, 9))
    pair.begin(width)
    drafted = pair.frontier_len > 0
    room = np.minimum(pair.known[:, 3], LENGTH)
    deepest = np.minimum(pair.known[:, 4], LENGTH) - pair.length - 1
    wanted = (pair.known[:, 1] > 0) & (deepest > 0)
    assert np.array_equal(drafted, wanted & (pair.length - 1 + width <= room))
    tokens, probs = random_blocks(random, pair.count, depth, k)
    api.add_lattices(pair.graphs, tensor(tokens, device), tensor(probs, device), pair.limits)
    budgets, deepest = np.full(pair.count, pair.num_nodes, np.int32), np.maximum(deepest, 0).astype(np.int32)
    blocks = tokens[drafted], probs[drafted]
    counts = add_lattices(pair.host, drafted, *blocks, budgets, deepest, *thetas)
    pair.check()
    assert pair.graphs.counts.tolist() == [*counts, 0, int((blocks[1][:, :, :, 0].max(2) == 0).sum())]

    # Copies join the same graphs, and the best paths are those of the host.
    ranks, match_probs = new_matches(pair.count, 3, device)
    assert len(match_probs) == len(MATCH_PROB)
    graft_ngrams(pair.graphs, ranks, match_probs, tensor(pair.texts, device), 1)
    rows, length = np.arange(pair.count), pair.length.astype(np.int64)
    graft_all_ngrams(pair.host, pair.texts, rows, length, wanted, 3, np.minimum(deepest, pair.num_nodes), 1)
    pair.check()
    trees = empty_trees(pair.count, pair.num_nodes, device)
    flatten_graphs(pair.graphs, trees, tensor(pair.factor, device), tensor(pair.trust, device))
    expected = flatten(pair.host, np.where(wanted, budgets, 0).astype(np.int32), deepest, pair.factor, pair.trust)
    assert trees.size.tolist() == expected.size.tolist()
    for row, size in enumerate(expected.size):
        for name in ("token", "parent", "depth", "origin", "via_merge", "survival", "value"):
            ours, theirs = getattr(trees, name)[row].cpu(), getattr(expected, name)[row]
            assert np.array_equal(ours[: 1 + size], theirs[: 1 + size]), name


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_blocks(device, seed):
    """The last token and masks behind it, which attend to the text before and to each other."""
    random = np.random.default_rng([seed, 22])
    causal, width = bool(seed % 2), int(random.integers(1, 9))
    pair = random_pair(device, random, causal=causal)
    padding = random.random(pair.count) < 0.2
    pair.known[padding, 0] = NONE
    pair.draft_length += 3
    rows = [of.cpu().numpy().reshape(pair.count, -1) for of in pair.begin(width)]
    assert pair.draft_length.tolist() == [3] * pair.count
    for row, drafted in enumerate(pair.frontier_len > 0):
        assert not (drafted and padding[row])
        at = pair.length[row] - 1 + np.arange(width)
        assert rows[0][row].tolist() == ([pair.texts[row, at[0]], *[MASK] * (width - 1)] if drafted else [0] * width)
        assert rows[1][row].tolist() == (at.tolist() if drafted else [0] * width)
        assert rows[2][row].tolist() == (pair.physical(row, at).tolist() if drafted else [-1] * width)
        seen = [(1 << (place + 1 if causal else width)) - 1 for place in range(width)]
        assert rows[3][row].tolist() == (seen if drafted else [0] * width)
        assert rows[4][row].tolist() == [at[0] if drafted else 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_best_paths_are_those_of_the_specification(device, seed, dtype):
    """With ties, blocks with a NaN, rows of scores that are not next to each other, and one row for all candidates."""
    random = np.random.default_rng([seed, 5])
    count, k, pool = 5, int(random.choice([1, 2, 5, 8])), int(random.integers(8, 70))
    before = int(random.choice([1, k]))
    rows = int(random.choice([1, before]))
    draw = random.standard_normal if seed % 2 else lambda shape: random.choice([0.0, 1.0, 2.0], shape)
    scores = tensor(draw((count, 3, rows, pool)), device, dtype)[:, 1]
    scores[1] = torch.nan
    chances, ids = (of.view(count, rows, k) for of in topk_softmax(scores.flatten(0, 1), k))
    best = tensor(-random.random((count, before)), device, torch.float32)
    for merge in (True, False):
        arguments = scores, chances[..., 0], ids, best, merge
        ours = [of.cpu() for of in api.best_paths(*arguments)]
        theirs = api.best_paths_in_numpy(*(of.cpu() for of in arguments[:-1]), merge)
        whole = torch.arange(count) != 1
        assert torch.equal(ours[0][whole], theirs[0][whole])
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=0)
        torch.testing.assert_close(ours[2], theirs[2], rtol=1e-6, atol=1e-6)
        assert not ours[1][1].any() and (ours[0] >= 0).all() and (ours[0] < pool).all()
