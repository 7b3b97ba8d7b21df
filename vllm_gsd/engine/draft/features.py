"""The target's hidden states of all tokens in the KV cache, for drafts that read them (EAGLE, Li et al. 2024).

They lie in slots as keys and values do, one row a token: what vLLM's prefix cache hands on keeps its hidden states, a
draft that was not run for a while catches up on them, and accepted nodes move with their keys and values.
"""

import torch

from vllm_gsd.ops.state_rows.api import move_rows, read_rows, write_rows


class Features:
    """Hidden states by physical slot; what is written to slot -1 is nobody's.

    Args:
        num_slots: of the KV cache; size: of a hidden state.
    """

    def __init__(self, num_slots: int, size: int, dtype: torch.dtype, device: torch.device):
        # Not cleared: memory is taken page by page as slots come into use. The last row is that of slot -1.
        self.states = torch.empty((num_slots + 1, size), dtype=dtype, device=device)

    def write(self, slots: torch.Tensor, hidden: torch.Tensor) -> None:
        """Keep hidden states [n, hidden] of the target in slots, int64 [n]."""
        write_rows(self.states, slots, hidden.to(self.states.dtype))

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy rows between slots; all reads come before all writes.

        Args:
            sources, destinations: int64, of one shape; where a source is negative nothing is moved.
        """
        move_rows(self.states, sources.flatten(), destinations.flatten())

    def read(self, slots: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden] in slots; zeros where ``first``, bool [n]: nothing comes before a text."""
        return read_rows(self.states, slots, first)
