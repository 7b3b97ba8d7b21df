"""Growing graphs on the device: node by node what the specification grows, over random batches.

Among them are equal probabilities, missing candidates, full graphs, merges, chains and requests that may not draft.
"""

import numpy as np
import pytest
from device_graphs import LENGTH, Pair, random_texts

from vllm_gsd.method.constants import NONE
from vllm_gsd.ops.growth import state


def drawn(random, *values):
    return [random.choice(of).item() for of in values]


@pytest.mark.parametrize("seed", range(40))
def test_levels_are_the_specifications(device, seed):
    random = np.random.default_rng([seed, 11])
    vocab, top_k, num_nodes = drawn(random, [2, 3, 5, 9], [1, 2, 3, 4], [1, 3, 6, 12])
    merge_ngram, capacity = drawn(random, [0, 1, 2, 3, 4, 16], [1, 2, 7, 20, 66, 130])
    pair = Pair(
        device, random, random_texts(random, vocab), capacity, num_nodes, merge_ngram, top_k,
        theta_sib=float(random.choice([0.0, 0.1, 0.3])), theta_prob=float(random.choice([0.0, 0.05, 0.2])),
    )  # fmt: skip
    pair.known[random.random(pair.count) < 0.1, 1] = 0
    pair.known[:, 3] = pair.length + random.choice([3, 40, 70], pair.count)
    pair.known[:, 4] = pair.length + random.choice([2, 4, 30], pair.count)
    pair.begin()
    pair.check()
    width = 1
    for level in range(random.integers(1, 6)):
        following = min(num_nodes, width * top_k) if level < 4 else 0
        counts, rows = pair.level(vocab, width, following)
        pair.check(above=True)
        assert pair.graphs.counts.tolist() == counts
        if not following or (pair.slots.used + pair.frontier_len > pair.limits.max_slots).any():
            break
        check_rows(pair, rows, width)
        width = following


def check_rows(pair, rows, width_before):
    token, depth, slot, mask = pair.host_rows()
    assert pair.graphs.state[:, state.FRONTIER].tolist() == pair.frontier_len.tolist()
    assert pair.graphs.state[:, state.USED].tolist() == pair.slots.used.tolist()
    width = pair.frontier.shape[1]
    real = (np.arange(width) < pair.frontier_len[:, None]).flatten()
    row = np.repeat(np.arange(pair.count), width)[real]
    got = [of.cpu().numpy() for of in rows]
    assert np.array_equal(got[0][real], token) and np.array_equal(got[3][real], mask)
    assert np.array_equal(got[1][real], np.minimum(pair.length[row] - 1 + depth, LENGTH - 1))
    assert np.array_equal(got[2][real], pair.physical(row, pair.length[row] + slot))
    assert (got[2][~real] == -1).all() and not any(got[of][~real].any() for of in (0, 1, 3))
    assert np.array_equal(got[4], np.where(pair.frontier_len > 0, pair.length, 0))
    node = pair.frontier.flatten()[real]
    # The parents stood in the same order in the frontier before.
    lines = pair.graphs.nodes[:, state.LINE].cpu().numpy()
    assert np.array_equal(got[5][real], row * width_before + lines[row, pair.host.parent[row, node]])
    assert np.array_equal(lines[row, node], np.tile(np.arange(width), pair.count)[real])


@pytest.mark.parametrize("seed", range(12))
def test_catching_up(device, seed):
    """Rows of the tokens without draft KV, each attending those before it; then the root is drafted from."""
    random = np.random.default_rng([seed, 12])
    texts = random_texts(random, 9)
    shift, width = int(random.integers(0, 2)), int(random.choice([3, 17, 70]))
    pair = Pair(device, random, texts, shift=shift, max_positions=int(random.choice([20, LENGTH])))
    done = np.maximum(pair.length - shift - random.integers(0, 8, pair.count), 0)
    only_device = random.random(pair.count) < 0.5
    pair.known[:, 2] = np.where(only_device, NONE, done)
    pair.draft_length[:] = pair.draft_length.new_tensor(done)
    pair.known[:, 1] = random.choice([0, 1, 1, 1, 2], pair.count)  # 2 is for copies only
    padding = random.random(pair.count) < 0.2
    pair.known[padding, 0] = NONE
    rows = [of.cpu().numpy().reshape(pair.count, -1) for of in pair.begin(width)]
    for row, text in enumerate(texts):
        base = len(text) - shift
        wanted = pair.known[row, 1] == 1 and not padding[row]
        fresh = max(0, min(width, min(base, pair.limits.max_positions) - done[row])) if wanted else 0
        at = done[row] + np.arange(fresh)
        assert rows[0][row].tolist() == [text[i + shift] for i in at] + [0] * (width - fresh)
        assert rows[1][row].tolist() == at.tolist() + [0] * (width - fresh)
        assert rows[2][row].tolist() == pair.physical(row, at).tolist() + [-1] * (width - fresh)
        masks = rows[3][row].reshape(width, -1)
        for place, words in enumerate(masks):
            bits = [j for j in range(64 * len(words)) if int(words[j // 64]) >> (j % 64) & 1]
            assert bits == (list(range(place + 1)) if place < fresh else [])
        assert rows[4][row] == (done[row] if fresh else 0)
        before = at - 1 + shift
        expected = np.where(before < 0, -1, pair.physical(row, np.maximum(before, 0)))
        assert rows[5][row].tolist() == expected.tolist() + [-1] * (width - fresh)
        assert pair.last[row] == row * width + max(fresh - 1, 0)
        if not padding[row]:
            assert pair.draft_length[row] == done[row] + fresh
        drafts = fresh > 0 and done[row] + fresh == base
        assert pair.graphs.state[row, state.FRONTIER] == drafts
