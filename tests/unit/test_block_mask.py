"""Which rows of a drafted block attend to each other."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_gsd.engine.draft.block_drafter import BlockDrafter


@pytest.mark.parametrize("rows", [1, 6, 63, 64, 70])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_a_block(rows, causal):
    drafter = BlockDrafter.__new__(BlockDrafter)
    model = SimpleNamespace(get_draft_attn_causal=lambda: [causal, causal])
    drafter.num_rows, drafter.model = rows, SimpleNamespace(model=model)
    drafter.check_layers({})
    assert drafter.mask.dtype == np.int64
    bits = np.unpackbits(drafter.mask.view(np.uint8), axis=1, bitorder="little").astype(bool)
    seen = np.tri(rows, dtype=bool) if causal else np.ones((rows, rows), bool)
    assert np.array_equal(bits[:, :rows], seen) and not bits[:, rows:].any()
