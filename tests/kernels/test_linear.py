"""The linear kernel against exact products, what vLLM multiplies by, and itself."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_gsd.cpu.linear import linear, pack_weight, packs, read_columns, write_columns


@pytest.fixture
def served(isa):
    """Every instruction set that serves packed weights and this machine has."""
    if isa == "baseline":
        pytest.skip("packed weights need AVX2")
    assert packs(torch.empty(16, 2, dtype=torch.bfloat16))


def matrix(columns, size):
    return torch.randn(columns, size).bfloat16()


def unpack_weight(packed):
    """The inverse of ``pack_weight``: ``[columns, size]``."""
    groups, pairs, width, panel, _ = packed.shape
    return packed.permute(0, 2, 3, 1, 4).reshape(groups * width * panel, 2 * pairs)


def check(x, weight, bias=None):
    """As near to the exact product as one rounding to bfloat16 and sums in float32 come."""
    ours = linear(x, pack_weight(weight), bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert ours.dtype == torch.bfloat16 and ours.shape == exact.shape
    scale = x.double().abs() @ weight.double().abs().T  # what cancels out leaves errors of its own size
    assert ((ours.double() - exact).abs() <= exact.abs() * 2**-8 + scale * 2**-20).all()


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8, 9, 12, 13, 17, 24, 25, 64, 240, 241, 700])
@pytest.mark.parametrize("columns", [16, 32, 48, 64, 80, 576])
def test_rows_and_columns(rows, columns):
    check(matrix(rows, 96), matrix(columns, 96))


@pytest.mark.usefixtures("served")
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(0, 40), panels=st.integers(1, 13), pairs=st.integers(1, 70), bias=st.booleans())
def test_any_size(rows, panels, pairs, bias):
    check(matrix(rows, 2 * pairs), matrix(16 * panels, 2 * pairs), matrix(1, 16 * panels)[0] if bias else None)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_rows_alone_and_any_threads(threads, count):
    """A row's result is the same bits in any company, with any number of threads."""
    weight, x = matrix(176, 130), matrix(37, 130)
    alone = torch.cat([linear(row.unsqueeze(0), pack_weight(weight)) for row in x])
    threads(count)
    packed = pack_weight(weight)
    for rows in (1, 3, 8, 20, 37):
        assert torch.equal(linear(x[:rows], packed), alone[:rows])


@pytest.mark.usefixtures("served")
def test_views():
    weight = matrix(32, 40)
    check(matrix(12, 80)[::2, 20:60], weight)
    check(matrix(40, 12).T, weight)
    check(torch.randn(2, 3, 40).bfloat16(), weight)
    check(matrix(1, 40)[0], weight)


@pytest.mark.usefixtures("served")
def test_against_upstream(upstream):
    """Sums in another order: only a value on the edge between two of bfloat16's may fall to the other side."""
    from vllm.model_executor.layers import utils

    for columns, size, rows in ((960, 576, 1), (576, 1536, 17), (3072, 576, 300)):
        weight, x = matrix(columns, size), matrix(rows, size)
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        theirs = layer.cpu_linear(x, weight, None)
        ours = linear(x, pack_weight(weight))
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-3)
        edge = (ours.double() + theirs.double()) / 2
        exact, scale = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
        assert ((ours == theirs) | ((exact - edge).abs() <= scale * 2**-20)).all()


@pytest.mark.usefixtures("served")
def test_compiled():
    """torch.compile takes it as it is."""
    packed, bias, x = pack_weight(matrix(48, 64)), matrix(1, 48)[0], matrix(9, 64)
    torch.library.opcheck(torch.ops.vllm_gsd.linear.default, (x, packed, bias))
    function = torch.compile(lambda x: linear(x, packed, bias) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(function(x), linear(x, packed, bias) + 1)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("x", "packed", "bias", "says"),
    [
        (torch.zeros(3, 62, dtype=torch.bfloat16), None, None, r"x must be bfloat16 \[..., 64\]"),
        (torch.zeros(3, 64), None, None, "x must be bfloat16"),
        (None, torch.zeros(32, 64, dtype=torch.bfloat16), None, "packed by pack_weight"),
        (None, None, torch.zeros(31, dtype=torch.bfloat16), r"bias must be bfloat16 \[32\]"),
    ],
)
def test_refuses(x, packed, bias, says):
    good = pack_weight(matrix(32, 64))
    with pytest.raises(ValueError, match=says):
        linear(matrix(1, 64) if x is None else x, good if packed is None else packed, bias)


def test_refuses_more_panels_than_registers(isa):
    most = {"baseline": 0, "avx2": 1, "avx512": 2, "avx512bf16": 4}[isa]
    if most == 0:
        pytest.skip("packed weights need AVX2")
    packed = torch.zeros(1, 2, most + 1, 16, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="packed"):
        linear(matrix(1, 4), packed)


def test_packing_is_undone():
    for columns, size in ((16, 2), (176, 130), (3072, 576)):
        weight = matrix(columns, size)
        packed = pack_weight(weight)
        assert packed.numel() == weight.numel() and torch.equal(unpack_weight(packed), weight)


def test_columns_are_read_and_written_anew():
    weight = matrix(176, 130)
    packed, columns, rows = pack_weight(weight), torch.tensor([0, 175, 17, 64]), matrix(4, 130)
    assert torch.equal(read_columns(packed, columns), weight[columns])
    assert torch.equal(read_columns(packed, columns.view(2, 2).int()), weight[columns.view(2, 2)])
    assert read_columns(packed, columns[:0]).shape == (0, 130)
    for wrong in (-1, 176):
        with pytest.raises(IndexError, match=f"column {wrong} of a weight that has 176"):
            read_columns(packed, torch.tensor([0, wrong]))
    for refused in ((weight, columns), (packed, columns.float())):
        with pytest.raises(ValueError, match=r"packed by pack_weight|int32 or int64"):
            read_columns(*refused)
    write_columns(packed, columns, rows)
    weight[columns] = rows
    assert torch.equal(unpack_weight(packed), weight)


@pytest.mark.parametrize(
    "weight", [torch.zeros(16, 2), torch.zeros(17, 2).bfloat16(), torch.zeros(16, 3).bfloat16(), torch.zeros(16)]
)
def test_leaves_to_others(weight):
    assert not packs(weight)


def test_needs_the_instructions(up_to_isa):
    up_to_isa("baseline")
    assert not packs(torch.empty(16, 2, dtype=torch.bfloat16))
