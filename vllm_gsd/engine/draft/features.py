"""Hidden states of the target for all tokens in the KV cache, for drafts that read them (EAGLE, Li et al. 2024).

Hidden states are stored by KV slot, one row per token, so they follow keys and values. Tokens from vLLM's prefix cache
have hidden states, a draft can catch up after steps in which it did not run, and the hidden states of accepted nodes
move with their KV.
"""

import torch

from vllm_gsd.ops.state_rows.api import move_rows, read_rows, write_rows


class Features:
    """Hidden states by physical KV slot. Writes to slot -1 are discarded."""

    def __init__(self, num_slots: int, size: int, dtype: torch.dtype, device: torch.device):
        # Uninitialised, so that the system provides memory only as slots are used. The last row receives slot -1.
        self.states = torch.empty((num_slots + 1, size), dtype=dtype, device=device)

    def write(self, slots: torch.Tensor, hidden: torch.Tensor) -> None:
        """Store the target's hidden states [n, hidden] in ``slots``, int64 [n]."""
        write_rows(self.states, slots, hidden.to(self.states.dtype))

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy rows between slots, int64 of one shape. All reads precede all writes. Negative sources are skipped."""
        move_rows(self.states, sources.flatten(), destinations.flatten())

    def read(self, slots: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Read the hidden states [n, hidden] in ``slots``, int64 [n].

        Rows where ``first``, bool [n], is set are zero: no token precedes the first token of a text.
        """
        return read_rows(self.states, slots, first)
