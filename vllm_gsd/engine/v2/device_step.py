"""Proposed graphs on the device, and the verification of a step that never copies them to the host.

The host knows only how many rows each request has. Which rows are nodes, their parents and their attention masks stay
in device tensors of fixed shapes. A request whose graph is a chain, or empty, is therefore treated like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_gsd.engine.attention.tree_rows import TreeRows
from vllm_gsd.engine.verify.draft_tree import FOREIGN, FlatTree
from vllm_gsd.engine.verify.step import VerifyStep
from vllm_gsd.method.constants import NONE
from vllm_gsd.ops.flatten.api import DeviceTrees, row_masks

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.worker.utils import AttentionGroup


class Proposals:
    """The latest proposed graph for each of V2's request slots.

    Args:
        num_slots: the most concurrent requests.
        num_places: the most nodes of a graph.
        device: the target's device.
    """

    def __init__(self, num_slots: int, num_places: int, device: torch.device) -> None:
        self.trees = empty_trees(num_slots, num_places, device)
        self.num_places = num_places
        # Whether the graph in a slot was proposed for the request that has the slot now; kept on the host.
        self.fresh = np.zeros(num_slots, np.bool_)

    def store(self, slots: torch.Tensor, slots_np: np.ndarray, trees: DeviceTrees) -> None:
        """Store the graphs proposed for the requests in some slots.

        Args:
            slots: int64 [num_requests], on the device.
            slots_np: the same on the host.
            trees: the graphs, one per request.
        """
        for kept, new in zip(self.trees, trees, strict=True):
            kept[slots] = new
        self.fresh[slots_np] = True

    def drop(self, slots: np.ndarray | int) -> None:
        """Discard the proposals for these slots."""
        self.fresh[slots] = False

    def of(self, slots: torch.Tensor, most: np.ndarray) -> DeviceTrees:
        """The proposals of some slots, each cut to its number of nodes in ``most``, padded to the largest number.

        Args:
            slots: int64 [num_requests], on the device.
            most: int64 [num_requests], on the host.
        """
        width = int(most.max(initial=0))
        trees = DeviceTrees(*(kept[slots] for kept in self.trees))
        size = torch.minimum(trees.size, torch.from_numpy(most).to(slots.device))
        real = torch.arange(width, device=slots.device) < size[:, None]
        cut = [torch.where(real, values[:, :width], torch.zeros_like(values[:1, :1])) for values in trees[:-1]]
        names = dict(zip(DeviceTrees._fields, [*cut, size], strict=True))
        return DeviceTrees(**{**names, "parent": torch.where(real, names["parent"], NONE)})


class DeviceStep:
    """The graphs that a step verifies. Rows are numbered per request, and row 0 is the root.

    Args:
        proposals: the latest proposals.
        slots: int64 [num_requests], the slots of the batch's requests.
        slots_np: the same on the host.
        sizes: int64 [num_requests], the rows of each request to verify, its root included.
        batch_ends: int64 [num_requests], the end of each request's rows in the batch; its last rows are verified.
    """

    def __init__(
        self,
        proposals: Proposals,
        slots: torch.Tensor,
        slots_np: np.ndarray,
        sizes: np.ndarray,
        batch_ends: np.ndarray,
    ) -> None:
        self.sizes = sizes
        self.batch_ends = batch_ends
        self.device = slots.device
        self.trees = proposals.of(slots, np.where(proposals.fresh[slots_np], sizes - 1, 0))
        self.most = int(sizes.max(initial=1))
        pad = (1, self.most - 1 - self.trees.token.shape[1])
        real = torch.arange(self.trees.token.shape[1], device=self.device) < self.trees.size[:, None]
        parent = torch.where(real, self.trees.parent + 1, FOREIGN)
        self.token = torch.nn.functional.pad(self.trees.token, pad)  # int64 [num_requests, most rows]
        self.depth = torch.nn.functional.pad(self.trees.depth, pad)  # int64 [num_requests, most rows]
        self.parent = torch.nn.functional.pad(parent, pad, value=FOREIGN)  # int64 [num_requests, most rows]
        self.parent[:, 0] = NONE
        self.first_rows = batch_ends - sizes  # int64 [num_requests], the root's row in the batch
        self.tree_requests = np.flatnonzero(sizes > 1)  # requests with more rows than a root
        # For all rows of these requests, one after another: the request and the row's number in it, on the host.
        self.request = np.repeat(self.tree_requests, sizes[self.tree_requests])
        starts = np.cumsum(sizes[self.tree_requests]) - sizes[self.tree_requests]
        self.place = np.arange(len(self.request)) - np.repeat(starts, sizes[self.tree_requests])
        self.root_positions: torch.Tensor | None = None  # int64 [num_tree_requests], set by ``set_positions``

    @property
    def num_tree_requests(self) -> int:
        """The number of requests with more rows than a root."""
        return len(self.tree_requests)

    @property
    def deepest(self) -> int:
        """An upper bound on the depth of the nodes."""
        return self.most - 1

    def lines(self) -> torch.Tensor:
        """Each row's index among all rows to verify, int64 [num_requests, most rows]; 0 where there is no row."""
        columns = np.arange(self.most)
        starts = np.cumsum(self.sizes) - self.sizes
        return self._to_device(np.where(columns < self.sizes[:, None], starts[:, None] + columns, 0))

    def set_positions(self, positions: torch.Tensor) -> None:
        """Overwrite the positions of graph rows with root position + depth; their KV slots still follow row order.

        Args:
            positions: int64 [>= num_rows of the batch], in row order; the device computed them from the true lengths.
        """
        if not self.num_tree_requests:
            return
        self.root_positions = positions[self._to_device(self.first_rows[self.tree_requests])]
        positions[self._to_device(self._batch_rows())] = self._tree_positions()

    def attach_tree_rows(
        self,
        groups: list[AttentionGroup],
        draft_layers: set[str],
        attn_metadata: dict[str, Any],
        common: CommonAttentionMetadata,
    ) -> None:
        """Add the tree mask to the target layers' attention metadata, as ``VerifyStep.attach_tree_rows`` does."""
        assert self.root_positions is not None
        sizes, rows = self.sizes[self.tree_requests], self._batch_rows()
        request, place, index = map(self._to_device, (self.request, self.place, self.tree_requests))
        tree_rows = TreeRows(
            query_start_loc=self._to_device(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)),
            prefix_lens=self.root_positions.to(torch.int32),
            block_table=common.block_table_tensor[index],
            positions=self._tree_positions(),
            mask=self.masks()[request, place],
            rows=self._to_device(rows),
            max_rows=int(sizes.max()),
        )
        VerifyStep.attach(tree_rows, rows, self.tree_requests, groups, draft_layers, attn_metadata, common)

    def masks(self) -> torch.Tensor:
        """The rows that each row attends to, int64 [num_requests, most rows, words], one bit per row.

        A row without a node attends only to the root and itself, and no other row attends to it.
        """
        return row_masks(torch.where(self.parent[:, 1:] == FOREIGN, NONE, self.parent[:, 1:] - 1))

    def moves(self, places: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The KV slots of accepted nodes, and the slots that plain decoding would have used.

        There is a pair for every depth. Beyond the end of an accepted path, source and destination are the same slot.

        Args:
            places: ``Paths.place``, int64 [num_requests, levels].
            slot_mapping: int64 [>= num_rows of the batch].

        Returns:
            Sources and destinations, int64 [num_tree_requests, most rows - 1] each. A source is -1 at depths that the
            request's graph cannot reach.
        """
        columns = np.arange(1, self.most)
        unused = columns >= self.sizes[self.tree_requests, None]
        requests, first, depth, unused = map(
            self._to_device,
            (self.tree_requests, self.first_rows[self.tree_requests, None], np.where(unused, 0, columns), unused),
        )
        sources = slot_mapping[first + places[requests[:, None], depth]].masked_fill(unused, -1)
        return sources, slot_mapping[first + depth]

    def _batch_rows(self) -> np.ndarray:
        """The indices in the batch of all rows of tree requests, int64."""
        return self.first_rows[self.request] + self.place

    def _tree_positions(self) -> torch.Tensor:
        assert self.root_positions is not None
        of_root = np.searchsorted(self.tree_requests, self.request)
        request, place = self._to_device(self.request), self._to_device(self.place)
        return self.root_positions[self._to_device(of_root)] + self.depth[request, place]

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def empty_trees(count: int, num_places: int, device: torch.device) -> DeviceTrees:
    """``count`` graphs without nodes, with room for ``num_places`` nodes each."""
    shape = (count, num_places)
    whole = torch.zeros(shape, dtype=torch.int64, device=device)
    real = torch.zeros(shape, device=device)
    return DeviceTrees(
        token=whole,
        parent=torch.full_like(whole, NONE),
        depth=whole.clone(),
        origin=whole.clone(),
        via_merge=torch.zeros(shape, dtype=torch.bool, device=device),
        survival=real,
        value=real.clone(),
        size=torch.zeros(count, dtype=torch.int64, device=device),
    )


def to_device(trees: list[FlatTree], num_places: int, device: torch.device) -> DeviceTrees:
    """Copy graphs that were grown on the host to the device, padded to ``num_places`` nodes."""
    padded = empty_trees(len(trees), num_places, torch.device("cpu"))
    for row, tree in enumerate(trees):
        size = len(tree.token)
        padded.size[row] = size
        for name in ("token", "parent", "depth", "origin", "via_merge", "survival"):
            getattr(padded, name)[row, :size] = torch.from_numpy(getattr(tree, name))
    return DeviceTrees(*(values.to(device, non_blocking=True) for values in padded))


def to_host(trees: DeviceTrees) -> list[FlatTree | None]:
    """Convert graphs in CPU tensors to host graphs; None for graphs without nodes."""
    token, parent, depth, origin, via_merge, survival, _, size = (values.numpy() for values in trees)
    kinds = (token, parent.astype(np.int32), depth.astype(np.int32), origin.astype(np.int8), via_merge, survival)
    return [FlatTree(*(of[row, :count] for of in kinds)) if count else None for row, count in enumerate(size)]
