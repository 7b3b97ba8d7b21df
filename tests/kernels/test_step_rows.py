"""The other ops of a step: a row's result is the same bits alone and beside any number of other rows."""

import pytest
import torch

from vllm_gsd.cpu.int8_rows import Int8Rows, int8_pays
from vllm_gsd.cpu.linear import linear, pack_weight

pytestmark = pytest.mark.usefixtures("upstream")
ROWS, HIDDEN, HEADS, HEAD_SIZE = 61, 576, 9, 64
SIZES = (1, 2, 3, 7, 16, 17, 33)


def check(op, *inputs: torch.Tensor) -> None:
    """``op`` of all rows equals ``op`` of any part of them, wherever it starts."""
    whole = op(*(each.clone() for each in inputs))
    for size in SIZES:
        for first in range(0, ROWS - size + 1, size + 2):
            part = op(*(each[first : first + size].clone() for each in inputs))
            assert torch.equal(part, whole[first : first + size]), f"{size} rows from {first}"


def rows(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def vllm_layer(build):
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        return build()


@pytest.mark.parametrize("how", ["forward_native", "forward_cpu"])
@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm(how, residual):
    from vllm.model_executor.layers.layernorm import RMSNorm

    norm = vllm_layer(lambda: RMSNorm(HIDDEN, dtype=torch.bfloat16))
    norm.weight.data = rows(HIDDEN)[0].clone()
    inputs = [rows(HIDDEN)] * (2 if residual else 1)
    check(lambda *inputs: as_one(getattr(norm, how)(*inputs)), *inputs)


def as_one(result) -> torch.Tensor:
    return torch.cat(result, dim=1) if isinstance(result, tuple) else result


@pytest.mark.parametrize("how", ["forward_native", "forward_cpu"])
@pytest.mark.parametrize("name", ["RMSNorm", "GemmaRMSNorm"])
def test_norm_of_heads(how, name):
    from vllm.model_executor.layers import layernorm

    norm = vllm_layer(lambda: getattr(layernorm, name)(HEAD_SIZE).bfloat16())
    norm.weight.data = rows(HEAD_SIZE)[0].clone()
    check(getattr(norm, how), rows(HEADS, HEAD_SIZE))


def test_layer_norm():
    norm = torch.nn.LayerNorm(HIDDEN, dtype=torch.bfloat16, device="cpu")
    with torch.inference_mode():
        check(norm, rows(HIDDEN))


SCALED = {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 512}
ROPES = {
    "default": {"rope_theta": 1e4},
    "llama3": {**SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": SCALED,
}


@pytest.mark.parametrize("how", ["forward_native", "forward_cpu"])
@pytest.mark.parametrize("kind", ROPES)
def test_rotary_embedding(how, kind):
    from vllm.model_executor.layers.rotary_embedding import get_rope

    rope = vllm_layer(lambda: get_rope(HEAD_SIZE, 2048, rope_parameters={"rope_type": kind, **ROPES[kind]},
                                       dtype=torch.bfloat16))  # fmt: skip
    positions = torch.randint(0, 2048, (ROWS,), generator=torch.Generator().manual_seed(1))
    check(lambda p, q, k: as_one(getattr(rope, how)(p, q, k)), positions, rows(HEADS * HEAD_SIZE), rows(3 * HEAD_SIZE))


@pytest.mark.parametrize("how", ["forward_native", "forward_cpu"])
def test_activation(how):
    from vllm.model_executor.layers.activation import SiluAndMul

    check(getattr(vllm_layer(SiluAndMul), how), rows(2 * 1536))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate):
    """Compiled. PyTorch's own may round the last elements of a thread's share otherwise than the rest."""
    from vllm.model_executor.layers.activation import GeluAndMul

    act = vllm_layer(lambda: GeluAndMul(approximate))
    x = rows(2 * 1536)
    with torch.inference_mode():
        check(torch.compile(act.forward_native, dynamic=True), x)
        alone = torch.cat([act.forward_native(row) for row in x.split(1)])
        differ = (alone != act.forward_native(x)).float().mean().item()
    assert differ < 1e-3  # an exception that docs/cpu-kernels.md names


def test_compiled():
    """What inductor makes of the ops between two products, for any number of rows."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    norm, act = vllm_layer(lambda: (RMSNorm(HIDDEN).bfloat16(), SiluAndMul()))

    @torch.compile(dynamic=True)
    def between(x, residual, inner):
        normed, residual = norm.forward_native(x, residual)
        return torch.cat([normed, residual, act.forward_native(inner)], dim=1)

    with torch.inference_mode():
        check(between, rows(HIDDEN), rows(HIDDEN).flip(0), rows(2 * 1536))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sampling(dtype):
    logits = rows(49152, dtype=dtype)
    check(lambda x: x.float().log_softmax(dim=-1), logits)
    check(lambda x: x.float().softmax(dim=-1), logits)
    check(lambda x: x.argmax(dim=-1), logits)


def test_penalties():
    from vllm.model_executor.layers.utils import apply_penalties

    random = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 500, (ROWS, length), generator=random) for length in (40, 30)]
    strengths = [torch.rand(ROWS, generator=random) + 0.5 for _ in range(3)]
    check(apply_penalties, rows(500, dtype=torch.float32), *texts, *strengths)


@pytest.mark.parametrize("filters", ["k", "p", "kp"])
def test_top_k_and_top_p(filters):
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    random = torch.Generator().manual_seed(1)
    k = torch.randint(1, 60, (ROWS,), dtype=torch.int32, generator=random)
    p = torch.rand(ROWS, generator=random) * 0.9 + 0.1

    def limited(logits, k, p):
        return apply_top_k_top_p(logits, k if "k" in filters else None, p if "p" in filters else None)

    check(limited, rows(5000, dtype=torch.float32), k, p)


@pytest.mark.parametrize("rank", [8, 64])
def test_lora(rank):
    """Both products of adapters; rows have different ones, or none (-1)."""
    from vllm.lora.ops.torch_ops import bgmv_expand_slice, bgmv_shrink

    random = torch.Generator().manual_seed(1)
    adapter = torch.randint(-1, 3, (ROWS,), generator=random)
    first, second = (torch.randn(3, 1, *shape, generator=random).bfloat16() for shape in ((rank, HIDDEN), (960, rank)))

    def adapted(x, y, adapter):
        low = torch.zeros(len(x), rank)
        bgmv_shrink(x, first, low, adapter, 0.5)
        bgmv_expand_slice(low, second, y, adapter, 100, 960)
        return torch.cat([low, y], dim=1)

    check(adapted, rows(HIDDEN), rows(1100), adapter)


def test_experts():
    """Rows of a batch meet in the products of an expert."""
    from vllm import _custom_ops as ops

    if not hasattr(torch.ops._C, "prepack_moe_weight"):
        pytest.skip("vLLM has no kernel for experts on this processor")
    experts, inner, random = 4, 128, torch.Generator().manual_seed(1)
    first, second = (
        0.1 * torch.randn(experts, *shape, generator=random) for shape in ((2 * inner, HIDDEN), (HIDDEN, inner))
    )
    packed = [ops.cpu_prepack_moe_weight(weight.bfloat16(), "vec") for weight in (first, second)]
    chosen = torch.rand(ROWS, experts, generator=random).topk(2)

    def mixed(x, weights, ids):
        out = torch.empty_like(x)
        ops.cpu_fused_moe(out, x, *packed, None, None, weights, ids, "silu", "vec")
        return out

    check(mixed, rows(HIDDEN), chosen.values.contiguous(), chosen.indices.int())


@pytest.mark.parametrize("columns", [960, 576])
def test_int8(columns):
    weight = torch.randn(columns, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    if not int8_pays(weight):
        pytest.skip("int8 drafting needs AVX-512 VNNI")
    check(Int8Rows(weight), rows(HIDDEN))


@pytest.mark.parametrize("columns", [4, 8, 60])
def test_products_that_are_not_packed(columns):
    """vLLM's own, of few columns, such as those of a router of experts."""
    from vllm import _custom_ops as ops

    # oneDNN has no bfloat16 at all for processors with AVX2 only.
    avx512 = hasattr(torch.ops._C, "onednn_mm") and torch.cpu._is_avx512_supported()
    if not avx512 or torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM multiplies with oneDNN here only on processors with AVX-512 and without AMX")
    weight = torch.randn(columns, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    handler = ops.create_onednn_mm(weight.t(), 32)
    check(lambda x: ops.onednn_mm(handler, x, None), rows(HIDDEN))


@pytest.mark.parametrize(("columns", "size"), [(960, 576), (576, 1536)])
def test_products(isa, columns, size):
    """Of few rows, of those that go through a group in blocks of inputs, and of prompts."""
    if isa == "baseline":
        pytest.skip("packed weights need AVX2")
    random = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(count, size, generator=random).bfloat16() for count in (columns, 300))
    packed = pack_weight(weight)
    whole = linear(x, packed)
    for count in (1, 2, 7, 17, 24, 25, 100, 241):
        for first in range(0, 301 - count, max(count, 30)):
            assert torch.equal(linear(x[first : first + count], packed), whole[first : first + count])
