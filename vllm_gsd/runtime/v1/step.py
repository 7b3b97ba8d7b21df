"""The verification half of a step: which scheduled rows are a graph, and how they attend."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vllm_gsd.core.flatten import ancestor_masks
from vllm_gsd.core.graph import NONE, ORIGIN_GRAMMAR
from vllm_gsd.core.verify import is_chain
from vllm_gsd.runtime.cpu_attention import TREE_ROWS
from vllm_gsd.runtime.grammar import KEPT_ATTRIBUTE, KeptTree
from vllm_gsd.runtime.tree_rows import TreeRows
from vllm_gsd.runtime.v1.walk import FOREIGN, WalkTrees


@dataclass(frozen=True)
class DraftTree:
    """The flattened graph proposed for one request; place 0 is the first node below the root."""

    token: np.ndarray  # int64 [n]
    parent: np.ndarray  # int32 [n], NONE for children of the root
    depth: np.ndarray  # int32 [n]
    origin: np.ndarray  # int8 [n], ORIGIN_* of each node
    via_merge: np.ndarray  # bool [n]
    survival: np.ndarray  # float32 [n], as promised by its source

    def select(self, kept: KeptTree) -> "DraftTree":
        """The tree of these nodes; those that the grammar suggests are taken for sure."""
        places = np.asarray(kept.places, np.int64)
        row = {tuple(path): index for index, path in enumerate(kept.paths)}

        def of_draft(values: np.ndarray, otherwise) -> np.ndarray:
            # NONE, for nodes that the grammar suggests, is -1: the last entry.
            return np.append(values, np.asarray(otherwise, values.dtype))[places]

        return DraftTree(
            np.array(kept.tokens, np.int64),
            np.array([row.get(tuple(path[:-1]), NONE) for path in kept.paths], np.int32),
            np.array([len(path) for path in kept.paths], np.int32),
            of_draft(self.origin, ORIGIN_GRAMMAR),
            of_draft(self.via_merge, False),
            of_draft(self.survival, 1),
        )


@dataclass
class VerifyStep:
    """What a step verifies; rows are counted as in ``WalkTrees`` unless said otherwise."""

    trees: WalkTrees
    depth: np.ndarray  # int32 [num_rows], 0 for roots
    proposed: list[DraftTree | None]  # per request
    first_rows: np.ndarray  # int64 [num_requests], row of each root in the batch
    positions: np.ndarray  # int64 [num_requests], position of each root
    tree_requests: np.ndarray  # int64 [num_tree_requests], requests that need the tree mask
    has_placeholders: bool

    @property
    def num_tree_requests(self) -> int:
        """Requests whose graph is not a chain."""
        return len(self.tree_requests)

    def tree_lines(self) -> np.ndarray:
        """Rows of all requests that need the tree mask, int64."""
        starts = self.trees.starts
        return np.concatenate([np.arange(starts[r], starts[r + 1]) for r in self.tree_requests])

    def set_positions(self, positions: torch.Tensor) -> None:
        """Give the rows of graphs their position by depth (slots stay by place in the list)."""
        if not self.num_tree_requests:
            return
        rows, values = self._batch_rows_and_positions()
        positions[torch.from_numpy(rows)] = torch.from_numpy(values)

    def _batch_rows_and_positions(self) -> tuple[np.ndarray, np.ndarray]:
        starts = self.trees.starts
        sizes = (starts[1:] - starts[:-1])[self.tree_requests]
        lines = self.tree_lines()
        shift = np.repeat((self.first_rows - starts[:-1])[self.tree_requests], sizes)
        return lines + shift, np.repeat(self.positions[self.tree_requests], sizes) + self.depth[lines]

    def attach_tree_rows(self, runner, attn_metadata: dict[str, Any], common) -> None:
        """Add the tree mask to the target layers' attention metadata."""
        starts = self.trees.starts
        sizes = (starts[1:] - starts[:-1])[self.tree_requests]
        tree_starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        lines = self.tree_lines()
        masks = np.zeros((len(lines), (int(sizes.max()) + 63) // 64), np.int64)
        ancestor_masks(self.trees.parent[lines], tree_starts, masks)
        rows, positions = self._batch_rows_and_positions()
        index = torch.from_numpy(self.tree_requests)
        tree_rows = TreeRows(
            query_start_loc=torch.from_numpy(tree_starts),
            prefix_lens=torch.from_numpy(self.positions[self.tree_requests].astype(np.int32)),
            block_table=common.block_table_tensor[index],
            positions=torch.from_numpy(positions),
            mask=torch.from_numpy(masks),
            rows=torch.from_numpy(rows),
        )
        num_rows = common.num_actual_tokens
        if len(rows) == num_rows:
            tree_rows = replace(tree_rows, rows=None)
        draft_layers = set(runner.drafter.layer_names)
        for group in runner.attn_groups[0]:
            layers = [name for name in group.layer_names if name not in draft_layers]
            if not layers:
                continue
            group_rows = tree_rows
            if tree_rows.rows is not None:
                group_rows = self._with_plain_rows(tree_rows, rows, group, common)
            setattr(attn_metadata[layers[0]], TREE_ROWS, group_rows)

    def _with_plain_rows(self, tree_rows: TreeRows, rows: np.ndarray, group, common) -> TreeRows:
        """Describe the other requests of the batch to upstream's kernel, as a batch of their own."""
        num_requests = common.num_reqs
        plain = np.setdiff1d(np.arange(num_requests), self.tree_requests)
        plain_rows = np.setdiff1d(np.arange(common.num_actual_tokens), rows)
        start_loc = common.query_start_loc_cpu.numpy()
        lengths = (start_loc[1:] - start_loc[:-1])[plain]
        new_start_loc = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        index = torch.from_numpy(plain)
        plain_common = replace(
            common,
            query_start_loc=new_start_loc,
            query_start_loc_cpu=new_start_loc,
            seq_lens=common.seq_lens[index],
            seq_lens_cpu_upper_bound=None,
            num_reqs=len(plain),
            num_actual_tokens=len(plain_rows),
            max_query_len=int(lengths.max()),
            block_table_tensor=common.block_table_tensor[index],
            slot_mapping=common.slot_mapping[torch.from_numpy(plain_rows)],
            is_prefilling=None,
        )
        metadata = group.get_metadata_builder(0).build(0, plain_common)
        return replace(tree_rows, plain_rows=torch.from_numpy(plain_rows), plain_metadata=metadata)


def plan_step(runner, scheduler_output, proposed: dict[str, DraftTree]) -> VerifyStep | None:
    """Match the scheduled draft tokens with the graphs that were proposed.

    The scheduler may have cut a list; it may also hold tokens that are not ours (placeholders for a request that
    resumes). A list that is not a prefix of the request's graph is verified as nothing: only its root is sampled.
    """
    scheduled = scheduler_output.scheduled_spec_decode_tokens
    kept = getattr(scheduler_output, KEPT_ATTRIBUTE, {})
    request_ids = runner.input_batch.req_ids
    num_requests = len(request_ids)
    sizes = np.ones(num_requests, np.int64)
    matched: list[DraftTree | None] = [None] * num_requests
    has_placeholders = False
    for index, request_id in enumerate(request_ids):
        tokens = scheduled.get(request_id)
        if not tokens:
            continue
        sizes[index] += len(tokens)
        tree = proposed.get(request_id)
        if tree is not None and request_id in kept:
            tree = tree.select(kept[request_id])
        if tree is not None and np.array_equal(tree.token[: len(tokens)], tokens):
            matched[index] = tree
        else:
            has_placeholders = has_placeholders or min(tokens) < 0

    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    token = np.zeros(starts[-1], np.int64)
    parent = np.full(starts[-1], FOREIGN, np.int32)
    depth = np.zeros(starts[-1], np.int32)
    parent[starts[:-1]] = NONE
    tree_requests = []
    for index, tree in enumerate(matched):
        if tree is None:
            continue
        first, count = starts[index] + 1, sizes[index] - 1
        token[first : first + count] = tree.token[:count]
        parent[first : first + count] = tree.parent[:count] + 1
        depth[first : first + count] = tree.depth[:count]
        if not is_chain(parent, starts[index], starts[index + 1]):
            tree_requests.append(index)

    batch_ends = runner.query_start_loc.np[1 : num_requests + 1].astype(np.int64)
    first_rows = batch_ends - sizes
    computed = runner.input_batch.num_computed_tokens_cpu[:num_requests].astype(np.int64)
    batch_starts = runner.query_start_loc.np[:num_requests].astype(np.int64)
    return VerifyStep(
        trees=WalkTrees(token, parent, starts),
        depth=depth,
        proposed=matched,
        first_rows=first_rows,
        positions=computed + first_rows - batch_starts,
        tree_requests=np.array(tree_requests, np.int64),
        has_placeholders=has_placeholders,
    )
