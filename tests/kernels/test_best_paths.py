"""The compiled ``best_paths`` refuses what would make it read outside of its arguments."""

import pytest
import torch

from vllm_gsd.ops import HAVE_EXTENSION
from vllm_gsd.ops.lattice.api import best_paths

POOL = 10


@pytest.mark.skipif(not HAVE_EXTENSION, reason="the compiled kernels are not built")
@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ([3, POOL], f"ids name token {POOL} of a pool of {POOL}"),
        ([3, 10**9], f"ids name token {10**9} of a pool of {POOL}"),
        ([-1, 3], f"ids name token -1 of a pool of {POOL}"),
        ([3, 3], "a row of ids must name different tokens"),
    ],
    ids=str,
)
def test_tokens_that_cannot_be_candidates_are_refused(ids, sentence):
    scores, chances, best = torch.randn(1, 1, POOL), torch.full((1, 1), 0.5), torch.zeros(1, 1)
    with pytest.raises(ValueError, match=sentence):
        best_paths(scores, chances, torch.tensor([[ids]]), best, True)
