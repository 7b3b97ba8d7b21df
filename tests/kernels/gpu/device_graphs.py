"""Random graphs on the host and on the device, which are to stay equal, bit for bit."""

import numpy as np
import torch

from vllm_gsd.method.constants import MAX_CONTEXT, MERGED, NONE, OFF_BELOW
from vllm_gsd.method.draft_level import level_rows, new_draft_slots
from vllm_gsd.method.graph import new_graphs, reset
from vllm_gsd.method.growth import add_candidates, next_frontier
from vllm_gsd.ops.flatten.api import DeviceTrees
from vllm_gsd.ops.growth import state
from vllm_gsd.ops.growth.api import Limits, begin, grow_level

BLOCK_SIZE, LENGTH = 4, 64


def tensor(values, device, dtype=None):
    of = torch.from_numpy(np.ascontiguousarray(values)).to(device)
    return of if dtype is None else of.to(dtype)


def random_texts(random, vocab, most=24):
    return [random.integers(0, vocab, random.integers(1, most)).tolist() for _ in range(random.integers(1, 4))]


class Pair:
    """The same graphs on the host and on the device, from lone roots on."""

    def __init__(self, device, random, texts, capacity=60, num_nodes=8, merge_ngram=2, top_k=3, **limits):
        self.device, self.random, self.count = device, random, len(texts)
        self.num_nodes, self.merge_ngram = num_nodes, merge_ngram
        self.host = new_graphs(self.count, capacity)
        self.texts = np.full((self.count, LENGTH), 1, np.int32)  # what lies behind a text is another's
        for row, text in enumerate(texts):
            reset(self.host, row, np.array(text[-MAX_CONTEXT - 1 :], np.int64))
            self.texts[row, : len(text)] = text
        self.length = np.array([len(text) for text in texts])
        self.limits = Limits(**{
            "top_k": top_k, "theta_sib": 0.0, "theta_prob": 0.0, "max_length": LENGTH, "max_positions": LENGTH,
            "max_slots": 6 * num_nodes, "shift": 0, **limits,
        })  # fmt: skip
        self.graphs = state.new_graphs(self.count, capacity, num_nodes, merge_ngram, self.limits.max_slots, device)
        self.block_table = self.random.permutation(self.count * 40).astype(np.int32).reshape(self.count, 40)
        self.factor = np.ones((5, 3, 8), np.float32)
        self.trust = np.ones((self.count, 5), np.float32)
        self.merges = self.random.random(self.count) < 0.8
        self.trust[~self.merges, MERGED] = OFF_BELOW / 2
        self.slots = new_draft_slots(self.count, capacity, self.limits.max_slots)
        # Of a request: whether to draft, tokens with draft KV, KV slots, most tokens.
        whole = np.ones(self.count, np.int64)
        self.known = np.stack([np.arange(self.count), whole, self.length - 1, 160 * whole, LENGTH * whole], 1)
        self.draft_length = torch.zeros(self.count, dtype=torch.int64, device=device)
        self.last = torch.zeros(self.count, dtype=torch.int64, device=device)

    def begin(self, width=4):
        """Reset the device's graphs; returns the rows of text."""
        known = state.Known(
            tensor(self.known, self.device, torch.int32), tensor(self.trust, self.device),
            tensor(self.factor, self.device),
        )  # fmt: skip
        rows = state.new_rows(self.count, width, -(-width // 64), self.device)
        begin(
            self.graphs, rows, self.last, known, tensor(self.texts, self.device),
            tensor(self.length, self.device, torch.int32), self.draft_length, tensor(self.block_table, self.device),
            BLOCK_SIZE, self.limits,
        )  # fmt: skip
        self.frontier = np.zeros((self.count, self.num_nodes), np.int32)
        self.frontier_len = self.graphs.state[:, state.FRONTIER].cpu().numpy()
        return rows

    def level(self, vocab, width, next_width):
        """Grow a level on both; returns the counts of the host, and the rows of the device."""
        top_k, drawn = self.limits.top_k, self.random
        shape = (self.count, width, top_k)
        tokens = np.array([drawn.permutation(max(vocab, top_k))[:top_k] for _ in range(self.count * width)])
        tokens = tokens.reshape(shape).astype(np.int64)
        tokens[drawn.random(shape) < 0.05] = NONE
        probs = drawn.random(shape) if drawn.random() < 0.5 else drawn.choice([0.0, 0.125, 0.25, 0.5, 1.0], shape)
        probs = -np.sort(-probs, axis=2).astype(np.float32)
        real = np.arange(width) < self.frontier_len[:, None]
        budgets = np.full(self.count, self.num_nodes, np.int32)
        first_new = self.host.size.copy()
        added, merged, pruned = add_candidates(
            self.host, self.frontier, self.frontier_len, tokens[real], probs[real], budgets, self.limits.theta_sib,
            np.where(self.merges, self.merge_ngram, 0).astype(np.int32),
        )  # fmt: skip
        invalid = int((probs[real][:, 0] == 0).sum())
        rows = state.new_rows(self.count, next_width, self.slots.mask.shape[2], self.device) if next_width else None
        self.graphs.counts.zero_()
        grow_level(
            self.graphs, rows, tensor(tokens, self.device), tensor(probs, self.device),
            tensor(self.block_table, self.device), BLOCK_SIZE, self.limits,
        )  # fmt: skip
        if next_width:
            room = np.minimum(self.known[:, 3] - self.length + self.limits.shift, self.limits.max_slots)
            deep = self.graphs.state[:, state.DEEPEST].cpu().numpy() > self.host.depth[:, : self.host.capacity].max()
            room = np.where(deep | (first_new == self.host.size), room - self.slots.used, 0).astype(np.int32)
            chosen = np.zeros((self.count, next_width), np.int32)
            theta = np.float32(self.limits.theta_prob)
            next_frontier(self.host, first_new, budgets, room, theta, chosen, self.frontier_len)
            self.frontier = chosen
        drafted = int(self.frontier_len.sum()) if next_width else 0
        return [added, merged, pruned, drafted, invalid], rows

    def host_rows(self):
        """Token, depth, slot and mask of the frontier's nodes; slots are taken."""
        rows = int(self.frontier_len.sum())
        token, depth, slot = np.empty(rows, np.int64), np.empty(rows, np.int32), np.empty(rows, np.int32)
        mask = np.empty((rows, self.slots.mask.shape[2]), np.int64)
        level_rows(self.host, self.slots, self.frontier, self.frontier_len, token, depth, slot, mask)
        return token, depth, slot, mask

    def physical(self, row, index):
        """KV slots of logical indices of a request."""
        return self.block_table[row, index // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + index % BLOCK_SIZE

    def grow(self, vocab, levels):
        """Grow some levels, without looking."""
        width = 1
        for _ in range(levels):
            following = min(self.num_nodes, width * self.limits.top_k)
            self.level(vocab, width, following)
            if (self.slots.used + self.frontier_len > self.limits.max_slots).any():
                break
            self.host_rows()
            width = following

    def check(self, above=False):
        """Assert that both hold the same."""
        from reference_graph import can_reach, read_graph

        nodes, chances = self.graphs.nodes.cpu().numpy(), self.graphs.chances.cpu().numpy()
        assert self.graphs.state[:, state.SIZE].tolist() == self.host.size.tolist()
        for row, size in enumerate(self.host.size):
            for name in ("token", "parent", "depth", "origin", "merged"):
                got = nodes[row, getattr(state, name.upper()), :size]
                assert np.array_equal(got, getattr(self.host, name)[row, :size]), name
            for place, name in enumerate(("prob", "survival")):
                assert np.array_equal(chances[row, place, :size], getattr(self.host, name)[row, :size]), name
            if above and self.merge_ngram:
                words = self.graphs.above[row].cpu().numpy()
                natives = [node for node in read_graph(self.host, row) if node.merged is None]
                for node in natives:
                    reaching = [other.index for other in natives if can_reach(other, node)]
                    bits = [j for j in range(size) if words[j // 64, node.index] >> (j % 64) & 1]
                    assert [j for j in bits if self.host.merged[row, j] == NONE] == reaching


def empty_trees(count, num_nodes, device):
    whole = torch.full((count, 1 + num_nodes), 7, dtype=torch.int64, device=device)
    parts = [whole.clone() for _ in range(4)] + [whole.bool(), whole.float(), whole.float()]
    return DeviceTrees(*parts, size=whole[:, 0].clone())
