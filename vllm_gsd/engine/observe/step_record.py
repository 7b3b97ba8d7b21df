"""The record of one step of a traced request. ``docs/inspect.md`` describes its fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_gsd.method.constants import NONE, NUM_SOURCES, ORIGIN_DRAFT, ORIGIN_GRAMMAR, ORIGIN_SHARED
from vllm_gsd.method.graph import GraphBatch
from vllm_gsd.method.outcome import accepted_path

if TYPE_CHECKING:
    from vllm_gsd.engine.verify.step import VerifyStep

ORIGINS = ("root", "draft", "ngram", "grammar", "shared", "agreed")  # by ORIGIN_*
SOURCES = ("native", "merged", "ngram", "shared", "agreed", "grammar")  # by NATIVE ...; NONE, -1, is the last
assert len(SOURCES) == NUM_SOURCES + 1
# Pruned candidates that are recorded per step, most probable first; the others are counted.
MOST_PRUNED = 16

Text = Callable[[int, int], str]  # the text of a token (the second) after another (NONE if unknown)


class Node(NamedTuple):
    """A node of a token graph, as in ``GraphBatch``, or a candidate that became none."""

    token: int
    parent: int
    prob: float
    survival: float
    origin: int
    merged: int = NONE


@dataclass
class Step:
    """What is known of a request's present step."""

    nodes: list[Node] = field(default_factory=list)
    ranked: set[int] = field(default_factory=set)  # nodes that the planner chose from
    candidates: list[tuple[int, int, float]] = field(default_factory=list)  # token, parent and probability
    rows: list[tuple[int, int, int]] = field(default_factory=list)  # token, parent's row and source of verified rows
    path: list[int] = field(default_factory=list)  # accepted rows
    numbers: dict[str, Any] = field(default_factory=dict)  # of the whole batch

    def drafted(self, graphs: GraphBatch, row: int, ranked: np.ndarray) -> None:
        """Copy graph ``row``; ``ranked`` are the nodes of its best places, int32 [n]."""
        size = int(graphs.size[row])
        columns = (
            getattr(graphs, name)[row, :size].tolist() for name in ("token", "parent", "prob", "origin", "merged")
        )
        self.nodes = []
        for token, parent, prob, origin, merged in zip(*columns, strict=True):
            self.nodes.append(Node(token, parent, prob, self._survival(parent, prob), origin, merged))
        self.ranked = set(ranked.tolist())

    def _survival(self, parent: int, prob: float) -> float:
        """The product of probabilities along a path. ``GraphBatch.survival`` leaves out what copies add to them."""
        return prob if parent == NONE else self.nodes[parent].survival * prob

    def ran(self, parents: list[int], tokens: np.ndarray, probs: np.ndarray) -> None:
        """Keep the candidates, int64 and float32 [len(parents), k], of the nodes that the draft model ran."""
        for parent, *candidates in zip(parents, tokens.tolist(), probs.tolist(), strict=True):
            self.candidates += [(token, parent, prob) for token, prob in zip(*candidates, strict=True) if token >= 0]

    def verified(self, step: VerifyStep, request: int, place: int) -> None:
        """Copy the rows that the target verified for a request of the batch, whose walk ended at ``place``."""
        rows = slice(*step.trees.starts[request : request + 2].tolist())
        columns = (step.trees.token[rows], step.trees.parent[rows], step.source[rows])
        self.rows = list(zip(*(column.tolist() for column in columns), strict=True))
        self.path = accepted_path(columns[1], place)

    def record(self, tokens: Sequence[int], texts: list[str], text: Text) -> dict[str, Any]:
        """The fields of the record.

        Args:
            tokens: what the request emitted: the tokens of the accepted rows, and the one that the target chose next.
            texts: their texts.
            text: gives the text of any other token.
        """
        nodes, pruned = self._nodes_of_rows(), self._pruned()
        path = [*self.path, *[NONE] * len(tokens)][: len(tokens)]
        line = {row: line for line, row in enumerate(nodes)}  # rows that have a node; the root's is 0
        verified = [(row, *self.rows[row]) for row in nodes if row]
        return {
            "tokens": {
                "token": list(tokens),
                "text": texts,
                "node": [nodes.get(row, NONE) for row in path],
                "source": ["target" if row == NONE else SOURCES[self.rows[row][2]] for row in path],
            },
            "graph": self._graph(set(nodes.values()), {nodes.get(row, 0) for row in self.path} | {0}, pruned, text),
            "pruned": len(pruned),
            "verified": {
                "node": [nodes[row] for row, *_ in verified],
                "parent": [line[parent] - 1 for _, _, parent, _ in verified],
                "source": [SOURCES[source] for *_, source in verified],
                "accepted": [row in self.path for row, *_ in verified],
            },
            **self.numbers,
        }

    def _nodes_of_rows(self) -> dict[int, int]:
        """The node of each verified row that has one, in order. Nodes that the grammar added join the graph."""
        of_row = {0: 0}
        children = {(node.parent, node.token): index for index, node in enumerate(self.nodes)}
        for row, (token, parent, _) in enumerate(self.rows):
            if row == 0 or parent not in of_row or not self.nodes:
                continue
            above = of_row[parent]
            above = above if self.nodes[above].merged == NONE else self.nodes[above].merged
            if (above, token) not in children:
                children[above, token] = len(self.nodes)
                self.nodes.append(Node(token, above, 1.0, self.nodes[above].survival, ORIGIN_GRAMMAR))
            of_row[row] = children[above, token]
        return of_row

    def _pruned(self) -> list[Node]:
        """The candidates that became no node, most probable first."""
        edges = {(node.token, node.parent) for node in self.nodes}
        found = [
            Node(token, parent, prob, self._survival(parent, prob), ORIGIN_DRAFT)
            for token, parent, prob in self.candidates
            if (token, parent) not in edges
        ]
        return sorted(found, key=lambda node: -node.survival)

    def _graph(self, verified: set[int], accepted: set[int], pruned: list[Node], text: Text) -> dict[str, list]:
        """The columns of the graph. Copies from other requests are blanked unless the target chose them."""
        sets = (("accepted", accepted), ("verified", verified), ("cut", self.ranked))
        states = [next((name for name, its in sets if index in its), "left out") for index in range(len(self.nodes))]
        pruned = pruned[:MOST_PRUNED]
        nodes, states = [*self.nodes, *pruned], [*states, *["pruned"] * len(pruned)]
        tokens = [
            None if node.origin == ORIGIN_SHARED and state != "accepted" else node.token
            for node, state in zip(nodes, states, strict=True)
        ]
        before = [NONE if node.parent == NONE else tokens[node.parent] for node in nodes]
        return {
            "token": tokens,
            "text": [
                "" if token is None else text(NONE if left is None else left, token)
                for left, token in zip(before, tokens, strict=True)
            ],
            "parent": [node.parent for node in nodes],
            "prob": [float(f"{node.prob:.4g}") for node in nodes],
            "survival": [float(f"{node.survival:.4g}") for node in nodes],
            "origin": [ORIGINS[node.origin] for node in nodes],
            "merged": [node.merged for node in nodes],
            "state": states,
        }
