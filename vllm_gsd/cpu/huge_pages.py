"""Memory in huge pages, for weights: every step reads all of them, and to find where a page lies takes time too.

Matrices of small models are smaller than such a page (2 MiB), so they lie one behind the other.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

PAGE = 2 << 20
REGION = 32 << 20  # what is asked for at once; of its end nothing is taken before it is written to
LINE = 64  # a tensor begins where a cache line does


class HugePages:
    """Lays tensors one behind the other; a region goes when none of them is left."""

    def __init__(self) -> None:
        self.region: mmap.mmap | None = None  # the last one, taken up to ``end``
        self.end = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the CPU, in huge pages where the system has them."""
        count, size = tensor.numel(), tensor.numel() * tensor.element_size()
        if count == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
            return tensor.clone(memory_format=torch.contiguous_format)
        if self.region is None or len(self.region) - self.end < size:
            self.region, self.end = _region(max(REGION, _rounded(size, PAGE)))
        copy = torch.frombuffer(self.region, dtype=tensor.dtype, count=count, offset=self.end).view(tensor.shape)
        self.end += _rounded(size, LINE)
        return copy.copy_(tensor)


def _region(size: int) -> tuple[mmap.mmap, int]:
    """Memory with ``size`` bytes from the beginning of a page on, and where in it that is."""
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to
