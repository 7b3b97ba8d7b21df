"""The record of one step of a traced request. ``docs/inspect.md`` describes its fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_gsd.engine.verify.step import VerifyStep
from vllm_gsd.method.constants import NONE, NUM_SOURCES, ORIGIN_GRAMMAR, ORIGIN_SHARED
from vllm_gsd.method.graph import GraphBatch
from vllm_gsd.method.outcome import accepted_path

ORIGINS = ("root", "draft", "ngram", "grammar", "shared", "agreed")  # by ORIGIN_*
SOURCES = ("native", "merged", "ngram", "shared", "agreed", "grammar")  # by NATIVE ...; NONE, -1, is the last
assert len(SOURCES) == NUM_SOURCES + 1
# Pruned candidates that are recorded per step, most probable first; the others are counted.
MOST_PRUNED = 16

Text = Callable[[int, int], str]  # the text of a token after another
_COLUMNS = ("token", "parent", "prob", "survival", "origin", "merged")


@dataclass
class Candidates:
    """The draft model's candidates of one level for one graph."""

    nodes: list[int]  # the nodes that were run
    tokens: np.ndarray  # int64 [nodes, k]
    probs: np.ndarray  # float32 [nodes, k]


@dataclass
class Step:
    """What happened to a request between two proposals, as far as it is known."""

    graph: dict[str, list] | None = None  # columns of the token graph
    ranked: list[int] = field(default_factory=list)  # nodes among which the planner chose, best place first
    levels: list[Candidates] = field(default_factory=list)
    rows: list[tuple[int, int, int]] = field(default_factory=list)  # token, parent row and source of verified rows
    path: list[int] = field(default_factory=list)  # accepted rows
    numbers: dict[str, Any] = field(default_factory=dict)  # of the whole batch

    def drafted(self, graphs: GraphBatch, row: int, ranked: np.ndarray) -> None:
        """Copy graph ``row``; ``ranked`` are the nodes of its best places, int32 [n]."""
        size = int(graphs.size[row])
        self.graph = {name: getattr(graphs, name)[row, :size].tolist() for name in _COLUMNS}
        self.ranked = ranked.tolist()

    def verified(self, step: VerifyStep, index: int, place: int) -> None:
        """Copy the rows that the target verified for request ``index``, whose walk ended at ``place``."""
        rows = slice(*step.trees.starts[index : index + 2].tolist())
        parents = step.trees.parent[rows]
        self.rows = list(zip(step.trees.token[rows].tolist(), parents.tolist(), step.source[rows].tolist(), strict=True))
        self.path = accepted_path(parents, place)

    def record(self, tokens: Sequence[int], texts: list[str], text: Text) -> dict[str, Any]:
        """The fields of the record, given the tokens that the request emitted.

        Args:
            tokens: emitted tokens: those of the accepted rows, and the one that the target chose after them.
            texts: their texts.
            text: gives the text of any other token.
        """
        nodes = self._nodes_of_rows()
        graph, pruned = self.graph, self._pruned()
        accepted = {nodes[row] for row in self.path}
        path = [*self.path, *[NONE] * len(tokens)][: len(tokens)]
        return {
            "tokens": {
                "token": list(tokens),
                "text": texts,
                "node": [NONE if row == NONE else nodes[row] for row in path],
                "source": ["target" if row == NONE else SOURCES[self.rows[row][2]] for row in path],
            },
            "graph": None if graph is None else _columns(graph, self._states(nodes, accepted), pruned[:MOST_PRUNED], text),
            "pruned": len(pruned),
            "verified": {
                "node": list(nodes.values())[1:],
                "parent": [list(nodes).index(self.rows[row][1]) - 1 for row in list(nodes)[1:]],
                "source": [SOURCES[self.rows[row][2]] for row in list(nodes)[1:]],
                "accepted": [row in set(self.path) for row in list(nodes)[1:]],
            },
            **self.numbers,
        }

    def _nodes_of_rows(self) -> dict[int, int]:
        """The graph's node of each verified row; the root's row is 0. Nodes that the grammar added join the graph."""
        nodes = {0: 0}
        if self.graph is None:
            return nodes
        graph = self.graph
        children = {edge: node for node, edge in enumerate(zip(graph["parent"], graph["token"], strict=True))}
        for row, (token, parent, _) in enumerate(self.rows[1:], start=1):
            if parent not in nodes:
                continue  # a row without a node
            above = nodes[parent]
            above = above if graph["merged"][above] == NONE else graph["merged"][above]
            node = children.get((above, token))
            if node is None:
                node = children[above, token] = len(graph["token"])
                added = (token, above, 1.0, graph["survival"][above], ORIGIN_GRAMMAR, NONE)
                for name, value in zip(_COLUMNS, added, strict=True):
                    graph[name].append(value)
            nodes[row] = node
        return nodes

    def _states(self, nodes: dict[int, int], accepted: set[int]) -> list[str]:
        verified, cut = set(nodes.values()), set(self.ranked)
        assert self.graph is not None
        return [
            "accepted" if node in accepted or node == 0 else
            "verified" if node in verified else
            "cut" if node in cut else "left out"
            for node in range(len(self.graph["token"]))
        ]  # fmt: skip

    def _pruned(self) -> list[tuple[int, int, float, float]]:
        """Token, parent, probability and survival of the candidates that became no node, most probable first."""
        if self.graph is None:
            return []
        edges = set(zip(self.graph["parent"], self.graph["token"], strict=True))
        survival = self.graph["survival"]
        found = [
            (token, node, prob, survival[node] * prob)
            for level in self.levels
            for node, tokens, probs in zip(level.nodes, level.tokens.tolist(), level.probs.tolist(), strict=True)
            for token, prob in zip(tokens, probs, strict=True)
            if token >= 0 and (node, token) not in edges
        ]
        return sorted(found, key=lambda candidate: -candidate[3])


def _columns(
    graph: dict[str, list], states: list[str], pruned: list[tuple[int, int, float, float]], text: Text
) -> dict[str, list]:
    """The graph's columns with readable values. Copies from other requests are blanked unless the target chose them."""
    hidden = [
        origin == ORIGIN_SHARED and state != "accepted" for origin, state in zip(graph["origin"], states, strict=True)
    ]
    tokens = [None if hide else token for token, hide in zip(graph["token"], hidden, strict=True)]
    extra_tokens, extra_parents, extra_probs, extra_survivals = map(list, zip(*pruned, strict=True)) if pruned else ([],) * 4
    tokens = [*tokens, *extra_tokens]
    parents = [*graph["parent"], *extra_parents]
    count = len(extra_tokens)
    return {
        "token": tokens,
        "text": [
            "" if token is None else text(tokens[parent] if parent >= 0 and tokens[parent] is not None else NONE, token)
            for token, parent in zip(tokens, parents, strict=True)
        ],
        "parent": parents,
        "prob": [float(f"{prob:.4g}") for prob in [*graph["prob"], *extra_probs]],
        "survival": [float(f"{survival:.4g}") for survival in [*graph["survival"], *extra_survivals]],
        "origin": [*(ORIGINS[origin] for origin in graph["origin"]), *["draft"] * count],
        "merged": [*graph["merged"], *[NONE] * count],
        "state": [*states, *["pruned"] * count],
    }
