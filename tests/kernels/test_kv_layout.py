"""Layouts: probing finds the order that a writer uses, and refuses what is not separable."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_cases import LAYOUTS, plain, random_separable

from vllm_gsd.ops.kv_move.layout import KVLayout, pages_of


def writer_of(layout):
    """What upstream's op does, for any layout."""

    def write(key, value, key_cache, value_cache, slots):
        kv_cache = key_cache._base if key_cache._base is not None else key_cache
        num_blocks, heads, block_size, head_size = key_cache.shape
        layout.write(kv_cache.view(num_blocks, heads, block_size, 2 * head_size), slots, key, value)

    return write


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("block_size", "head_size", "dtype"),
    [
        (16, 32, torch.float32),
        (16, 32, torch.float16),
        (128, 64, torch.bfloat16),
        (4, 512, torch.bfloat16),  # numbers that bfloat16 does not hold
        (512, 16, torch.bfloat16),
    ],
    ids=str,
)
def test_probe_finds_the_layout(name, block_size, head_size, dtype):
    layout = LAYOUTS[name](block_size, head_size)
    probed = KVLayout.probe(writer_of(layout), block_size, head_size, dtype)
    kv_cache = torch.randn(2, 2, block_size, 2 * head_size)
    slots = torch.arange(2 * block_size)
    for ours, theirs in zip(probed.read(kv_cache, slots), layout.read(kv_cache, slots), strict=True):
        assert torch.equal(ours, theirs)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31), block_size=st.integers(1, 20), head_size=st.integers(1, 20))
def test_read_returns_what_was_written(seed, block_size, head_size):
    random = torch.Generator().manual_seed(seed)
    layout = random_separable(block_size, head_size, seed)
    kv_cache = torch.zeros(3, 2, block_size, 2 * head_size)
    slots = torch.randperm(3 * block_size, generator=random)
    rows = torch.randn(2, len(slots), 2, head_size, generator=random)
    layout.write(kv_cache, slots, rows[0], rows[1])
    key, value = layout.read(kv_cache, slots)
    assert torch.equal(key, rows[0]) and torch.equal(value, rows[1])


def not_separable(key, value, key_cache, value_cache, slots):
    """Dimensions of odd tokens are reversed."""
    layout = plain(key_cache.shape[2], key_cache.shape[3])
    odd = (slots % 2 == 1).view(-1, 1, 1)
    writer_of(layout)(torch.where(odd, key.flip(2), key), value, key_cache, value_cache, slots)


def drops_values(key, value, key_cache, value_cache, slots):
    layout = plain(key_cache.shape[2], key_cache.shape[3])
    writer_of(layout)(key, torch.full_like(value, -1), key_cache, value_cache, slots)


def wrong_block(key, value, key_cache, value_cache, slots):
    layout = plain(key_cache.shape[2], key_cache.shape[3])
    writer_of(layout)(key, value, key_cache, value_cache, slots - key_cache.shape[2])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (not_separable, "key page's order is not"),
        (drops_values, "value page does not hold"),
        (wrong_block, "do not stay in the page"),
    ],
)
def test_probe_refuses(write, message):
    with pytest.raises(ValueError, match=message):
        KVLayout.probe(write, 16, 32, torch.float32)


def test_refuses_another_cache():
    layout = plain(16, 32)
    for kv_cache in (torch.zeros(2, 1, 16, 32), torch.zeros(2, 1, 32, 64), torch.zeros(2, 16, 64)):
        with pytest.raises(ValueError, match="the layout is for"):
            layout.read(kv_cache, torch.arange(1))
    with pytest.raises(ValueError, match="contiguous"):
        layout.read(torch.zeros(2, 1, 64, 16).transpose(2, 3), torch.arange(1))


def test_pages():
    kv_cache = torch.arange(2 * 3 * 4 * 10).view(2, 3, 4, 10)
    key, value = pages_of(kv_cache)
    assert key.shape == value.shape == (2, 3, 4, 5)
    assert key[1, 2].flatten().tolist() == kv_cache[1, 2].flatten()[:20].tolist()
    assert value[1, 2].flatten().tolist() == kv_cache[1, 2].flatten()[20:].tolist()
