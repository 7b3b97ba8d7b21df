"""The verification half of a step: which scheduled rows are a graph, and how they attend."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from vllm_gsd.engine.attention.tree_rows import TreeRows
from vllm_gsd.engine.verify.draft_tree import FOREIGN, SOURCE_OF, DraftTree, WalkTrees
from vllm_gsd.host import ancestor_masks, batch_masks, is_chain, lay_tree
from vllm_gsd.method.constants import NONE
from vllm_gsd.upstream import wire


@dataclass
class VerifyStep:
    """What a step verifies; rows are counted as in ``WalkTrees`` unless said otherwise."""

    trees: WalkTrees
    depth: np.ndarray  # int32 [num_rows], 0 for roots
    has_tree: np.ndarray  # bool [num_requests]
    source: np.ndarray  # int8 [num_rows], who proposed it (of ``planner.calibration``); NONE: a grammar, or no node
    survival: np.ndarray  # float32 [num_rows], as promised by its source
    first_rows: np.ndarray  # int64 [num_requests], row of each root in the batch
    chains: np.ndarray  # bool [num_requests], whether its graph is a chain
    tree_requests: np.ndarray  # int64 [num_tree_requests], requests whose rows attend by the tree mask
    has_placeholders: bool = False  # among the scheduled tokens
    # int32 [num_requests + 1], where requests begin in the batch, if all its rows attend by the mask (``mask_all``).
    batch_starts: np.ndarray | None = None
    # Once ``set_positions`` has read them, int64: of those requests' roots, and of all their rows.
    root_positions: torch.Tensor | None = None
    row_positions: torch.Tensor | None = None
    # All rows, if all attend by the mask: given the block table, its ``TreeRows``.
    batch: Callable[..., TreeRows] | None = None

    @property
    def num_tree_requests(self) -> int:
        """Requests whose rows attend by the tree mask: at least those whose graph is not a chain."""
        return len(self.tree_requests)

    @property
    def masked(self) -> bool:
        """Whether any row of the batch attends by the tree mask."""
        return self.batch_starts is not None or self.num_tree_requests > 0

    def mask_all(self, batch_starts: np.ndarray) -> None:
        """Let our kernel attend for all rows of the batch, prompts as well: each such row sees those before it.

        Args:
            batch_starts: int32 [num_requests + 1], where requests begin in the batch; its positions are on the host.
        """
        self.batch_starts = batch_starts

    def tree_lines(self) -> np.ndarray:
        """Rows of all requests that need the tree mask, int64."""
        starts = self.trees.starts[self.tree_requests]
        sizes = self.trees.starts[self.tree_requests + 1] - starts
        return np.arange(sizes.sum()) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)

    @property
    def deepest(self) -> int:
        """Depth of the deepest node of all."""
        return int(self.depth.max(initial=0))

    def set_positions(self, positions: torch.Tensor) -> None:
        """Give the rows of graphs their position by depth (slots stay by place in the list).

        Args:
            positions: int64 [>= num_rows of the batch], by place so far. They are the truth about how long texts are,
                which a host that runs ahead of its device only guesses.
        """
        if self.batch_starts is not None:
            self.batch = self._whole_batch(self.batch_starts, positions)
            return
        if not self.num_tree_requests:
            return
        device = positions.device
        self.root_positions = positions[torch.from_numpy(self.first_rows[self.tree_requests]).to(device)]
        self.row_positions = self._tree_positions()
        positions[torch.from_numpy(self._batch_rows()).to(device)] = self.row_positions

    def _batch_rows(self) -> np.ndarray:
        """Rows in the batch of all requests that need the tree mask, int64."""
        starts = self.trees.starts
        sizes = (starts[1:] - starts[:-1])[self.tree_requests]
        return self.tree_lines() + np.repeat((self.first_rows - starts[:-1])[self.tree_requests], sizes)

    def _tree_positions(self) -> torch.Tensor:
        assert self.root_positions is not None
        device = self.root_positions.device
        starts = self.trees.starts
        request = np.repeat(np.arange(self.num_tree_requests), (starts[1:] - starts[:-1])[self.tree_requests])
        depth = torch.from_numpy(self.depth[self.tree_lines()]).to(device)
        return self.root_positions[torch.from_numpy(request).to(device)] + depth

    def attach_tree_rows(self, groups, draft_layers: set[str], attn_metadata: dict[str, Any], common) -> None:
        """Add the tree mask to the target layers' attention metadata.

        Args:
            groups: attention groups of the runner; what lies in ``draft_layers`` is left alone.
            common: upstream's ``CommonAttentionMetadata`` of the batch.
        """
        if self.batch is not None:
            tree_rows = self.batch(block_table=common.block_table_tensor[: len(self.has_tree)])
            attach_to(tree_rows, groups, draft_layers, attn_metadata)
            return
        self.attach(*self._tree_requests(common), self.tree_requests, groups, draft_layers, attn_metadata, common)

    def _tree_requests(self, common) -> tuple[TreeRows, np.ndarray]:
        """The rows of those requests alone that need the mask, and where they are in the batch."""
        assert self.root_positions is not None and self.row_positions is not None
        starts = self.trees.starts
        sizes = (starts[1:] - starts[:-1])[self.tree_requests]
        tree_starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        lines = self.tree_lines()
        rows = self._batch_rows()
        tree_rows = TreeRows(
            query_start_loc=torch.from_numpy(tree_starts),
            prefix_lens=self.root_positions.to(torch.int32),
            block_table=common.block_table_tensor[torch.from_numpy(self.tree_requests)],
            positions=self.row_positions,
            # Rows without a node see nothing but themselves.
            mask=_masks(np.maximum(self.trees.parent[lines], NONE), tree_starts),
            rows=torch.from_numpy(rows),
        )
        return tree_rows, rows

    def _whole_batch(self, starts: np.ndarray, positions: torch.Tensor) -> Callable[..., TreeRows]:
        """All rows of the batch, those before a request's root as text; gives nodes their position by depth."""
        num_rows, prefix = int(starts[-1]), np.zeros(len(self.has_tree), np.int64)
        sizes = (self.trees.starts[1:] - self.trees.starts[:-1])[self.has_tree]
        masks = np.empty((num_rows, (int(sizes.max(initial=0)) + 63) // 64), np.int64)
        trees = self.trees.parent, self.trees.starts, self.depth, self.has_tree, self.first_rows
        batch_masks(*trees, starts, positions.numpy(), prefix, masks)
        return partial(
            TreeRows,
            query_start_loc=torch.from_numpy(starts),
            prefix_lens=torch.from_numpy(prefix.astype(np.int32)),
            positions=positions[:num_rows],
            mask=torch.from_numpy(masks),
            rows=None,
        )

    @staticmethod
    def attach(tree_rows: TreeRows, rows: np.ndarray, tree_requests, groups, draft_layers, attn_metadata, common):
        """Add tree rows to the target layers' attention metadata.

        Args:
            tree_rows: of the requests ``tree_requests``, int64 [num_tree_requests]; ``rows`` on the host too.
            groups, draft_layers, attn_metadata, common: as for ``attach_tree_rows``.
        """
        num_rows = common.num_actual_tokens
        if len(rows) == num_rows:
            tree_rows = replace(tree_rows, rows=None)
        if tree_rows.rows is None:
            attach_to(tree_rows, groups, draft_layers, attn_metadata)
            return
        for group in groups:
            group_rows = VerifyStep._with_plain_rows(tree_requests, tree_rows, rows, group, common)
            attach_to(group_rows, [group], draft_layers, attn_metadata)

    @staticmethod
    def _with_plain_rows(tree_requests, tree_rows: TreeRows, rows: np.ndarray, group, common) -> TreeRows:
        """Describe the other requests of the batch to upstream's kernel, as a batch of their own."""
        num_requests = common.num_reqs
        plain = np.setdiff1d(np.arange(num_requests), tree_requests)
        plain_rows = np.setdiff1d(np.arange(common.num_actual_tokens), rows)
        start_loc = common.query_start_loc_cpu.numpy()
        lengths = (start_loc[1:] - start_loc[:-1])[plain]
        new_start_loc = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        device = common.block_table_tensor.device
        index, rows_index = torch.from_numpy(plain).to(device), torch.from_numpy(plain_rows).to(device)
        plain_common = replace(
            common,
            query_start_loc=new_start_loc.to(device),
            query_start_loc_cpu=new_start_loc,
            seq_lens=common.seq_lens[index],
            seq_lens_cpu_upper_bound=None,
            num_reqs=len(plain),
            num_actual_tokens=len(plain_rows),
            max_query_len=int(lengths.max()),
            block_table_tensor=common.block_table_tensor[index],
            slot_mapping=common.slot_mapping[rows_index],
            is_prefilling=None,
        )
        metadata = group.get_metadata_builder(0).build(0, plain_common)
        return replace(tree_rows, plain_rows=rows_index, plain_metadata=metadata)


def attach_to(tree_rows: TreeRows, groups, draft_layers: set[str], attn_metadata: dict[str, Any]) -> None:
    """Add tree rows to the metadata that the target layers of each group share."""
    for group in groups:
        layer = next((name for name in group.layer_names if name not in draft_layers), None)
        if layer is not None:
            wire.attach_tree_rows(attn_metadata[layer], tree_rows)


def check_attached(layers: Iterable[str], attn_metadata: dict[str, Any]) -> None:
    """Refuse to run a graph that a layer would attend as if it were a chain.

    Args:
        layers: the target's attention layers.

    Raises:
        RuntimeError: the metadata of one of them have no tree rows.
    """
    for layer in layers:
        if wire.tree_rows_of(attn_metadata.get(layer)) is None:
            raise RuntimeError(f"gsd: {layer} got no tree rows, so it would attend the graph as if it were a chain.")


def _masks(parent: np.ndarray, starts: np.ndarray) -> torch.Tensor:
    """``ancestor_masks``, int64 [num_rows, words of the largest tree]."""
    masks = np.zeros((len(parent), (int(np.diff(starts).max()) + 63) // 64), np.int64)
    ancestor_masks(parent, starts, masks)
    return torch.from_numpy(masks)


def lay_out(matched: list[DraftTree | None], sizes: np.ndarray, batch_ends: np.ndarray) -> VerifyStep:
    """The rows of a step.

    Args:
        matched: the tree of each request; None where there is none, or where what is scheduled is not of it.
        sizes: int64 [num_requests], rows of each request to verify, its root's among them. A tree with more nodes is
            cut, one with fewer leaves rows that nothing is sampled from.
        batch_ends: int64 [num_requests], where each request's rows end in the batch; those to verify are its last.
    """
    starts = np.zeros(len(sizes) + 1, np.int32)
    sizes.cumsum(out=starts[1:])
    num_rows = int(starts[-1])
    token = np.zeros(num_rows, np.int64)
    parent = np.empty(num_rows, np.int32)
    parent.fill(FOREIGN)
    depth = np.zeros(num_rows, np.int32)
    source = np.empty(num_rows, np.int8)
    source.fill(NONE)
    survival = np.zeros(num_rows, np.float32)
    parent[starts[:-1]] = NONE
    has_tree, chains = np.zeros(len(matched), np.bool_), np.zeros(len(matched), np.bool_)
    for index, tree in enumerate(matched):
        if tree is None:
            continue
        root = int(starts[index])
        count = min(int(sizes[index]) - 1, len(tree.token))
        nodes = tree.token, tree.parent, tree.depth, tree.origin, tree.via_merge, tree.survival
        lay_tree(*nodes, SOURCE_OF, root + 1, count, (token, parent, depth, source, survival))
        has_tree[index] = True
        chains[index] = is_chain(parent, root, root + 1 + count)
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
