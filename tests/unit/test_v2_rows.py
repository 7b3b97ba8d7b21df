"""Parts that only Model Runner V2 needs: rows without a node, and texts by slot."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from vllm_gsd.engine.v2.texts import Texts
from vllm_gsd.engine.v2.walk import sum_along
from vllm_gsd.engine.verify.draft_tree import FOREIGN, NO_NODES, FlatTree
from vllm_gsd.engine.verify.step import TargetLayers, lay_out
from vllm_gsd.method.constants import (
    AGREED,
    MERGED,
    NATIVE,
    NGRAM,
    NONE,
    ORIGIN_AGREED,
    ORIGIN_DRAFT,
    ORIGIN_GRAMMAR,
    ORIGIN_NGRAM,
    ORIGIN_ROOT,
    ORIGIN_SHARED,
    SHARED,
)
from vllm_gsd.ops.walk.api import Accepted
from vllm_gsd.upstream import wire


def tree_of(parent):
    """A tree with a root and nodes with these parents; tokens count up from 99."""
    parent = [NONE, *parent]
    count, depth = len(parent), np.zeros(len(parent), np.int32)
    for place, above in enumerate(parent[1:], 1):
        depth[place] = depth[above] + 1
    return FlatTree(
        np.arange(99, 99 + count),
        np.array(parent, np.int32),
        depth,
        np.array([ORIGIN_ROOT, *[ORIGIN_DRAFT] * (count - 1)], np.int8),
        np.zeros(count, np.bool_),
        np.ones(count, np.float32),
    )


def test_rows_without_a_node_belong_to_no_tree():
    trees = [tree_of([0, 0, 1]), None, tree_of([0, 1]), NO_NODES, tree_of([0, 0, 1, 2])]
    sizes = np.array([6, 4, 5, 3, 3])
    step = lay_out(trees, sizes, np.cumsum(sizes) + np.array([0, 7, 7, 7, 7]))  # the second has 7 prompt rows
    parents = [step.trees.parent[a:b].tolist() for a, b in zip(step.trees.starts, step.trees.starts[1:], strict=False)]
    assert parents == [
        [NONE, 0, 0, 1, FOREIGN, FOREIGN],
        [NONE, FOREIGN, FOREIGN, FOREIGN],
        [NONE, 0, 1, FOREIGN, FOREIGN],
        [NONE, FOREIGN, FOREIGN],
        [NONE, 0, 0],  # cut off
    ]
    assert step.tree_requests.tolist() == [0, 4]  # the third is a chain, followed by unused rows
    assert step.first_rows.tolist() == [0, 13, 17, 22, 25]
    assert step.depth.max() == 2


def test_rows_know_who_proposed_them():
    origins = [ORIGIN_ROOT, ORIGIN_DRAFT, ORIGIN_DRAFT, ORIGIN_NGRAM, ORIGIN_SHARED, ORIGIN_AGREED, ORIGIN_GRAMMAR]
    crossed = [False, False, True, True, False, True, False]
    tree = replace(
        tree_of([0, 1, 2, 3, 4, 5]),
        origin=np.array(origins, np.int8),
        via_merge=np.array(crossed),
        survival=np.array([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], np.float32),
    )
    step = lay_out([None, tree, tree], np.array([2, 8, 3]), np.array([2, 10, 13]))
    whole = [NONE, NATIVE, MERGED, NGRAM, SHARED, AGREED, NONE]
    assert step.source.tolist() == [NONE, NONE, *whole, NONE, *whole[:3]]
    assert step.depth.tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 2]
    assert step.survival.tolist() == [0, 0, *tree.survival.tolist(), 0, *tree.survival[:3].tolist()]
    assert step.trees.token.tolist() == [0, 0, *range(99, 106), 0, 99, 100, 101]


def test_positions_by_depth_start_from_the_device_positions():
    step = lay_out([tree_of([0, 0, 1]), tree_of([0, 1])], np.array([5, 3]), np.array([5, 8]))
    positions = torch.tensor([40, 41, 42, 43, 44, 9, 10, 11])
    step.set_positions(positions)
    assert positions.tolist() == [40, 41, 41, 42, 40, 9, 10, 11]  # the row without a node stays at the root


def test_a_whole_batch_can_attend_by_the_mask():
    """A batch of a prompt's three rows, a single row, a graph, and a prompt's end followed by a graph."""
    trees = [None, None, tree_of([0, 0]), tree_of([0, 1])]
    step = lay_out(trees, np.array([1, 1, 4, 3]), np.array([3, 4, 8, 13]))
    assert step.tree_requests.tolist() == [2] and step.chains.tolist() == [False, False, False, True]
    step.batch_starts = np.array([0, 3, 4, 8, 13], np.int32)
    positions = torch.tensor([10, 11, 12, 7, 40, 41, 42, 43, 5, 6, 7, 8, 9])
    step.set_positions(positions)
    # The third request's last row has no node.
    assert positions.tolist() == [10, 11, 12, 7, 40, 41, 41, 40, 5, 6, 7, 8, 9]
    metadata, common = (
        {"layer": SimpleNamespace()},
        SimpleNamespace(num_actual_tokens=13, block_table_tensor=torch.arange(5, dtype=torch.int32)[:, None]),
    )
    layers = TargetLayers([SimpleNamespace(layer_names=["layer", "draft"])], ["draft"], metadata)
    step.attach_tree_rows(layers, common)
    tree = wire.attached(metadata["layer"], wire.TREE_ROWS)
    assert tree.rows is None
    assert tree.query_start_loc.tolist() == [0, 3, 4, 8, 13]
    # Rows of text attend to the prefix up to their own position. Only rows of trees need a mask.
    assert tree.prefix_lens.tolist() == [13, 8, 40, 7]
    assert tree.block_table.tolist() == [[0], [1], [2], [3]]
    assert tree.positions.tolist() == positions.tolist()
    assert tree.mask[:, 0].tolist() == [0, 0, 0, 0, 1, 3, 5, 8, 0, 0, 1, 3, 7]


def test_texts_follow_what_was_sampled():
    texts = Texts(3, 6)
    texts.begin(2, [5, 6, 7], prompt_length=3)
    texts.begin(0, [8], prompt_length=1)
    texts.append(np.array([2, 0]), np.array([[1, 2, 9], [3, 9, 9]]), np.array([2, 1]))
    assert texts.tokens[2].tolist() == [5, 6, 7, 1, 2, 0] and texts.tokens[0, :2].tolist() == [8, 3]
    assert texts.length.tolist() == [2, 0, 5]
    texts.append(np.array([2]), np.array([[4, 4, 4]]), np.array([3]))  # more tokens than fit
    assert texts.tokens[2].tolist() == [5, 6, 7, 1, 2, 4] and texts.length[2] == 6
    texts.begin(2, [1, 2], prompt_length=1)  # another request
    assert texts.length[2] == 2 and texts.prompt_length[2] == 1


def testsum_along():
    # Two requests: rows 0 to 3, of which the path takes 0 and 2, and rows 4 and 5, of which it takes only the root.
    accepted = Accepted.empty(2, 3, torch.device("cpu"))
    accepted.rows.copy_(torch.tensor([[0, 2, 2], [4, 4, 4]]))
    accepted.count.copy_(torch.tensor([2, 1]))
    counts = torch.tensor([3, 50, 4, 50, 7, 50], dtype=torch.int32)
    summed = sum_along(counts, accepted)
    assert summed.tolist() == [7, 7] and summed.dtype == torch.int32
