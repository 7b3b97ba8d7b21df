"""The tensors of a step are on the models' device. Fake tensors check this, because they refuse to mix devices."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_gsd.engine.draft import trimmed_head
from vllm_gsd.engine.draft.drafter import slots_of
from vllm_gsd.engine.draft.model import DraftModel
from vllm_gsd.engine.v2 import verified_rows
from vllm_gsd.engine.v2.proposals import Proposals
from vllm_gsd.engine.v2.verified_rows import DeviceStep, RowBuffers
from vllm_gsd.engine.verify import staging
from vllm_gsd.engine.verify.step import TargetLayers
from vllm_gsd.ops.flatten.api import DeviceTrees
from vllm_gsd.tools.distill import states
from vllm_gsd.tools.distill.blocks import Blocks, attend
from vllm_gsd.tools.distill.data import Answer
from vllm_gsd.tools.distill.loss import HeadLoss
from vllm_gsd.tools.distill.packs import Packs
from vllm_gsd.tools.distill.states import ComputedStates
from vllm_gsd.tools.distill.target import Target
from vllm_gsd.upstream import wire

# A device that every build of PyTorch knows without looking for hardware.
GPU = torch.device("lazy")
LAID = ("positions", "mask", "prefix_lens")


@pytest.fixture(autouse=True)
def fake_devices():
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def test_rows_of_a_mixed_batch(monkeypatch):
    """A batch has two requests with graphs and one prompt of 3 tokens."""
    sizes = np.array([5, 1, 5])
    ends, slots = np.cumsum(np.where(sizes > 1, sizes, 3)), np.arange(3)[::-1].copy()
    start_loc = np.concatenate([[0], ends]).astype(np.int32)
    batch = SimpleNamespace(
        num_draft_tokens_per_req=sizes - 1,
        num_reqs=3,
        num_tokens=int(ends[-1]),
        idx_mapping_np=slots,
        idx_mapping=torch.from_numpy(slots).to(GPU),
        query_start_loc_np=start_loc,
        query_start_loc=torch.from_numpy(start_loc).to(GPU),
        cu_num_logits_np=np.array([0, 5, 6, 11], np.int32),
        cu_num_logits=torch.zeros(4, dtype=torch.int32, device=GPU),
        positions=torch.zeros(int(ends[-1]), dtype=torch.int64, device=GPU),
    )
    common = CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc,
        query_start_loc_cpu=SimpleNamespace(numpy=lambda: start_loc),  # only the host's copy is read
        seq_lens=torch.zeros(3, dtype=torch.int32, device=GPU),
        num_reqs=3,
        num_actual_tokens=int(ends[-1]),
        max_query_len=5,
        max_seq_len=64,
        block_table_tensor=torch.zeros((3, 4), dtype=torch.int32, device=GPU),
        slot_mapping=torch.zeros(int(ends[-1]), dtype=torch.int64, device=GPU),
        causal=True,
    )
    # If another test has imported vLLM's CPU worker, it has replaced this function in the whole process.
    monkeypatch.setattr(staging, "async_tensor_h2d", lambda array, device: torch.from_numpy(array).to(device))
    laid = []
    monkeypatch.setattr(verified_rows, "lay_out_rows", lambda *inputs: laid.append(inputs))
    step, buffers = DeviceStep(Proposals(4, 4, GPU), batch), RowBuffers(4, 5, GPU)
    step.lay(buffers, common.slot_mapping)
    given = dict(
        zip(
            [*DeviceTrees._fields, "slots", "valid", "starts", "batch_starts", *LAID],
            [*laid[0][0], *laid[0][1:]],
            strict=True,
        )
    )
    assert {name: tensor.device for name, tensor in given.items() if tensor.device != GPU} == {}
    seen = []
    builder = SimpleNamespace(build=lambda prefix, plain: seen.append(plain))
    group = SimpleNamespace(layer_names=["target"], get_metadata_builder=lambda ubatch: builder)
    metadata = {"target": SimpleNamespace()}
    step.attach_tree_rows(buffers, TargetLayers([group], [], metadata), common)
    rows = wire.attached(metadata["target"], wire.TREE_ROWS)
    for name in ("query_start_loc", "prefix_lens", "block_table", "positions", "mask", "rows"):
        assert getattr(rows, name).device == GPU, name
    assert rows.plain_rows == slice(5, 8)  # neighbours need no index
    assert rows.max_rows == 5 and rows.mask.shape == (10, 1)
    for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
        assert getattr(seen[0], name).device == GPU, name


@pytest.mark.parametrize("level", [False, True])
def test_draft_forwards(level):
    seen = []
    draft = DraftModel.__new__(DraftModel)
    draft.device, draft.layer_names, draft._forward = GPU, ["draft"], lambda *arguments: seen.append(arguments)
    draft.builders = [(SimpleNamespace(build=lambda prefix, common: common), ["draft"])]
    table = torch.zeros((2, 4), dtype=torch.int32, device=GPU)
    slots = slots_of(table, np.array([0, 0, 1]), np.array([3, 4, 17]), 16)
    if level:
        tree = SimpleNamespace(positions=torch.zeros(3, dtype=torch.int64, device=GPU))
        draft.run_rows(draft.tokens(np.arange(3)), slots, tree)
    else:
        starts, lengths = np.array([0, 2, 3], np.int32), np.array([5, 18], np.int32)
        draft.run_causal(np.arange(3), np.array([3, 4, 17]), slots, starts, lengths, table)
    input_ids, positions, slots, metadata, _ = seen[0]
    assert list(metadata) == ["draft"]
    assert input_ids.device == positions.device == slots.device == GPU
    if not level:
        common = metadata["draft"]
        assert common.query_start_loc.device == common.seq_lens.device == common.positions.device == GPU
        assert common.query_start_loc_cpu.device.type == "cpu"


class PlainLinear:
    """Replaces vLLM's class, which packs weights on this platform."""

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


@pytest.mark.parametrize("shift", [False, True])
def test_packs_to_distil_from(monkeypatch, shift):
    """Texts are on the host; the target and all tensors of a batch are on the device."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2
    )
    with GPU:  # fake parameters cannot be moved later
        target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    monkeypatch.setattr(target.base_model, "to", lambda device: target.base_model)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: target)
    data = [Answer(np.arange(length), 3, "first", 0) for length in (9, 5, 12)]
    monkeypatch.setitem(states.BATCH_TOKENS, GPU, 20)
    packs = Packs(ComputedStates("target", GPU), padding=4, shift=shift)
    assert packs.standardise(data).device == GPU
    batch = packs.collate(data)
    assert {name: rows.device for name, rows in batch.items() if rows.device != GPU} == {}
    assert {rows.shape[:2] for rows in batch.values()} == {(1, 9 + 5 + 12 + 3 * (4 - shift))}
    assert batch["hidden_states"].dtype == batch["verifier_last_hidden_states"].dtype == torch.bfloat16


def test_what_blocks_learn_from():
    """Attention, targets and loss are on the device of what they are given, in its types."""
    with GPU:
        blocks = Blocks(
            torch.empty(7, dtype=torch.int64), torch.empty((7, 4), dtype=torch.int64), [9, 5, 12], [4, 0, 3]
        )
        query, key, states, token_ids = (
            torch.randn(1, 6, 28, 16),
            torch.randn(1, 2, 54, 16),
            torch.randn(28, 32),
            torch.arange(40),
        )
        rows, bias = torch.randn(28, 36).bfloat16().requires_grad_(), torch.randn(40, 4, requires_grad=True)
        target = Target.__new__(Target)
        target.config, target.norm, target.head = {}, torch.ones(32), torch.randn(50, 32).bfloat16()
    read, _ = attend(torch.nn.Module(), query, key, key.bfloat16(), blocks, scaling=0.25)
    ids, chances = target.likeliest(states, token_ids, 5)
    loss = HeadLoss.apply(rows, target.head[:40], bias, ids, chances)
    gradients = torch.autograd.grad(loss, (rows, bias))
    assert read.shape == (1, 28, 6, 16) and read.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert [rows.dtype for rows in gradients] == [torch.bfloat16, torch.float32]
    assert {rows.device for rows in (read, ids, chances, loss, *gradients)} == {GPU}
