"""The store of hidden states by KV slot, and what else our workers do."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_gsd.engine.draft.features import Features
from vllm_gsd.engine.worker_memory import SharesMemory, give_back_freed, kv_share


def make() -> Features:
    features = Features(10, 3, torch.float32, torch.device("cpu"))
    features.write(torch.arange(10), torch.arange(10.0)[:, None].expand(-1, 3))
    return features


def test_rows_before_a_text_are_zero():
    read = make().read(torch.tensor([4, 0, 7]), torch.tensor([False, True, False]))
    assert read[:, 0].tolist() == [4, 0, 7]


def test_a_move_reads_before_it_writes_and_leaves_out_negative_sources():
    features = make()
    features.move(torch.tensor([[5, 6, -2], [9, -1, -1]]), torch.tensor([[4, 5, 1], [8, 2, 3]]))
    assert features.states[:10, 0].tolist() == [0, 1, 2, 3, 5, 6, 6, 7, 9, 9]


def test_what_is_written_to_no_slot_is_nobodys():
    features = make()
    features.write(torch.tensor([2, -1]), torch.full((2, 3), 50.0))
    assert features.states[:10, 0].tolist() == [0, 1, 50, 3, 4, 5, 6, 7, 8, 9]


def test_the_kv_cache_leaves_them_room():
    """The layers take 256 and 128 bytes per token and hidden states take 96, so these get a fifth of the memory."""
    specs = [SimpleNamespace(page_size_bytes=4096, block_size=size) for size in (16, 32)]
    assert kv_share(1000, specs, 96) == 800
    assert kv_share(1000, specs, 0) == 1000


def test_updates_of_the_drafts_weights_are_refused_as_such():
    """Upstream's worker would say that no draft model is configured."""
    with pytest.raises(NotImplementedError, match="gsd cannot update its draft's weights; start the engine anew"):
        SharesMemory().start_draft_weight_update()


def test_freed_memory_goes_back():
    """The allocator keeps freed small blocks until ``give_back_freed`` returns them to the operating system."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    blocks = [torch.ones(16 << 10, dtype=torch.uint8) for _ in range(4096)]  # 64 MiB
    last = torch.ones(16 << 10, dtype=torch.uint8)  # keeps the freed blocks from being at the end of the heap
    blocks.clear()
    before = resident()
    give_back_freed()
    assert resident() <= before - (32 << 20) // 4096
    assert last.all()
