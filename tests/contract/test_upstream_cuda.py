"""The parts of vLLM on which our CUDA attention backends depend. The tests read sources and need no GPU."""

import ast
import inspect
from pathlib import Path

import pytest
import vllm
from vllm.v1.attention.backends import fa_utils, flash_attn, triton_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum

IMPLS = [flash_attn.FlashAttentionImpl, triton_attn.TritonAttentionImpl]


@pytest.mark.parametrize("impl", IMPLS)
def test_forward(impl):
    assert list(inspect.signature(impl.forward).parameters) == [
        "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale",
        "output_block_scale",
    ]  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
def test_attributes(impl):
    source = inspect.getsource(impl.__init__)
    for name in ("num_heads", "head_size", "scale", "logits_soft_cap", "sinks", "kv_cache_dtype"):
        assert f"self.{name} = " in source, name
    assert "self.sliding_window = (sliding_window - 1, 0)" in source and "(-1, -1)" in source


@pytest.mark.parametrize("impl", IMPLS)
def test_cache_has_heads_first_and_keys_beside_values(impl):
    """The logical shape is [num_blocks, kv_heads, block_size, 2 * head_size], and ``forward`` does not update it."""
    source = inspect.getsource(impl.do_kv_cache_update)
    assert "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)" in source
    assert "[num_blocks, num_kv_heads, block_size, 2 * head_size]" in inspect.getdoc(impl.forward)
    for backend in (flash_attn.FlashAttentionBackend, triton_attn.TritonAttentionBackend):
        assert backend.forward_includes_kv_cache_update is False


@pytest.mark.parametrize("impl", IMPLS)
def test_scales_of_a_quantised_cache(impl):
    source = inspect.getsource(impl.forward)
    for name in ("layer._q_scale", "layer._k_scale.expand(", "layer._v_scale.expand("):
        assert name in source


def test_backends_can_be_replaced():
    for name in ("FLASH_ATTN", "TRITON_ATTN"):
        assert not AttentionBackendEnum[name].is_overridden()
        assert AttentionBackendEnum[name].get_class().get_name() == name


def test_flash_attention_takes_pages_and_returns_its_log_sum_exp():
    """The source is read and not imported, because not every build has the binary."""
    file = Path(vllm.__file__).parent / "vllm_flash_attn/flash_attn_interface.py"
    if not file.exists():
        pytest.skip("this build of vLLM has no FlashAttention")
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    function = next(node for node in functions if node.name == "flash_attn_varlen_func")
    names = {argument.arg for argument in function.args.args}
    assert names >= {
        "q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "seqused_k", "softmax_scale", "causal",
        "softcap", "block_table", "return_softmax_lse", "fa_version",
    }  # fmt: skip


def test_versions_of_flash_attention_are_chosen_by_these():
    assert {"head_size", "requires_softcap"} <= set(inspect.signature(fa_utils.get_flash_attn_version).parameters)
