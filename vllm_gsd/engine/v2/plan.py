"""What ``"budget": "auto"`` decides on Model Runner V2, with the planner of both runners.

Only the device knows the graphs of the step under way, so the plan is made with the latest graphs that have arrived on
the host, a step or two old: their values stand for those of the next graphs. Whatever it decides is lossless, because
every share of a graph is a valid tree. Each request has its own share. If full CUDA graphs of the target were captured,
all requests get the same one of the shares that were captured. The draft phase runs as many levels as the planner would
add one by one to the latest graphs; CUDA graphs of it were captured for a few numbers of levels. Tensor-parallel ranks
decide alike: they learn of the same graphs at the same time, and use the first rank's clock.
"""

from typing import NamedTuple

import numpy as np
import torch

from vllm_gsd.engine.draft.batch import DraftBatch
from vllm_gsd.engine.draft.copies import COPIED
from vllm_gsd.engine.draft.limits import TOO_LONG
from vllm_gsd.engine.speculation import Speculation
from vllm_gsd.method.constants import ORIGIN_AGREED, ORIGIN_DRAFT
from vllm_gsd.ops.flatten.api import DeviceTrees

# What a request gets of a draft phase.
NO_GRAPH, DRAFTED, COPIES_ONLY = range(3)


class Phase(NamedTuple):
    """A draft phase, as the planner learns from its graphs later."""

    num_drafted: int = 0  # requests that the draft model ran for
    levels: int | None = None  # how many it drafted; None for all
    alone: bool = False  # whether the drafted graphs got no copies
    invalid: bool = False  # whether the draft gave rows without a softmax to graphs that grew on the host


class Plan:
    """Chooses whom to draft for, and how many nodes of each graph to verify. The numbers are upper limits."""

    def __init__(self, speculation: Speculation, num_slots: int, num_nodes: int, num_levels: int) -> None:
        self.speculation = speculation
        self.num_nodes = num_nodes
        self.levels = list(range(1, num_levels + 1))  # the numbers of levels that the planner chooses from
        self.most = num_nodes  # how many nodes the scheduler gives each request in the next step
        # The numbers of nodes for which full CUDA graphs of the target were captured, and 0; empty without them.
        self.captured: list[int] = []
        # By slot, how many nodes of the next graph are verified.
        self.shares = np.full(num_slots, num_nodes, np.int64)
        self.widest = num_nodes  # the largest share in the latest batch
        self.kinds = np.full(num_slots, NO_GRAPH, np.int64)  # of the next graph
        self.phase = Phase()  # the latest one
        # By slot, the latest graph that has arrived: what kind it was, and its nodes, best first.
        self.seen = np.full(num_slots, NO_GRAPH, np.int64)
        self.size = np.zeros(num_slots, np.int32)
        self.value = np.zeros((num_slots, num_nodes), np.float32)
        self.copied = np.zeros((num_slots, num_nodes), np.bool_)
        self.drafted = np.zeros((num_slots, num_nodes), np.bool_)  # nodes that the draft found may be copied too
        self.depth = np.zeros((num_slots, num_nodes), np.int64)  # 1 for a child of the root

    @property
    def active(self) -> bool:
        """Whether there are costs to plan by."""
        return self.speculation.planner.costs is not None

    def forget(self) -> None:
        """Forget all requests."""
        for slot in range(len(self.shares)):
            self.admit(slot)
        self.phase = Phase()

    def admit(self, slot: int) -> None:
        """Start a request in a slot."""
        self.shares[slot], self.size[slot] = self.num_nodes, 0
        self.kinds[slot] = self.seen[slot] = NO_GRAPH

    def leave_out(self, slots: np.ndarray) -> None:
        """Draft and verify nothing for the requests in these slots."""
        self.shares[slots], self.kinds[slots], self.widest = 0, NO_GRAPH, 0

    def choose(self, batch: DraftBatch, wanted: np.ndarray, missed: np.ndarray | None) -> np.ndarray:
        """Plan the next step; the planner's step must have begun.

        Args:
            batch: the requests whose graphs grow on the device; ``token_rows`` are their slots.
            wanted: bool [num_requests], those that may get a graph.
            missed: int64 [num_requests], tokens that the draft would have to run first; None without a draft model.

        Returns:
            int64 [num_requests], what each request gets of the draft phase.
        """
        slots, kinds = batch.token_rows, wanted * DRAFTED
        self.phase = Phase()
        if not self.active:
            self.shares[slots] = np.where(wanted, self.num_nodes, 0)
            self.widest = int(self.shares[slots].max(initial=0))
            if missed is not None and wanted.any():  # the device leaves long texts out by itself, but counts nothing
                readable = int(np.count_nonzero(missed[wanted] < TOO_LONG))
                self.speculation.planner.wants_drafts(readable, np.zeros(0))
                self.speculation.stats.counts["drafts_skipped"] += int(wanted.sum()) - readable
            return kinds
        if missed is None:
            kinds = wanted * COPIES_ONLY
        else:
            index = wanted.nonzero()[0]
            drafting = self.speculation.choose_drafting(index, *self._found(slots[index]), missed)
            copies = COPIES_ONLY if self.speculation.copies else NO_GRAPH
            kinds, planner = np.where(drafting, DRAFTED, wanted * copies), self.speculation.planner
            if count := int(drafting.sum()):
                levels = planner.num_levels(len(slots), count, self._frontiers(slots[drafting]), self.levels)
                self.phase = Phase(count, levels, planner.alone)
        self.kinds[slots] = kinds
        values, size = self._expected(slots, kinds)
        chosen = self.speculation.planner.or_rest(self._sizes(values, size, batch.length, kinds), values)
        self.speculation.stats.counts["nodes_cut"] += int(np.maximum(size - chosen, 0).sum())
        self.shares[slots], self.widest = chosen, int(chosen.max(initial=0))
        return kinds

    def _sizes(self, values: np.ndarray, size: np.ndarray, context: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """How many nodes of each graph to verify; see ``Planner.sizes``.

        The next graphs may have more nodes than the latest. Further nodes are expected to be worth what they are in the
        average graph. They count if all known nodes pay, or if all graphs have the same share.
        """
        planner, width, drafted = self.speculation.planner, np.arange(self.num_nodes), kinds == DRAFTED
        last = np.take_along_axis(values, np.maximum(size - 1, 0)[:, None], 1)
        last[size == 0] = 1.0
        more = np.where(width < size[:, None], values, np.minimum(planner.worth, last)).astype(np.float32)
        size = np.minimum(size, self.most)
        most = np.where(drafted, self.most, size).astype(np.int32)
        if self.captured:
            return planner.sizes(more, most, context, drafted, [share for share in self.captured if share <= self.most])
        chosen = planner.sizes(values, size, context, drafted)
        if chosen.any() and (chosen == size).all():
            chosen = np.maximum(chosen, planner.sizes(more, most, context, drafted))
        return chosen

    def _found(self, slots: np.ndarray) -> tuple[np.ndarray, float]:
        """What sources other than the draft are likely to find; see ``choose_drafting``."""
        copied = self._real(slots) & self.copied[slots]
        if not copied.any():
            return np.zeros(0), 1.0
        value = self.value[slots]
        first = self.depth[slots] == 1
        return value[copied].astype(np.float64), 1.0 - float(value[copied & first].sum()) / len(slots)

    def _frontiers(self, slots: np.ndarray) -> list[np.ndarray]:
        """Values of the nodes that each draft level but the last adds to the graphs in some slots, as far as known.

        In the graph of a new request, every node is expected to have the average children.
        """
        known = self.seen[slots] == DRAFTED
        drafted = self._real(slots) & self.drafted[slots] & known[:, None]
        value, depth = self.value[slots][drafted], self.depth[slots][drafted]
        frontiers = [value[depth == level] for level in range(1, self.levels[-1])]
        if known.all():
            return frontiers
        average = np.ones(1)
        for level, values in enumerate(frontiers):
            average = -np.sort(-np.outer(average, self.speculation.planner.children).ravel())[: self.num_nodes]
            frontiers[level] = np.append(values, np.tile(average, int(np.count_nonzero(~known))))
        return frontiers

    def _real(self, slots: np.ndarray) -> np.ndarray:
        return np.arange(self.num_nodes) < self.size[slots][:, None]

    def _expected(self, slots: np.ndarray, kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values and sizes that are expected of the next graphs.

        They are those of the request's latest graph, without the drafted nodes that will not be drafted again. After a
        graph that was not drafted, a drafted one is expected to be the average one.
        """
        levels = self.phase.levels
        if levels in (None, self.levels[-1]):  # all are drafted again; a block's one level has nodes of every depth
            levels = self.num_nodes
        deepest = np.where(kinds == COPIES_ONLY, 0, levels)
        left_out = ~self.copied[slots] & (self.depth[slots] > deepest[:, None])
        values = np.where(self._real(slots) & ~left_out, self.value[slots], 0.0).astype(np.float32)
        values = -np.sort(-values, axis=1)
        size = np.where(kinds == NO_GRAPH, 0, np.count_nonzero(values, axis=1)).astype(np.int32)
        unknown = (kinds == DRAFTED) & (self.seen[slots] != DRAFTED)
        values[unknown], size[unknown] = self.speculation.planner.worth, self.num_nodes
        return values, size

    def arrived(
        self, slots: np.ndarray, kinds: np.ndarray, phase: Phase, graphs: dict[str, np.ndarray], invalid: bool = False
    ) -> None:
        """Learn what was proposed.

        Args:
            slots: int64 [num_requests]; kinds: int64 [num_requests], what each request got of the draft phase.
            phase: the draft phase.
            graphs: the graphs, as ``late_graphs`` names them.
            invalid: whether the draft gave rows without a softmax on the device. Drafted graphs may be empty for that
                reason.
        """
        self.seen[slots], self.size[slots], self.value[slots] = kinds, graphs["graph_size"], graphs["graph_value"]
        origin, survival = graphs["graph_origin"], graphs["graph_survival"]
        self.copied[slots], self.depth[slots] = COPIED[origin], graphs["graph_depth"]
        self.drafted[slots] = (origin == ORIGIN_DRAFT) | (origin == ORIGIN_AGREED)
        others = self._real(slots) & (self.copied[slots] | ~self.drafted[slots])
        # The device drafts nothing at the end of an answer, nor while the draft catches up.
        pure = (kinds == DRAFTED) & (invalid | phase.invalid | (self.size[slots] > 0)) & ~others.any(axis=1)
        if not phase.num_drafted:
            return
        planner, rows = self.speculation.planner, [phase.num_drafted] * (phase.levels or self.levels[-1])
        planner.learn_graphs(self.value[slots], self.size[slots], pure, rows, phase.num_drafted, phase.alone)
        if pure.any():  # of the children of other nodes, some may have been left out
            below_root = self._real(slots) & (self.depth[slots] == 1)
            children = -np.sort(-np.where(below_root, survival, 0.0)[pure], axis=1)
            planner.learn_children(children.astype(np.float32))


def late_graphs(trees: DeviceTrees, slots: torch.Tensor) -> dict[str, torch.Tensor]:
    """What ``Plan.arrived`` reads of the proposed graphs in some slots, int64 [num_requests]: their nodes."""
    nodes = {f"graph_{name}": getattr(trees, name)[slots, 1:] for name in ("value", "origin", "depth", "survival")}
    return {"graph_size": trees.size[slots], **nodes}
