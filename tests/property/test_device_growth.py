"""Growth on the device against the core's: ``vllm_gsd.ops.graph_*`` are to be equal to it, bit for bit.

Proven over random batches (equal probabilities, repeated and missing candidates, full graphs, merges, chains, zero
budgets included): every array of the graphs after every level, the counts, the frontiers, the draft's slots and masks,
n-gram matches and grafts, and flattened lists under random calibration and trust. And with tensors that hold nothing,
on a device that is not there: no function reads what a tensor holds, and the shapes it returns are fixed.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_graph import can_reach, read_graph
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_gsd.method.cells import calibrated
from vllm_gsd.method.constants import (
    MAX_CONTEXT,
    NONE,
    NUM_SOURCES,
    ORIGIN_AGREED,
    ORIGIN_DRAFT,
    ORIGIN_NGRAM,
    ORIGIN_SHARED,
)
from vllm_gsd.method.draft_level import DraftSlots, level_rows, new_draft_slots
from vllm_gsd.method.flatten import flatten
from vllm_gsd.method.graph import add_child, find_child, new_graphs, reset
from vllm_gsd.method.growth import add_candidates, next_frontier
from vllm_gsd.method.lay_out import ancestor_masks
from vllm_gsd.method.ngram import graft_ngrams, longest_matches
from vllm_gsd.ops.flatten import api as graph_flatten
from vllm_gsd.ops.growth import api as graph_growth
from vllm_gsd.ops.growth import state as graph_state
from vllm_gsd.ops.ngram import api as graph_ngram
from vllm_gsd.planner.calibration import Calibration

MANY = settings(derandomize=True, deadline=None, max_examples=150)
SEEDS = st.integers(0, 2**32).map(lambda seed: np.random.default_rng([seed, 11]))

# --- from the host's arrays to tensors --------------------------------------------------------------


def tensor(values, dtype=torch.int64):
    return torch.from_numpy(np.asarray(values)).to(dtype)


def started(texts, capacity, merging=True):
    """Lone roots: the core's graphs, the device's, and the padded texts."""
    graphs = new_graphs(len(texts), capacity)
    padded = np.full((len(texts), max(map(len, texts)) + 3), 1, np.int64)  # what lies behind a text is another's
    for row, text in enumerate(texts):
        reset(graphs, row, np.array(text[-MAX_CONTEXT - 1 :], np.int64))
        padded[row, : len(text)] = text
    length = tensor([len(text) for text in texts])
    return graphs, graph_state.start_graphs(tensor(padded), length, capacity, merging), padded


def assert_equal(graphs, device):
    """Equal in all that is in use; what can be reached is what a search finds."""
    assert device.capacity == graphs.capacity
    assert np.array_equal(device.size, graphs.size)
    assert np.array_equal(device.context, graphs.context)
    for row, size in enumerate(graphs.size):
        for name in ("token", "parent", "depth", "prob", "survival", "origin", "merged"):
            got, expected = getattr(device, name)[row, :size].numpy(), getattr(graphs, name)[row, :size]
            assert np.array_equal(got, expected), name
        if device.above.shape[2]:
            nodes = [node for node in read_graph(graphs, row) if node.merged is None]
            above = graph_state.bits(device.above[row])
            for node in nodes:
                reaching = [other.index for other in nodes if can_reach(other, node)]
                assert [other.index for other in nodes if above[node.index, other.index]] == reaching


# --- growth -----------------------------------------------------------------------------------------


def random_texts(random, vocab, most=24):
    return [random.integers(0, vocab, random.integers(1, most)).tolist() for _ in range(random.integers(1, 4))]


def random_level(random, rows, top_k, vocab):
    """Candidates of a level: equal probabilities, repeated tokens and missing ones among them."""
    tokens = random.integers(0, vocab, (rows, top_k))
    if random.random() < 0.5:  # as models give them
        tokens = np.array([random.permutation(max(vocab, top_k))[:top_k] for _ in range(rows)]).reshape(rows, top_k)
    tokens[random.random((rows, top_k)) < 0.05] = -1
    probs = -np.sort(-random.random((rows, top_k)), axis=1)
    if random.random() < 0.5:
        probs = -np.sort(-random.choice([0.0, 0.125, 0.25, 0.5, 1.0], (rows, top_k)), axis=1)
    return tokens.astype(np.int64), probs.astype(np.float32)


def padded_level(tokens, probs, frontier_len, width):
    """Candidates by graph and place; what stands at places without a node is never to be seen."""
    shape = (len(frontier_len), width, tokens.shape[1])
    all_tokens, all_probs = np.full(shape, 2), np.full(shape, 0.9, np.float32)
    real = np.arange(width) < frontier_len[:, None]
    all_tokens[real], all_probs[real] = tokens, probs
    return tensor(all_tokens), tensor(all_probs, torch.float32)


@MANY
@given(SEEDS)
def test_levels_are_the_cores(random):
    vocab, top_k, width = (int(random.choice(values)) for values in ([2, 3, 5, 9], [1, 2, 3, 4], [1, 3, 6, 12]))
    texts = random_texts(random, vocab)
    count = len(texts)
    longest = int(random.choice([0, 1, 2, 3, 4, 18]))
    graphs, device, _ = started(texts, int(random.choice([1, 2, 7, 20, 66, 130])), longest > 0)
    merge_ngram = np.where(random.random(count) < 0.8, longest, 0).astype(np.int32)
    num_nodes = random.integers(1, 20, count).astype(np.int32)
    theta_sib, theta_prob = float(random.choice([0.0, 0.1, 0.3])), float(random.choice([0.0, 0.05, 0.2]))
    frontier = np.zeros((count, width), np.int32)
    frontier_len = (random.random(count) < 0.9).astype(np.int32)
    most = int(random.choice([1, 4, 40, 70]))
    slots = new_draft_slots(count, graphs.capacity, 6 * width)
    used = torch.zeros(count, dtype=torch.int64)
    masks = torch.zeros(count, graphs.capacity + 1, slots.mask.shape[2], dtype=torch.int64)
    for _ in range(random.integers(1, 6)):
        first_new = graphs.size.copy()
        tokens, probs = random_level(random, frontier_len.sum(), top_k, vocab)
        expected = add_candidates(graphs, frontier, frontier_len, tokens, probs, num_nodes, theta_sib, merge_ngram)
        got = graph_growth.add_candidates(
            device,
            tensor(frontier),
            tensor(frontier_len),
            *padded_level(tokens, probs, frontier_len, width),
            tensor(num_nodes),
            theta_sib,
            tensor(merge_ngram),
            longest,
        )
        assert_equal(graphs, device)
        assert got.tolist() == list(expected)

        room = np.where(random.random(count) < 0.8, most - slots.used, 0).astype(np.int32)
        next_frontier(graphs, first_new, num_nodes, room, np.float32(theta_prob), frontier, frontier_len)
        ours, ours_len = graph_growth.next_frontier(
            device, tensor(first_new), tensor(num_nodes), tensor(room), theta_prob, width
        )
        assert ours_len.tolist() == frontier_len.tolist()
        for row, length in enumerate(frontier_len):
            assert ours[row, :length].tolist() == frontier[row, :length].tolist()
            assert not ours[row, length:].any()
        if (slots.used + frontier_len > 6 * width).any():
            break
        check_level_rows(
            graphs, slots, frontier, frontier_len, graph_growth.level_rows(device, used, masks, ours, ours_len)
        )
        assert used.tolist() == slots.used.tolist()


def check_level_rows(graphs, slots: DraftSlots, frontier, frontier_len, got) -> None:
    rows = int(frontier_len.sum())
    token, depth, slot = np.empty(rows, np.int64), np.empty(rows, np.int32), np.empty(rows, np.int32)
    mask = np.empty((rows, slots.mask.shape[2]), np.int64)
    level_rows(graphs, slots, frontier, frontier_len, token, depth, slot, mask)
    real = np.arange(frontier.shape[1]) < frontier_len[:, None]
    assert np.array_equal(got.real, real)
    for name, expected in {"token": token, "depth": depth, "slot": slot, "mask": mask}.items():
        values = getattr(got, name).numpy()
        assert np.array_equal(values[real], expected), name
        assert not values[~real].any()


# --- n-grams ----------------------------------------------------------------------------------------


def repetitive_texts(random):
    vocab = int(random.choice([1, 2, 4, 8]))
    phrase = random.integers(0, vocab, random.integers(1, 12)).tolist()
    texts = random_texts(random, vocab, 40)
    return [text if random.random() < 0.4 else (phrase * 4 + text[:3] + phrase)[-45:] for text in texts]


@MANY
@given(SEEDS)
def test_longest_matches_are_the_cores(random):
    texts, most, min_match = repetitive_texts(random), int(random.integers(1, 6)), int(random.integers(1, 4))
    _, _, padded = started(texts, 1)
    starts, matched = graph_ngram.longest_matches(
        tensor(padded), tensor([len(text) for text in texts]), min_match, most
    )
    for row, text in enumerate(texts):
        expected = longest_matches(padded[row, : len(text)], min_match, most)
        found = len(expected)
        assert list(zip(starts[row, :found].tolist(), matched[row, :found].tolist(), strict=True)) == expected
        assert not starts[row, found:].any() and not matched[row, found:].any()


def grown(random, texts, capacity, longest):
    """Graphs of some levels, equal on host and device."""
    graphs, device, padded = started(texts, capacity, longest > 0)
    count = len(texts)
    frontier, frontier_len = np.zeros((count, 4), np.int32), np.ones(count, np.int32)
    num_nodes, merge_ngram = np.full(count, 12, np.int32), np.full(count, longest, np.int32)
    for _ in range(random.integers(0, 4)):
        first_new = graphs.size.copy()
        level = random_level(random, frontier_len.sum(), 3, 4)
        add_candidates(graphs, frontier, frontier_len, *level, num_nodes, 0.0, merge_ngram)
        places, place_count = tensor(frontier), tensor(frontier_len)
        level = padded_level(*level, frontier_len, 4)
        graph_growth.add_candidates(
            device, places, place_count, *level, tensor(num_nodes), 0.0, tensor(merge_ngram), longest
        )
        room = np.full(count, 4, np.int32)
        next_frontier(graphs, first_new, num_nodes, room, np.float32(0), frontier, frontier_len)
    return graphs, device, padded


@MANY
@given(SEEDS)
def test_grafts_are_the_cores(random):
    texts, longest = repetitive_texts(random), int(random.choice([0, 1, 2]))
    graphs, device, padded = grown(random, texts, int(random.choice([1, 5, 20, 70])), longest)
    most, min_match = int(random.integers(1, 5)), int(random.integers(1, 4))
    max_depth = random.integers(0, 9, len(texts))
    found = graph_ngram.graft_ngrams(
        device, tensor(padded), tensor([len(text) for text in texts]), most, tensor(max_depth), 9, min_match
    )
    expected = [
        graft_ngrams(graphs, row, padded[row, : len(text)], most, int(max_depth[row]), min_match)
        for row, text in enumerate(texts)
    ]
    assert found.tolist() == expected
    assert_equal(graphs, device._replace(above=device.above[:, :, :0]))


# --- flattening -------------------------------------------------------------------------------------


def random_graphs(random, count, capacity):
    """Acyclic graphs of all origins, with merged edges anywhere."""
    graphs, device, _ = started([[1]] * count, capacity)
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
    for name in ("token", "parent", "depth", "prob", "survival", "origin", "merged"):
        getattr(device, name)[:, :capacity] = tensor(getattr(graphs, name), getattr(device, name).dtype)
    unused = np.arange(capacity) >= graphs.size[:, None]
    device.parent[:, :capacity][tensor(unused, torch.bool)] = NONE
    device.size[:] = tensor(graphs.size)
    return graphs, device


@MANY
@given(SEEDS)
def test_flattened_lists_are_the_cores(random):
    count = int(random.integers(1, 4))
    graphs, device = random_graphs(random, count, int(random.choice([1, 4, 12, 24])))
    num_nodes = random.choice([0, 1, 3, 8, 25], count).astype(np.int32)
    max_depth = random.integers(0, 6, count).astype(np.int32)
    shape = Calibration().factor.shape
    factor = (0.2 + random.random(shape)).astype(np.float32) if random.random() < 0.6 else np.ones(shape, np.float32)
    trust = np.ones((count, NUM_SOURCES), np.float32)
    if random.random() < 0.5:
        trust = (0.2 + random.random(trust.shape)).astype(np.float32)
    expected = flatten(graphs, num_nodes, max_depth, factor, trust)
    got = graph_flatten.flatten_graphs(
        device, 25, tensor(num_nodes), tensor(max_depth), tensor(factor, torch.float32), tensor(trust, torch.float32)
    )
    assert np.array_equal(got.size, expected.size)
    for row, size in enumerate(expected.size):
        for name in ("token", "parent", "depth", "origin", "via_merge", "survival", "value"):
            assert np.array_equal(getattr(got, name)[row, :size], getattr(expected, name)[row, :size]), name
            assert (getattr(got, name)[row, size:] == (NONE if name == "parent" else 0)).all()
        assert np.array_equal(expected.origin[row, :size], graphs.origin[row, expected.node[row, :size]])


def test_bins_begin_where_the_cores_do():
    """Survivals a few roundings away from powers of two, where logarithms are rounded too."""
    factor = ((1 + np.arange(96, dtype=np.float32) / 128) / 2).reshape(4, 3, 8)
    survival = np.float32(2.0) ** -np.arange(9, dtype=np.float32)
    around = [survival]
    for direction in (0.0, 2.0):
        values = survival
        for _ in range(3):
            values = np.nextafter(values, np.float32(direction), dtype=np.float32)
            around.append(values)
    values = np.concatenate(around)
    expected = [calibrated(factor, 0, 1, value) for value in values]
    ones = torch.ones(len(values), dtype=torch.int64)
    got = graph_flatten._calibrated(tensor(factor, torch.float32), 0 * ones, ones, tensor(values, torch.float32))
    assert got.tolist() == expected


@MANY
@given(SEEDS)
def test_row_masks_are_the_cores(random):
    places = int(random.choice([1, 5, 63, 64, 130]))
    parent = np.array([[random.integers(-1, place) for place in range(places)] for _ in range(2)], np.int64)
    rows = np.concatenate([[NONE, *(parent[tree] + 1)] for tree in range(2)]).astype(np.int32)
    starts = np.array([0, 1 + places, 2 + 2 * places], np.int32)
    expected = np.zeros((len(rows), places // 64 + 1), np.int64)
    ancestor_masks(rows, starts, expected)
    assert np.array_equal(graph_flatten.row_masks(tensor(parent)).flatten(0, 1), expected)


# --- nothing is read back ---------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [torch.Tensor.item, torch.nonzero, bool, lambda x: x[x > 0]])
def test_fakes_refuse_what_reads(reads):
    with FakeTensorMode(), torch.device("meta"), pytest.raises(RuntimeError):
        reads(torch.zeros(()) if reads in (torch.Tensor.item, bool) else torch.zeros(3)).sum()


def test_nothing_is_read_from_the_device(monkeypatch):
    """Fake tensors hold nothing: whatever asks for a value, or for a shape that depends on one, raises."""
    count, width, top_k, most = 3, 8, 4, 50
    monkeypatch.setattr(torch.Tensor, "cpu", None)  # the one read that fakes allow
    with FakeTensorMode(), torch.device("meta"):
        length, budgets = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
        texts = torch.empty(count, most, dtype=torch.int32)
        graphs = graph_state.start_graphs(texts, length, 65, merging=True)
        frontier, frontier_len = torch.zeros(count, width, dtype=torch.int64), budgets.clone()
        used, masks = budgets.clone(), torch.zeros(count, 66, 1, dtype=torch.int64)
        for _ in range(3):
            first_new = graphs.size.clone()
            tokens, probs = torch.zeros(count, width, top_k, dtype=torch.int64), torch.zeros(count, width, top_k)
            counts = graph_growth.add_candidates(
                graphs, frontier, frontier_len, tokens, probs, budgets, 0.1, budgets, longest_ngram=2
            )
            frontier, frontier_len = graph_growth.next_frontier(graphs, first_new, budgets, budgets, 0.1, width)
            rows = graph_growth.level_rows(graphs, used, masks, frontier, frontier_len)
        found = graph_ngram.graft_ngrams(graphs, texts, length, top_k, budgets, 5, min_match=2)
        factor, trust = torch.ones(5, 3, 8), torch.ones(count, 5)
        trees = graph_flatten.flatten_graphs(graphs, width, budgets, budgets, factor, trust)
        row_masks = graph_flatten.row_masks(trees.parent)
    assert {value.device.type for value in (*graphs, *rows, *trees, counts, found, row_masks)} == {"meta"}
    assert {tuple(value.shape) for value in trees} == {(count, width), (count,)}
    assert rows.mask.shape == (count, width, 1) and rows.token.shape == frontier.shape == (count, width)
    assert row_masks.shape == (count, 1 + width, 1)
