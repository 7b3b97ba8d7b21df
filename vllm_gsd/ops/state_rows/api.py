"""Hidden states by row: those of the target, and a draft's own.

Row -1 belongs to no request. Writes to it are discarded and reads from it return arbitrary values; the PyTorch versions
use the last row for it. On CPUs, a shape or dtype that does not fit raises ValueError, and a row that does not exist
IndexError.
"""

import torch

from vllm_gsd.ops import use_kernel


def read_rows(states: torch.Tensor, rows: torch.Tensor, cleared: torch.Tensor | None = None) -> torch.Tensor:
    """Copy ``rows``, int64 ``[m]`` from -1 to n - 1, out of ``states``, ``[n, size]``; zeros where ``cleared``."""
    if use_kernel(states):
        return torch.ops.vllm_gsd.read_rows(states, rows, cleared)
    read = states[rows]
    return read if cleared is None else read.masked_fill_(cleared[:, None], 0.0)


def write_rows(states: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Write values ``[m, size]`` of the states' dtype to the rows, int64 ``[m]``."""
    if use_kernel(states):
        torch.ops.vllm_gsd.write_rows(states, rows, values)
    else:
        states[rows] = values


def move_rows(states: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy rows from sources to destinations, int64 ``[m]`` each; all reads come before all writes.

    A move with a negative source is skipped.
    """
    if use_kernel(states):
        torch.ops.vllm_gsd.move_rows(states, sources, destinations)
        return
    kept = torch.where(sources < 0, -1, destinations)
    states[kept] = states[sources.clamp(min=-1)]
