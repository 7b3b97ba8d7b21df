"""The verification half of a step: which scheduled rows belong to token graphs, and how they attend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from vllm_gsd.engine.attention.tree_rows import TreeRows
from vllm_gsd.engine.verify.draft_tree import FOREIGN, SOURCE_OF, FlatTree, WalkTrees
from vllm_gsd.engine.verify.staging import send
from vllm_gsd.host import ancestor_masks, batch_masks, is_chain, lay_tree
from vllm_gsd.method.constants import NONE
from vllm_gsd.upstream import wire

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.worker.utils import AttentionGroup


@dataclass
class VerifyStep:
    """The rows that a step verifies. Rows are those of ``trees``, unless they are called rows of the batch."""

    trees: WalkTrees
    depth: np.ndarray  # int32 [num_rows], 0 for roots
    has_tree: np.ndarray  # bool [num_requests]
    source: np.ndarray  # int8 [num_rows], the node's source; NONE for nodes of a grammar and rows without a node
    survival: np.ndarray  # float32 [num_rows], uncalibrated
    first_rows: np.ndarray  # int64 [num_requests], each root's row of the batch
    chains: np.ndarray  # bool [num_requests], whether the tree is a chain
    tree_requests: np.ndarray  # int64 [num_tree_requests], requests whose rows use the tree mask
    # Set if our kernel attends all rows of the batch, prompts too: int32 [num_requests + 1], first row of each request.
    batch_starts: np.ndarray | None = None
    # Set by ``set_positions``: makes the TreeRows of all requests, or of the tree requests, from their block table.
    tree_rows: Callable[..., TreeRows] | None = None

    @property
    def masked(self) -> bool:
        """Whether any row of the batch uses the tree mask, as it does for all requests whose tree is not a chain."""
        return self.batch_starts is not None or len(self.tree_requests) > 0

    @property
    def drafted(self) -> bool:
        """Whether the step has rows of drafted tokens."""
        return len(self.depth) > len(self.has_tree)

    def set_positions(self, positions: torch.Tensor) -> None:
        """Change the positions, int64 [>= rows of the batch] on the host, of tree rows from list order to depth.

        KV slots keep list order.
        """
        if self.batch_starts is not None:
            self.tree_rows = self._whole_batch(self.batch_starts, positions)
        elif self.masked:
            self.tree_rows = self._tree_requests(positions)

    def attach_tree_rows(self, layers: TargetLayers, common: CommonAttentionMetadata) -> None:
        """Add the tree mask to the attention metadata of the target's layers."""
        assert self.tree_rows is not None
        if self.batch_starts is not None:
            tree_rows = self.tree_rows(block_table=common.block_table_tensor[: len(self.has_tree)])
            layers.attach(tree_rows)
            return
        tree_rows = self.tree_rows(block_table=common.block_table_tensor[torch.from_numpy(self.tree_requests)])
        assert isinstance(tree_rows.rows, torch.Tensor)
        layers.attach_part(tree_rows, tree_rows.rows.numpy(), self.tree_requests, common)

    def _tree_requests(self, positions: torch.Tensor) -> Callable[..., TreeRows]:
        """Describe the rows of the requests that use the mask, and set their positions by depth."""
        requests, trees = self.tree_requests, self.trees
        starts, rows, lines = verified_rows(requests, np.diff(trees.starts), self.first_rows, trees.starts)
        roots = positions[torch.from_numpy(self.first_rows[requests])]
        row_positions = roots.repeat_interleave(torch.from_numpy(np.diff(starts))) + torch.from_numpy(self.depth[lines])
        positions[torch.from_numpy(rows)] = row_positions
        starts = starts.astype(np.int32)
        masks = np.zeros((len(lines), (int(np.diff(starts).max()) + 63) // 64), np.int64)
        ancestor_masks(np.maximum(trees.parent[lines], NONE), starts, masks)  # rows without a node attend as roots do
        return partial(
            TreeRows,
            query_start_loc=torch.from_numpy(starts),
            prefix_lens=roots.to(torch.int32),
            positions=row_positions,
            mask=torch.from_numpy(masks),
            rows=torch.from_numpy(rows),
        )

    def _whole_batch(self, starts: np.ndarray, positions: torch.Tensor) -> Callable[..., TreeRows]:
        """Describe all rows of the batch, with rows before a root as text, and set the positions of nodes by depth."""
        num_rows, prefix = int(starts[-1]), np.zeros(len(self.has_tree), np.int64)
        sizes = np.diff(self.trees.starts)[self.has_tree]
        masks = np.empty((num_rows, (int(sizes.max(initial=0)) + 63) // 64), np.int64)
        trees = self.trees.parent, self.trees.starts, self.depth, self.has_tree, self.first_rows
        batch_masks(*trees, starts, positions.numpy(), prefix, masks)
        return partial(
            TreeRows,
            query_start_loc=torch.from_numpy(starts),
            prefix_lens=torch.from_numpy(prefix.astype(np.int32)),
            positions=positions[:num_rows],
            mask=torch.from_numpy(masks),
        )


def verified_rows(
    requests: np.ndarray, sizes: np.ndarray, first_rows: np.ndarray, first_lines: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Number the verified rows of some requests.

    Args:
        requests: int64 [n], the requests.
        sizes, first_rows, first_lines: int [>= num_requests], how many rows of each request are verified, and the first
            of them among the rows of the batch and among all verified rows.

    Returns:
        int64 each: [n + 1], where each request's rows begin among these, and [rows], their rows of the batch and their
        places among all verified rows.
    """
    sizes = sizes[requests]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    place = np.arange(starts[-1]) - np.repeat(starts[:-1], sizes)
    rows, lines = (np.repeat(first[requests].astype(np.int64), sizes) + place for first in (first_rows, first_lines))
    return starts, rows, lines


class TargetLayers(NamedTuple):
    """The target's attention layers, which find tree rows in their metadata."""

    groups: Sequence[AttentionGroup]  # of layers that share their metadata
    draft_layers: Sequence[str]  # layers of the groups that are the draft's
    metadata: dict[str, Any]  # by layer

    def attach(self, tree_rows: TreeRows) -> None:
        """Add tree rows that are all rows of the batch, or whose other rows have metadata."""
        for group in self.groups:
            layer = next((name for name in group.layer_names if name not in self.draft_layers), None)
            if layer is not None:
                wire.attach(self.metadata[layer], wire.TREE_ROWS, tree_rows)

    def attach_part(
        self, tree_rows: TreeRows, rows: np.ndarray, tree_requests: np.ndarray, common: CommonAttentionMetadata
    ) -> None:
        """Add tree rows of some requests.

        Args:
            tree_rows: rows of the requests that use the mask.
            rows: their rows of the batch, int64 on the host.
            tree_requests: int64 [num_tree_requests], indices of these requests.
        """
        assert isinstance(tree_rows.rows, torch.Tensor)
        if len(rows) == common.num_actual_tokens:
            self.attach(replace(tree_rows, rows=None))
            return
        # Upstream's kernel attends the other requests as a batch of their own.
        plain = np.setdiff1d(np.arange(common.num_reqs), tree_requests)
        plain_rows = np.setdiff1d(np.arange(common.num_actual_tokens), rows)
        lengths = np.diff(common.query_start_loc_cpu.numpy())[plain]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        index, rows_index, on_device = send(common.block_table_tensor.device, plain, plain_rows, starts)
        plain_common = replace(
            common,
            query_start_loc=on_device.int(),
            query_start_loc_cpu=torch.from_numpy(starts.astype(np.int32)),
            seq_lens=common.seq_lens[index],
            seq_lens_cpu_upper_bound=None,
            num_reqs=len(plain),
            num_actual_tokens=len(plain_rows),
            max_query_len=int(lengths.max()),
            block_table_tensor=common.block_table_tensor[index],
            slot_mapping=common.slot_mapping[rows_index],
            is_prefilling=None,
        )
        for group in self.groups:
            metadata = group.get_metadata_builder(0).build(0, plain_common)
            group_rows = replace(
                tree_rows,
                rows=_as_slice(rows, tree_rows.rows),
                plain_rows=_as_slice(plain_rows, rows_index),
                plain_metadata=metadata,
            )
            self._replace(groups=[group]).attach(group_rows)


def _as_slice(rows: np.ndarray, index: torch.Tensor) -> torch.Tensor | slice:
    """A slice that needs no copies, if ascending rows of a batch are neighbours, or else their index."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else index


def check_attached(layers: Iterable[str], attn_metadata: dict[str, Any]) -> None:
    """Check that every target layer will use the tree mask.

    Raises:
        RuntimeError: a layer's metadata has no tree rows, so the layer would attend as if the tree were a chain.
    """
    for layer in layers:
        if wire.attached(attn_metadata.get(layer), wire.TREE_ROWS) is None:
            raise RuntimeError(f"gsd: {layer} got no tree rows, so it would attend the graph as if it were a chain.")


def lay_out(matched: list[FlatTree | None], sizes: np.ndarray, batch_ends: np.ndarray) -> VerifyStep:
    """Lay the trees of a batch out as the rows that a step verifies.

    Args:
        matched: the tree of each request; None if it has none or the scheduled tokens are not the tree's.
        sizes: int64 [num_requests], rows of each request to verify, including its root. A tree with more nodes is cut.
            If a tree has fewer nodes, the remaining rows have no node and nothing is sampled from them.
        batch_ends: int64 [num_requests], end of each request's rows in the batch. The last rows are verified.
    """
    starts = np.zeros(len(sizes) + 1, np.int32)
    sizes.cumsum(out=starts[1:])
    num_rows = int(starts[-1])
    token = np.zeros(num_rows, np.int64)
    parent = np.full(num_rows, FOREIGN, np.int32)
    depth = np.zeros(num_rows, np.int32)
    source = np.full(num_rows, NONE, np.int8)
    survival = np.zeros(num_rows, np.float32)
    parent[starts[:-1]] = NONE
    has_tree, chains = np.zeros(len(matched), np.bool_), np.zeros(len(matched), np.bool_)
    for index, tree in enumerate(matched):
        if tree is None:
            continue
        root = int(starts[index])
        count = min(int(sizes[index]), len(tree.token))
        places = tree.token, tree.parent, tree.depth, tree.origin, tree.via_merge, tree.survival
        lay_tree(*places, SOURCE_OF, root, count, (token, parent, depth, source, survival))
        has_tree[index] = True
        chains[index] = is_chain(parent, root, root + count)
    return VerifyStep(
        trees=WalkTrees(token, parent, starts),
        depth=depth,
        has_tree=has_tree,
        source=source,
        survival=survival,
        first_rows=batch_ends - sizes,
        chains=chains,
        tree_requests=(has_tree & ~chains).nonzero()[0],
    )
