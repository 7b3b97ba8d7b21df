"""Copies from texts and flattened lists on the device: node by node what the specification gives."""

import numpy as np
import pytest
import torch
from device_graphs import Pair, empty_trees, random_texts, tensor
from reference_graph import can_reach, read_graph

from vllm_gsd.method.cells import calibrated
from vllm_gsd.method.constants import NGRAM, NONE, ORIGIN_AGREED, ORIGIN_DRAFT, ORIGIN_NGRAM, ORIGIN_SHARED
from vllm_gsd.method.flatten import flatten
from vllm_gsd.method.graph import add_child, find_child
from vllm_gsd.method.ngram import graft_ngrams, graft_tree, longest_matches
from vllm_gsd.ops.flatten.api import DeviceTrees, flatten_graphs
from vllm_gsd.ops.growth import state
from vllm_gsd.ops.ngram.api import graft_ngrams as graft_on_device
from vllm_gsd.ops.ngram.api import graft_trees, new_matches, pack_tree, tree_words


def repetitive_texts(random):
    vocab = int(random.choice([1, 2, 4, 8]))
    phrase = random.integers(0, vocab, random.integers(1, 12)).tolist()
    texts = random_texts(random, vocab, 40)
    return [text if random.random() < 0.4 else (phrase * 4 + text[:3] + phrase)[-45:] for text in texts]


@pytest.mark.parametrize("seed", range(30))
def test_copies_are_the_specifications(device, seed):
    random = np.random.default_rng([seed, 13])
    texts, capacity, num_nodes = repetitive_texts(random), int(random.choice([1, 5, 20, 70])), 8
    pair = Pair(device, random, texts, capacity, num_nodes, int(random.choice([0, 1, 2])))
    pair.trust[random.random(pair.count) < 0.2, NGRAM] = 0.1
    pair.known[:, 4] = pair.length + random.integers(1, 12, pair.count)
    pair.begin()
    pair.grow(4, random.integers(0, 4))
    most, min_match = int(random.integers(1, 5)), int(random.integers(1, 4))
    ranks, match_probs = new_matches(pair.count, most, device)
    graft_on_device(pair.graphs, ranks, match_probs, tensor(pair.texts, device), min_match)
    depth = np.minimum(pair.known[:, 4] - pair.length - 1, num_nodes)
    depth[(pair.trust[:, NGRAM] < 0.35) | (depth < 0)] = 0
    assert pair.graphs.state[:, state.COPIES].tolist() == depth.tolist()
    for row, text in enumerate(texts):
        text = np.array(text)
        found = ranks[row].flatten().sort(descending=True).values[:most].tolist()
        expected = longest_matches(text, min_match, most) if depth[row] else []
        assert [(rank & 0xFFFFFFFF, rank >> 32) for rank in found if rank] == expected
        graft_ngrams(pair.host, row, text, most if depth[row] else 0, int(depth[row]), min_match)
    pair.check()


@pytest.mark.parametrize("seed", range(30))
def test_suffix_trees_are_the_specifications(device, seed):
    """Also where the text has grown since the look-up, along the tree or out of it."""
    random = np.random.default_rng([seed, 15])
    vocab, capacity, most = int(random.choice([2, 3, 6])), int(random.choice([1, 5, 20, 70])), 7
    pair = Pair(device, random, random_texts(random, vocab), capacity, 8, int(random.choice([0, 1, 2])))
    pair.begin()
    pair.grow(vocab, random.integers(0, 4))
    words = np.zeros((pair.count, tree_words(most)), np.int32)
    for row, length in enumerate(pair.length):
        size, known = int(random.integers(1, most + 2)), length - int(random.integers(0, min(3, length)))
        parents = np.array([-1, *(random.integers(0, i) for i in range(1, size))], np.int32)
        shares = np.append(np.float32(1), random.uniform(0.05, 1, size - 1).astype(np.float32))
        tree = random.integers(0, vocab, size), parents, shares, int(random.integers(2, 20))
        pack_tree(words[row], *tree, known)
        graft_tree(pair.host, row, *tree, ORIGIN_SHARED, pair.texts[row, known:length])
    graft_trees(pair.graphs, tensor(words, device), new_matches(1, 1, device)[1], tensor(pair.texts, device))
    pair.check()


def test_a_long_text_is_matched_in_parts(device):
    """Beyond one block of every program, up to its ends."""
    random = np.random.default_rng(5)
    text = random.integers(0, 3, 40000)
    pair = Pair(device, random, [[1]])
    pair.begin()
    pair.graphs.state[0, state.LENGTH], pair.graphs.state[0, state.COPIES] = len(text), 4
    ranks, match_probs = new_matches(1, 6, device)
    graft_on_device(pair.graphs, ranks, match_probs, tensor(text[None], device, torch.int32), 2)
    found = ranks.flatten().sort(descending=True).values[:6].tolist()
    assert [(rank & 0xFFFFFFFF, rank >> 32) for rank in found] == longest_matches(text, 2, 6)


def random_graphs(device, random, count, capacity):
    """Acyclic graphs of all origins, with merged edges anywhere."""
    pair = Pair(device, random, [[1]] * count, capacity, 25)
    pair.begin()
    graphs = pair.host
    for row in range(count):
        natives = [0]
        for _ in range(random.integers(0, capacity)):
            parent, token = int(random.choice(natives)), int(random.integers(0, 6))
            if find_child(graphs, row, parent, token) != NONE:
                continue
            nodes = read_graph(graphs, row)
            targets = [n for n in natives[1:] if not can_reach(nodes[n], nodes[parent])]
            prob = np.float32(random.choice([0.0, 0.25, 0.5, 1.0, random.random()]))
            origin = int(random.choice([ORIGIN_DRAFT, ORIGIN_NGRAM, ORIGIN_SHARED, ORIGIN_AGREED]))
            index = add_child(graphs, row, parent, token, prob, origin)
            if targets and random.random() < 0.3:
                graphs.merged[row, index] = random.choice(targets)
            else:
                natives.append(index)
    for name in ("token", "parent", "depth", "origin", "merged"):
        pair.graphs.nodes[:, getattr(state, name.upper())] = tensor(getattr(graphs, name), device, torch.int32)
    pair.graphs.chances.copy_(tensor(np.stack([graphs.prob, graphs.survival], 1), device))
    pair.graphs.state[:, state.SIZE] = tensor(graphs.size, device)
    return pair


@pytest.mark.parametrize("seed", range(30))
def test_lists_are_the_specifications(device, seed):
    random = np.random.default_rng([seed, 14])
    count = int(random.integers(1, 4))
    pair = random_graphs(device, random, count, int(random.choice([1, 4, 12, 24])))
    num_nodes = random.choice([0, 1, 3, 8, 25], count).astype(np.int32)
    max_depth = random.integers(0, 6, count).astype(np.int32)
    slots = random.permutation(count)
    for column, values in ((state.NUM_NODES, num_nodes), (state.MAX_DEPTH, max_depth), (state.SLOT, slots)):
        pair.graphs.state[:, column] = tensor(values, device, torch.int32)
    shape = pair.factor.shape
    factor = (0.2 + random.random(shape)).astype(np.float32) if random.random() < 0.6 else np.ones(shape, np.float32)
    trust = np.ones((count, 5), np.float32)
    if random.random() < 0.5:
        trust = (0.2 + random.random(trust.shape)).astype(np.float32)
    expected = flatten(pair.host, num_nodes, max_depth, factor, trust)
    got = empty_trees(count, 25, device)
    flatten_graphs(pair.graphs, got, tensor(factor, device), tensor(trust, device))
    got = DeviceTrees(*(of.cpu().numpy()[slots] for of in got))
    assert np.array_equal(got.size, expected.size)
    for row, size in enumerate(expected.size):
        for name in ("token", "parent", "depth", "origin", "via_merge", "survival", "value"):
            ours, theirs = getattr(got, name)[row], getattr(expected, name)[row]
            assert np.array_equal(ours[: 1 + size], theirs[: 1 + size]), name
            assert (ours[1 + size :] == (NONE if name == "parent" else 0)).all()


def test_padding_is_written_nowhere(device):
    pair = random_graphs(device, np.random.default_rng(3), 2, 12)
    pair.graphs.state[:, state.SLOT] = torch.tensor([NONE, 1], device=device)
    pair.graphs.state[:, state.NUM_NODES] = 25
    got = empty_trees(2, 25, device)
    flatten_graphs(pair.graphs, got, tensor(pair.factor, device), tensor(pair.trust, device))
    assert all((of[0].float() == (1 if of.dtype == torch.bool else 7)).all() for of in got)
    assert got.size[1] == pair.graphs.state[1, state.SIZE] - 1 or got.size[1] == 25


def test_bins_begin_where_the_specification_has_them(device):
    """Survivals a rounding away from a power of two, each with a factor of its own."""
    powers = np.float32(2.0) ** -np.arange(9, dtype=np.float32)
    around = [powers]
    for direction in (0.0, 2.0):
        values = powers
        for _ in range(3):
            values = np.nextafter(values, np.float32(direction), dtype=np.float32)
            around.append(values)
    probs = np.minimum(np.concatenate(around), np.float32(1.0))
    factor = ((1 + np.arange(120, dtype=np.float32) / 128) / 2).reshape(5, 3, 8)
    pair = Pair(device, np.random.default_rng(0), [[1]] * len(probs), 2, 1)
    pair.begin()
    pair.graphs.nodes[:, state.PARENT, 1], pair.graphs.nodes[:, state.MERGED, 1] = 0, NONE
    pair.graphs.nodes[:, state.ORIGIN, 1], pair.graphs.state[:, state.SIZE] = ORIGIN_DRAFT, 2
    pair.graphs.chances[:, :, 1] = tensor(probs, device)[:, None]
    trees = empty_trees(len(probs), 1, device)
    flatten_graphs(pair.graphs, trees, tensor(factor, device), tensor(pair.trust, device))
    assert trees.value[:, 1].tolist() == [calibrated(factor, 0, 1, prob) for prob in probs]
