"""``x @ weight.T`` for the few rows of a step, at the price of reading the weights once.

A decoding step waits for its weights: the products of a dozen rows or two, as the processor is, fit into that time, if
the next weights are fetched while the present ones are multiplied. Verifying a graph then costs hardly more than a
plain step.
"""

from __future__ import annotations

import torch

from vllm_gsd.cpu.huge_pages import HugePages
from vllm_gsd.ops import HAVE_EXTENSION

COLUMNS = 16  # of a vector register: a weight has a multiple of so many
_PAGES = HugePages()  # where packed weights lie
_AVX2 = 1  # of ``current_isa``
_WIDTHS = [(1,), (1,), (2, 1), (4, 3, 2, 1)]  # panels that registers have room for, by ``current_isa``


def _isa() -> int:
    return torch.ops.vllm_gsd.current_isa() if HAVE_EXTENSION else 0


def packs(weight: torch.Tensor) -> bool:
    """Whether :func:`linear` serves this weight on this processor: bfloat16, AVX2, sizes that fit registers."""
    if not HAVE_EXTENSION or weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or weight.dim() != 2:
        return False
    columns, size = weight.shape
    return _isa() >= _AVX2 and not columns % COLUMNS and not size % 2 and size > 0


def packing() -> dict[str, int]:
    """What else than its shape decides how :func:`pack_weight` lays out a weight, in this process at this time.

    Code compiled for packed weights has the layout in it as constants, so it serves no other packing.

    Returns:
        ``isa``, the instruction set by its number, and ``threads``, how many torch has.
    """
    return {"isa": _isa(), "threads": torch.get_num_threads()}


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Lay out a weight for :func:`linear`, as many bytes as before.

    Args:
        weight: ``[columns, size]``, columns a multiple of 16 and size of 2.

    Returns:
        ``[groups, size / 2, panels, 16, 2]``: a group is 16 * panels columns. As many panels as there are registers
        for are the fastest, four by pairs of bfloat16 and two with AVX-512; fewer are taken where the groups would be
        shared out unevenly among torch's threads.
    """
    columns, size = weight.shape
    panels = columns // COLUMNS
    width = _panels_of_group(panels, **packing())
    grouped = weight.view(panels // width, width, COLUMNS, size // 2, 2)
    return _PAGES.copy(grouped.permute(0, 3, 1, 2, 4))


def _panels_of_group(panels: int, isa: int, threads: int) -> int:
    def longest(width: int) -> int:
        """Panels of the thread that has most of them, were groups so wide."""
        return -(-(panels // width) // threads) * width

    return min((width for width in _WIDTHS[isa] if not panels % width), key=longest)


def unpack_weight(packed: torch.Tensor) -> torch.Tensor:
    """The ``[columns, size]`` that :func:`pack_weight` was given."""
    groups, pairs, width, panel, _ = packed.shape
    return packed.permute(0, 2, 3, 1, 4).reshape(groups * width * panel, 2 * pairs)


def read_columns(packed: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Rows ``[..., size]`` of the weight, those of ``columns``, int64 ``[...]``."""
    _, pairs, width, _, _ = packed.shape
    panel = columns // COLUMNS
    rows = packed[panel // width, :, panel % width, columns % COLUMNS]
    return rows.reshape(*columns.shape, 2 * pairs)


def write_columns(packed: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows ``[n, size]`` of the weight anew, those of ``columns``, int64 ``[n]``."""
    _, pairs, width, _, _ = packed.shape
    panel = columns // COLUMNS
    packed[panel // width, :, panel % width, columns % COLUMNS] = rows.view(len(rows), pairs, 2)


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, products of bfloat16 summed in float32 in the order of their inputs.

    A row's result does not depend on the other rows, nor on the number of threads.

    Args:
        x: bfloat16 ``[..., size]``.
        packed: of :func:`pack_weight`, bfloat16.
        bias: bfloat16 ``[columns]``.

    Returns:
        bfloat16 ``[..., columns]``.

    Raises:
        ValueError: a shape or dtype is another.
    """
    return torch.ops.vllm_gsd.linear(x, packed, bias)


def linear_reference(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`linear` in plain PyTorch, rounded once, in the end."""
    weight = unpack_weight(packed).to(torch.promote_types(packed.dtype, torch.float32))
    product = torch.nn.functional.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
    return product.to(x.dtype)


if HAVE_EXTENSION:

    @torch.library.register_fake("vllm_gsd::linear")
    def _shape_of_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0] * weight.shape[2] * COLUMNS)
