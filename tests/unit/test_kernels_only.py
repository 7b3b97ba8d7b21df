"""An engine with our CPU kernels but without speculation: its vLLM arguments, and how rows attend."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_gsd.config import GSDConfig
from vllm_gsd.engine.attention import cpu_causal, tree_rows
from vllm_gsd.engine.attention.cpu_causal import CausalCPUAttentionMetadataBuilder, rows_of
from vllm_gsd.engine.kernels_only import KernelsCPUWorker
from vllm_gsd.ops.attention.cpu import _attended
from vllm_gsd.upstream import hooks, wire

CONFIG = GSDConfig.load({"method": "gsd", "model": None, "sources": []})
SIZES = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}


def batch(rows, before, **options):
    """vLLM's common metadata of a step in which request r has ``rows[r]`` rows after ``before[r]`` keys."""
    starts = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    return SimpleNamespace(
        num_reqs=len(rows),
        num_actual_tokens=sum(rows),
        query_start_loc=starts,
        seq_lens=torch.tensor(rows, dtype=torch.int32) + torch.tensor(before, dtype=torch.int32),
        block_table_tensor=torch.zeros(len(rows), 8, dtype=torch.int32),
        **{"causal": True, **options},
    )


@pytest.mark.parametrize("v2", [False, True])
def test_vllm_is_told_of_a_worker_and_nothing_else(v2):
    args = wire.engine_args(CONFIG, v2, cpu=True, additional_config={"theirs": 1})
    options = args.pop("additional_config")
    assert args == {"speculative_config": None, "worker_cls": "vllm_gsd.engine.kernels_only.KernelsCPUWorker"}
    assert options["theirs"] == 1 and wire.options_of(SimpleNamespace(additional_config=options)) == CONFIG


def test_the_runner_is_upstreams():
    """``CPUWorker.init_device`` chooses vLLM's V1 or V2 runner."""
    assert KernelsCPUWorker.init_device is CPUWorker.init_device


def test_no_slots_and_no_metrics():
    config = SimpleNamespace(additional_config=wire.with_options(None, CONFIG))
    assert hooks.reserve_draft_slots(property(lambda self: 99)).__get__(config) == 0
    exports = SimpleNamespace()
    hooks.report_metrics(lambda *args: None)(exports, config, [], {})
    assert not vars(exports)


def test_each_row_sees_what_lies_before_it_and_itself():
    rows, before = [3, 1, 5], [40, 9, 0]
    tree = rows_of(batch(rows, before))
    assert tree.rows is None and tree.mask.shape == (9, 0)
    for request, (count, start) in enumerate(zip(rows, before, strict=True)):
        own = slice(*tree.query_start_loc[request : request + 2].tolist())
        assert tree.positions[own].tolist() == list(range(start, start + count))
        seen = _attended(int(tree.prefix_lens[request]), tree.positions[own], tree.mask[own], -1)
        assert [row.nonzero().squeeze(1).tolist() for row in seen] == [list(range(start + i + 1)) for i in range(count)]


@pytest.fixture
def builder(monkeypatch):
    """Makes our metadata builder for a layer. vLLM's own metadata is replaced by the string "upstream"."""
    monkeypatch.setattr(CPUAttentionMetadataBuilder, "__init__", lambda *args: None)
    monkeypatch.setattr(CPUAttentionMetadataBuilder, "build", lambda *args, **kwargs: "upstream")

    def make(spec, faster=True):
        monkeypatch.setattr(cpu_causal, "serves_chains", lambda *args: faster)
        return CausalCPUAttentionMetadataBuilder(spec, [], SimpleNamespace(model_config=None), torch.device("cpu"))

    return make


def test_who_attends(builder):
    ours, theirs = batch([3, 1], [5, 5]), "upstream"
    full = FullAttentionSpec(**SIZES)
    assert wire.attached(builder(full).build(0, ours), wire.TREE_ROWS).positions.tolist() == [5, 6, 7, 5]
    assert builder(full, faster=False).build(0, ours) == theirs
    assert builder(full).build(0, batch([1], [5])) == theirs  # a single row gains nothing
    assert builder(full).build(0, batch([3, 1], [5, 5], causal=False)) == theirs
    assert builder(SlidingWindowSpec(**SIZES, sliding_window=64)).build(0, ours) == theirs


@pytest.mark.parametrize(
    ("amx", "head_size", "dtype", "ours"),
    [
        (False, 64, torch.bfloat16, True),
        (True, 64, torch.bfloat16, False),
        (True, 80, torch.bfloat16, True),  # vLLM's kernel does not use AMX for this size
        (False, 64, torch.float32, False),
    ],
)
def test_ours_attends_rows_without_branches_where_it_is_faster(monkeypatch, amx, head_size, dtype, ours):
    monkeypatch.setattr(tree_rows, "HAVE_EXTENSION", True)
    monkeypatch.setattr(tree_rows, "uses_cpu_kernels", lambda config: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    model = SimpleNamespace(dtype=dtype, get_head_size=lambda: head_size)
    assert tree_rows.serves_chains(None, torch.device("cpu"), model) is ours
