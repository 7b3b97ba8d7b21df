"""Weights in huge pages, which reduce TLB misses because every decoding step reads all weights.

Matrices of small models are smaller than a huge page (2 MiB), so several share a page.
"""

import contextlib
import mmap

import torch

PAGE = 2 << 20
REGION = 32 << 20  # bytes mapped at once; the system commits a page only when it is first written
LINE = 64  # tensors are aligned to cache lines


class HugePages:
    """Allocates tensors one after another in mapped regions; a region is freed with its last tensor."""

    def __init__(self) -> None:
        self.region: mmap.mmap | None = None  # the newest region, used up to ``end``
        self.end = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the CPU, in huge pages if the system supports them."""
        count, size = tensor.numel(), tensor.numel() * tensor.element_size()
        if count == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
            return tensor.clone(memory_format=torch.contiguous_format)
        if self.region is None or len(self.region) - self.end < size:
            self.region, self.end = _region(max(REGION, _rounded(size, PAGE)))
        copy = torch.frombuffer(self.region, dtype=tensor.dtype, count=count, offset=self.end).view(tensor.shape)
        self.end += _rounded(size, LINE)
        return copy.copy_(tensor)


def _region(size: int) -> tuple[mmap.mmap, int]:
    """Map at least ``size`` bytes from a page boundary on; returns the memory and the offset of that boundary."""
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to
