"""Copies of tensors in huge pages: equal to their originals, without overlap, and freed with their last reference."""

import gc
import mmap
import weakref
from itertools import pairwise

import pytest
import torch

from vllm_gsd.cpu import huge_pages
from vllm_gsd.cpu.huge_pages import LINE, PAGE, REGION, HugePages


def test_copies():
    pages = HugePages()
    given = [torch.randn(7, 3), torch.randn(1).bfloat16(), torch.arange(130).view(13, 10).T, torch.zeros(0, 4)]
    copies = [pages.copy(tensor) for tensor in given]
    for copy, tensor in zip(copies, given, strict=True):
        assert copy.is_contiguous()
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
    for copy in copies:
        copy.fill_(9)
    assert not torch.equal(copies[2], given[2])
    places = sorted((copy.data_ptr(), copy.data_ptr() + copy.nbytes) for copy in copies if copy.numel())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
    assert all(begin % LINE == 0 for begin, _ in places)
    assert places[0][0] % PAGE == 0


def test_what_is_larger_than_a_region_and_what_does_not_fit_behind_it():
    pages = HugePages()
    large = torch.arange(REGION + 5, dtype=torch.uint8)
    for tensor in (large, large[: PAGE + 1], large[: REGION - PAGE], large[: 2 * PAGE]):
        assert torch.equal(pages.copy(tensor), tensor)


def test_the_kernel_is_asked_for_huge_pages(monkeypatch):
    """The request may fail: the kernel decides whether there are huge pages."""
    calls = []

    class Memory(mmap.mmap):
        def madvise(self, *arguments):
            calls.append(arguments)
            raise OSError("no huge pages")

    monkeypatch.setattr(huge_pages.mmap, "mmap", Memory)
    assert HugePages().copy(torch.ones(5)).tolist() == [1] * 5
    assert calls == [(mmap.MADV_HUGEPAGE,)]


def test_without_them(monkeypatch):
    monkeypatch.delattr(huge_pages.mmap, "MADV_HUGEPAGE")
    given = torch.arange(6).view(2, 3).T
    copy = HugePages().copy(given)
    assert copy.is_contiguous() and torch.equal(copy, given) and copy.data_ptr() != given.data_ptr()


@pytest.mark.parametrize("kept", [0, 1])
def test_a_region_goes_with_the_last_of_its_tensors(monkeypatch, kept):
    regions = []

    class Memory(mmap.mmap):
        def __init__(self, *_args, **_options):
            regions.append(weakref.ref(self))

    monkeypatch.setattr(huge_pages.mmap, "mmap", Memory)
    pages = HugePages()
    copies = [pages.copy(torch.ones(3)) for _ in range(2)]
    pages.copy(torch.zeros(REGION + 2 * PAGE, dtype=torch.uint8))  # does not fit: a new region
    del copies[kept:]
    gc.collect()
    assert (regions[0]() is not None) == (kept > 0)
