"""The other ops of a step: a row's result is the same bits alone and beside any number of other rows."""

import pytest
import torch

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
def test_rotary_embedding(how):
    from vllm.model_executor.layers.rotary_embedding import get_rope

    rope = vllm_layer(lambda: get_rope(HEAD_SIZE, 2048, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
                                       dtype=torch.bfloat16))  # fmt: skip
    positions = torch.randint(0, 2048, (ROWS,), generator=torch.Generator().manual_seed(1))
    check(lambda p, q, k: as_one(getattr(rope, how)(p, q, k)), positions, rows(HEADS * HEAD_SIZE), rows(3 * HEAD_SIZE))


@pytest.mark.parametrize("how", ["forward_native", "forward_cpu"])
def test_activation(how):
    from vllm.model_executor.layers.activation import SiluAndMul

    check(getattr(vllm_layer(SiluAndMul), how), rows(2 * 1536))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sampling(dtype):
    logits = rows(49152, dtype=dtype)
    check(lambda x: x.float().log_softmax(dim=-1), logits)
    check(lambda x: x.float().softmax(dim=-1), logits)
    check(lambda x: x.argmax(dim=-1), logits)


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
