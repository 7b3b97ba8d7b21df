"""Tensors of a step are where the models are: under fake tensors, which know devices and refuse to mix them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_gsd.runtime import trimmed_head
from vllm_gsd.runtime.draft_model import DraftModel
from vllm_gsd.runtime.drafting import slots_of
from vllm_gsd.runtime.features import Features
from vllm_gsd.runtime.v2.device_step import DeviceStep, Proposals, empty_trees
from vllm_gsd.runtime.v2.model_runner import GraphModelRunner
from vllm_gsd.runtime.v2.padded_rows import PaddedTreeRows
from vllm_gsd.upstream.wire import tree_rows_of

# A device that PyTorch knows, and whose name makes no build of it look for the hardware.
GPU = torch.device("lazy")


@pytest.fixture(autouse=True)
def fake_devices():
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def batch_of(sizes: list[int]):
    """A step, and its batch as attention backends are told of it: prompts of 3 tokens, then what is verified."""
    scheduled = np.array([size if size > 1 else 3 for size in sizes])
    ends, slots = np.cumsum(scheduled), np.arange(len(sizes))[::-1].copy()
    proposals = Proposals(4, 4, GPU)
    proposals.store(torch.from_numpy(slots).to(GPU), slots, empty_trees(len(sizes), 4, GPU))
    step = DeviceStep(proposals, torch.from_numpy(slots).to(GPU), slots, np.array(sizes), ends)
    start_loc = np.concatenate([[0], ends]).astype(np.int32)
    common = CommonAttentionMetadata(
        query_start_loc=torch.from_numpy(start_loc).to(GPU),
        query_start_loc_cpu=SimpleNamespace(numpy=lambda: start_loc),  # the host's values are read
        seq_lens=torch.zeros(len(sizes), dtype=torch.int32, device=GPU),
        num_reqs=len(sizes),
        num_actual_tokens=int(ends[-1]),
        max_query_len=int(scheduled.max()),
        max_seq_len=64,
        block_table_tensor=torch.zeros((len(sizes), 4), dtype=torch.int32, device=GPU),
        slot_mapping=torch.zeros(int(ends[-1]), dtype=torch.int64, device=GPU),
        causal=True,
    )
    return step, common, torch.zeros(int(ends[-1]), dtype=torch.int64, device=GPU)


def check(rows) -> None:
    for name in ("query_start_loc", "prefix_lens", "block_table", "positions", "mask", "rows", "plain_rows"):
        tensor = getattr(rows, name)
        assert tensor is None or tensor.device == GPU, name


def test_rows_of_a_mixed_batch():
    step, common, positions = batch_of([5, 1, 5])
    step.set_positions(positions)
    seen = []
    builder = SimpleNamespace(build=lambda prefix, plain: seen.append(plain))
    group = SimpleNamespace(layer_names=["target"], get_metadata_builder=lambda ubatch: builder)
    metadata = {"target": SimpleNamespace()}
    step.attach_tree_rows([group], set(), metadata, common)
    rows = tree_rows_of(metadata["target"])
    check(rows)
    assert rows.max_rows == 5 and rows.mask.shape == (10, 1)
    for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
        assert getattr(seen[0], name).device == GPU, name


def test_padded_rows():
    step, common, positions = batch_of([5, 5])
    padded = PaddedTreeRows(3, 5, GPU)
    assert padded.fits(step, common.num_actual_tokens)
    padded.fill(step, positions)
    rows = padded.rows(2, common.query_start_loc, positions, common.block_table_tensor)
    check(rows)
    assert rows.mask.shape == (10, 1) and rows.rows is None and rows.max_rows == 5


def test_what_is_moved():
    step, common, _ = batch_of([5, 1, 4])
    moved = []
    runner = SimpleNamespace(
        slot_mapping=common.slot_mapping,
        target_kv=SimpleNamespace(move=lambda *slots: moved.append(slots)),
        speculation=SimpleNamespace(features=Features(64, 3, torch.float32, GPU)),
    )
    places = torch.zeros((3, step.deepest + 1), dtype=torch.int64, device=GPU)
    GraphModelRunner._compact(runner, step, places)
    sources, destinations = moved[0]
    assert sources.device == destinations.device == GPU
    assert sources.shape == destinations.shape == (2, 4)  # a request a row, a depth a column


@pytest.mark.parametrize("level", [False, True])
def test_draft_forwards(level):
    seen = []
    draft = DraftModel.__new__(DraftModel)
    draft.device, draft.layer_names, draft.graphs = GPU, ["draft"], lambda: graphs
    draft.builder = SimpleNamespace(build=lambda prefix, common: common)
    graphs = SimpleNamespace(size_for=lambda rows: 8, replay=lambda *arguments: seen.append(arguments))
    table = torch.zeros((2, 4), dtype=torch.int32, device=GPU)
    slots = slots_of(table, np.array([0, 0, 1]), np.array([3, 4, 17]), 16)
    if level:
        tree = SimpleNamespace(positions=torch.zeros(3, dtype=torch.int64, device=GPU))
        draft.run_level(np.arange(3), tree, slots)
    else:
        starts, lengths = np.array([0, 2, 3], np.int32), np.array([5, 18], np.int32)
        draft.run_causal(np.arange(3), np.array([3, 4, 17]), slots, starts, lengths, table)
    size, input_ids, positions, slots, metadata = seen[0]
    assert size == 8 and list(metadata) == ["draft"]
    assert input_ids.device == positions.device == slots.device == GPU
    if not level:
        common = metadata["draft"]
        assert common.query_start_loc.device == common.seq_lens.device == common.positions.device == GPU
        assert common.query_start_loc_cpu.device.type == "cpu"


class PlainLinear:
    """In place of vLLM's, which on this platform packs weights."""

    def process_weights_after_loading(self, layer) -> None: ...

    def apply(self, layer, hidden):
        return torch.nn.functional.linear(hidden, layer.weight)


def test_candidates_of_a_trimmed_vocabulary(monkeypatch):
    monkeypatch.setattr(trimmed_head, "UnquantizedEmbeddingMethod", PlainLinear)
    draft = DraftModel.__new__(DraftModel)
    draft.reads_features = False
    whole = torch.randn(50, 10).to(GPU)
    draft.head = trimmed_head.TrimmedHead(lambda ids: whole[ids], 50, np.arange(10, 20), GPU, recent=3)
    draft.head.see(np.array([3, 12, 40]))
    draft.model = SimpleNamespace(logits_processor=lambda head, logits: logits)
    probs, tokens = draft.most_probable(torch.zeros((3, 10), device=GPU), 4)
    assert probs.device == tokens.device == GPU and tokens.shape == (3, 4)
