"""How many tokens graphs of a draft give: the probability of every node of an average graph.

A node at depth d that is the j-th best child of its parent is accepted, once its parent is, with probability
``depth[d] * sibling[j]``. Sequoia (Chen et al. 2024) assumes the same of its trees, without the factor by depth.
"""

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Acceptance:
    """Conditional probabilities of the children of an accepted node."""

    depth: np.ndarray  # float64 [max_depth], of the best child at each depth
    sibling: np.ndarray  # float64 [top_k], of the best, second best... child relative to the best one; the first is 1

    def graph(self, top_k: int, max_depth: int, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
        """The best graph of at most ``num_nodes`` nodes.

        Returns:
            probabilities of its nodes, float64 [n], descending, and their depths, int64 [n], 0 below the root.
        """
        chances, depths = [np.zeros(0)], [np.zeros(0, np.int64)]
        parents = np.ones(1)
        for depth, first in enumerate(self.depth[:max_depth]):
            children = np.outer(parents, first * self.sibling[:top_k]).ravel()
            parents = np.sort(children)[::-1][:num_nodes]  # no other can be among the best nodes
            chances.append(parents)
            depths.append(np.full(len(parents), depth))
        chance, at = np.concatenate(chances), np.concatenate(depths)
        order = np.argsort(-chance, kind="stable")[:num_nodes]
        return chance[order], at[order]


def level_rows(depths: np.ndarray, levels: int) -> np.ndarray:
    """Rows of each draft level that a graph with nodes at these depths needs, float64 [levels].

    A level runs the nodes whose children may be in the graph; there are at most as many as it has nodes of their depth.
    """
    rows = [1.0] + [float(np.count_nonzero(depths == depth)) for depth in range(levels - 1)]
    after = [float(np.count_nonzero(depths == depth)) for depth in range(levels)]
    return np.minimum(rows, np.maximum(1.0, after))


def fitted(by_depth: list[float], children: np.ndarray, top_k: int, num_nodes: int) -> Acceptance:
    """The acceptance whose best graph is accepted by depth as measured.

    Args:
        by_depth: share of graphs with an accepted node at depth 1, 2, ...
        children: float64 [k], the draft's average probabilities of the best, second best... child.
        top_k: limit of the graphs that were measured; num_nodes: their mean number of verified nodes.
    """
    measured = np.maximum(np.array(by_depth), 1e-4)
    found = Acceptance(np.full(len(measured), 0.5), children / children[0])
    # What a depth gives depends on the depths above it as well, so the conditional shares are compared, in small steps:
    # a graph of few nodes may not reach every depth.
    wanted = measured / np.append(1.0, measured[:-1])
    for _ in range(200):
        chances, depths = found.graph(top_k, len(measured), num_nodes)
        given = np.maximum(np.bincount(depths, chances, len(measured)), 1e-9)
        ratio = np.clip(wanted * np.append(1.0, given[:-1]) / given, 0.8, 1.25)
        found = replace(found, depth=np.clip(found.depth * np.sqrt(ratio), 1e-4, 1.0))
    # The planner verifies more nodes of some graphs than of others, so the average graph misses deep ones. Their tokens
    # count all the same.
    for _ in range(50):
        total = found.graph(top_k, len(measured), num_nodes)[0].sum()
        found = replace(found, depth=np.clip(found.depth * np.sqrt(measured.sum() / total), 1e-4, 1.0))
    return found
