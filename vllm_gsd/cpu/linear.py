"""``x @ weight.T`` for the few rows of a decoding step, at the cost of reading the weights once.

A decoding step is memory-bound. If the kernel prefetches the next weights while it multiplies the current ones, the
products of one or two dozen rows take no extra time. Verifying a graph then costs hardly more than a plain step.
"""

import torch

from vllm_gsd.cpu.huge_pages import HugePages
from vllm_gsd.ops import HAVE_EXTENSION

COLUMNS = 16  # the width of a panel; the columns of a packed weight are a multiple of it
_PAGES = HugePages()  # holds the packed weights
_AVX2 = 1  # a value of ``current_isa``
_WIDTHS = [(1,), (1,), (2, 1), (4, 3, 2, 1)]  # panels per group that fit the registers, by ``current_isa``


def _isa() -> int:
    return torch.ops.vllm_gsd.current_isa() if HAVE_EXTENSION else 0


def packs(weight: torch.Tensor) -> bool:
    """Whether :func:`linear` supports this weight on this processor: bfloat16, AVX2, suitable sizes."""
    if not HAVE_EXTENSION or weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or weight.dim() != 2:
        return False
    columns, size = weight.shape
    return _isa() >= _AVX2 and not columns % COLUMNS and not size % 2 and size > 0


def packing() -> dict[str, int]:
    """The conditions, besides the shape of a weight, that determine the layout of :func:`pack_weight`.

    Code compiled for packed weights contains the layout as constants, so it works with this packing only.

    Returns:
        ``isa``, the number of the instruction set, and ``threads``, torch's number of threads.
    """
    return {"isa": _isa(), "threads": torch.get_num_threads()}


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Lay out a weight for :func:`linear`; the size in bytes does not change.

    Args:
        weight: ``[columns, size]``, columns a multiple of 16 and size of 2.

    Returns:
        ``[groups, size / 2, panels, 16, 2]``; a group has 16 * panels columns. The most panels that fit the registers
        are the fastest: four with AVX-512 BF16, two with AVX-512. Fewer are used if torch's threads would otherwise get
        uneven shares of the groups.
    """
    columns, size = weight.shape
    panels = columns // COLUMNS
    width = _panels_of_group(panels, **packing())
    grouped = weight.view(panels // width, width, COLUMNS, size // 2, 2)
    return _PAGES.copy(grouped.permute(0, 3, 1, 2, 4))


def _panels_of_group(panels: int, isa: int, threads: int) -> int:
    def longest(width: int) -> int:
        """Most panels that a thread gets if a group has ``width`` panels."""
        return -(-(panels // width) // threads) * width

    return min((width for width in _WIDTHS[isa] if not panels % width), key=longest)


def read_columns(packed: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Read the weights of some output columns: rows of an embedding that is an LM head too.

    Args:
        packed: bfloat16, from :func:`pack_weight`.
        columns: int32 or int64 ``[...]``.

    Returns:
        bfloat16 ``[..., size]``.

    Raises:
        IndexError: there is no such column.
        ValueError: a shape or dtype differs from these.
    """
    return torch.ops.vllm_gsd.read_columns(packed, columns)


def write_columns(packed: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor) -> None:
    """Overwrite the weights of some output columns, int64 ``[n]``, with ``rows``, ``[n, size]``."""
    _, pairs, width, _, _ = packed.shape
    panel = columns // COLUMNS
    packed[panel // width, :, panel % width, columns % COLUMNS] = rows.view(len(rows), pairs, 2)


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``: bfloat16 products, accumulated in float32 in the order of the inputs.

    The result of a row depends neither on the other rows nor on the number of threads.

    Args:
        x: bfloat16 ``[..., size]``.
        packed: bfloat16, from :func:`pack_weight`.
        bias: bfloat16 ``[columns]``.

    Returns:
        bfloat16 ``[..., columns]``.

    Raises:
        ValueError: a shape or dtype differs from these.
    """
    return torch.ops.vllm_gsd.linear(x, packed, bias)


if HAVE_EXTENSION:

    @torch.library.register_fake("vllm_gsd::linear")
    def _shape_of_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0] * weight.shape[2] * COLUMNS)

    @torch.library.register_fake("vllm_gsd::read_columns")
    def _shape_of_columns(packed: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return packed.new_empty(*columns.shape, 2 * packed.shape[1])
