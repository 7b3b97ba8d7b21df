"""Hidden states by slot."""

import torch

from vllm_gsd.runtime.features import Features


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
