"""The keys and values of a drafted block's context."""

from types import MethodType, SimpleNamespace

import pytest
import torch
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

from vllm_gsd.cpu.linear import packs
from vllm_gsd.upstream.drafts import pack_context_projections

LAYERS, HEADS, HEAD_SIZE, HIDDEN = 3, 2, 32, 96


def draft(bias: torch.Tensor | None = None) -> SimpleNamespace:
    """What vLLM's draft of whole blocks reads to compute them."""
    random = torch.Generator().manual_seed(0)
    inner = SimpleNamespace(
        _fused_kv_weight=torch.randn(LAYERS * 2 * HEADS * HEAD_SIZE, HIDDEN, generator=random).bfloat16(),
        _fused_kv_bias=bias,
        _hidden_norm_weight=torch.rand(HIDDEN, generator=random).bfloat16(),
        _rms_norm_eps=1e-5,
        _num_attn_layers=LAYERS,
    )
    inner._project_context_kv = MethodType(DFlashQwen3Model._project_context_kv, inner)
    return SimpleNamespace(model=inner)


def project(model: SimpleNamespace, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    states = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).bfloat16()
    return model.model._project_context_kv(states, count, LAYERS, HEADS, HEAD_SIZE)


@pytest.mark.parametrize("count", [1, 5, 40])
def test_packed_projections_compute_the_same(count):
    if not packs(torch.empty(16, 2, dtype=torch.bfloat16)):
        pytest.skip("packed weights need AVX2")
    plain, packed = draft(), draft()
    for _ in range(2):  # the second time, as when the KV cache is made again, there is nothing to do
        pack_context_projections(packed, packs)
    assert packed.model._fused_kv_weight is None
    for ours, theirs in zip(project(packed, count), project(plain, count), strict=True):
        assert ours.is_contiguous() and ours.shape == (LAYERS, count, HEADS, HEAD_SIZE)
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("model", [draft(torch.zeros(LAYERS * 2 * HEADS * HEAD_SIZE)), SimpleNamespace(model=object())])
def test_other_drafts_stay_as_they_are(model):
    """Of projections with a bias, and of drafts that compute both from other weights."""
    before = dict(getattr(model.model, "__dict__", {}))
    pack_context_projections(model, lambda weight: True)
    assert dict(getattr(model.model, "__dict__", {})) == before


def test_weights_that_our_kernel_does_not_take():
    model = draft()
    pack_context_projections(model, lambda weight: False)
    assert model.model._fused_kv_weight is not None
