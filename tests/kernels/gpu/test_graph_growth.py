"""What of growing graphs the kernels do: equal to the plain code, which tests/property holds against ``core``."""

import pytest
import torch

from vllm_gsd.ops.flatten import api as graph_flatten
from vllm_gsd.ops.growth import api as graph_growth
from vllm_gsd.ops.growth.state import bits, start_graphs
from vllm_gsd.ops.ngram import api as graph_ngram

TIES = (0.0, 0.125, 0.25, 0.5, 0.5, 1.0)


class Case:
    """Random graphs, the same for the same seed."""

    def __init__(self, seed: int, device: torch.device):
        self.device, self.random = device, torch.Generator().manual_seed(seed)
        self.count, self.vocabulary = 1 + seed % 3, (2, 3, 5, 8)[seed % 4]
        self.capacity = (1, 7, 33, 64, 130)[seed % 5]
        self.longest = (1, 2, 3, 18)[seed // 2 % 4]
        self.texts = self.draw(self.vocabulary, self.count, 40).int()
        self.texts[:, 20:30] = self.texts[:, :10]
        self.length = self.draw(31, self.count) + 1
        self.graphs = start_graphs(self.texts, self.length, self.capacity, merging=True)

    def draw(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.random).to(self.device)

    def probs(self, *shape: int) -> torch.Tensor:
        """Half of the time with many equal ones."""
        values = torch.rand(shape, generator=self.random)
        if int(torch.randint(2, (), generator=self.random)):
            values = torch.tensor(TIES)[torch.randint(len(TIES), shape, generator=self.random)]
        return values.to(self.device)

    def grow(self, levels: int) -> list[int]:
        frontier, frontier_len = self.draw(1, self.count, 1), torch.ones_like(self.length)
        budget, merging = self.draw(20, self.count) + 1, torch.where(self.draw(5, self.count) > 0, self.longest, 0)
        counted = []
        for _ in range(levels):
            first_new = self.graphs.size.clone()
            shape = (*frontier.shape, 3)
            counts = graph_growth.add_candidates(
                self.graphs,
                frontier,
                frontier_len,
                self.draw(self.vocabulary, *shape),
                self.probs(*shape).sort(descending=True).values,
                budget,
                0.1,
                merging,
                self.longest,
            )
            counted += counts.tolist()
            frontier, frontier_len = graph_growth.next_frontier(self.graphs, first_new, budget, budget, 0.01, 6)
        return counted

    def graft(self) -> list[int]:
        most = self.draw(9, self.count)
        return graph_ngram.graft_ngrams(self.graphs, self.texts, self.length, 4, most, 8, min_match=1).tolist()

    def flatten(self, places: int):
        nodes, depth = self.draw(places + 1, self.count), self.draw(7, self.count)
        sources = graph_flatten.NUM_SOURCES
        factor, trust = 0.2 + self.probs(sources, 3, 8), 0.2 + self.probs(self.count, sources)
        return graph_flatten.flatten_graphs(self.graphs, places, nodes, depth, factor, trust)


def facts(graphs, above: bool):
    """All that is in use of some graphs."""
    found = []
    for row, size in enumerate(graphs.size.tolist()):
        names = ("token", "parent", "depth", "prob", "survival", "origin", "merged")
        found.append([getattr(graphs, name)[row, :size].tolist() for name in names])
        if above:
            native = graphs.merged[row, :size] == -1
            reaching = bits(graphs.above[row, :size])[:, :size]
            found.append(reaching[native][:, native].tolist())
    return found


@pytest.mark.parametrize("seed", range(40))
def test_growth(device, monkeypatch, seed):
    results = []
    for plain in (True, False):
        for module in (graph_growth, graph_ngram, graph_flatten):
            monkeypatch.setattr(module, "use_triton", lambda *_, plain=plain, **__: not plain)
        case = Case(seed, device)
        counted = case.grow(seed % 5)
        grown = facts(case.graphs, above=True)
        found = case.graft()
        results.append((counted, grown, found, facts(case.graphs, above=False), case.flatten(17)))
    (*plain_facts, plain_trees), (*our_facts, our_trees) = results
    assert our_facts == plain_facts
    for name, got, wanted in zip(plain_trees._fields, our_trees, plain_trees, strict=True):
        assert torch.equal(got, wanted), name


@pytest.mark.parametrize("places", [1, 5, 63, 64, 130])
def test_row_masks(device, monkeypatch, places):
    random = torch.Generator().manual_seed(places)
    drawn = [[int(torch.randint(-1, max(1, place), (), generator=random)) for place in range(places)] for _ in "ab"]
    parent = torch.tensor(drawn, device=device)
    ours = graph_flatten.row_masks(parent)
    monkeypatch.setattr(graph_flatten, "use_triton", lambda *_, **__: False)
    assert torch.equal(ours, graph_flatten.row_masks(parent))


def test_bins_begin_where_the_plain_code_has_them(device, monkeypatch):
    """Survivals a rounding away from a power of two, each with a factor of its own."""
    powers = 2.0 ** -torch.arange(9, dtype=torch.float32)
    values = powers.clone()
    around = [values]
    for direction in (0.0, 2.0):
        values = powers
        for _ in range(3):
            values = torch.nextafter(values, torch.tensor(direction))
            around.append(values)
    probs = torch.cat(around).clamp(max=1.0).to(device)
    trees = []
    for plain in (True, False):
        monkeypatch.setattr(graph_flatten, "use_triton", lambda *_, plain=plain, **__: not plain)
        length = torch.ones(len(probs), dtype=torch.int64, device=device)
        graphs = start_graphs(torch.ones(len(probs), 1, dtype=torch.int64, device=device), length, 2, merging=False)
        graphs.prob[:, 1], graphs.survival[:, 1], graphs.parent[:, 1], graphs.size[:] = probs, probs, 0, 2
        factor = (1 + torch.arange(120.0, device=device) / 128).view(5, 3, 8) / 2
        trust = torch.ones(len(probs), 5, device=device)
        trees.append(graph_flatten.flatten_graphs(graphs, 1, length, length, factor, trust))
    assert torch.equal(trees[0].value, trees[1].value)
