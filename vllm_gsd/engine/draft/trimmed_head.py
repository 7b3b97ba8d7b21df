"""A draft's LM head that computes logits only for frequent tokens and for tokens seen recently.

Texts repeat their own rare tokens, such as names, terms or words of a foreign language. The head's last columns are a
ring buffer of such tokens, so the set of frequent tokens can be small.
"""

from collections.abc import Callable

import numpy as np
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_gsd.cpu.int8_rows import Int8Rows, int8_pays
from vllm_gsd.cpu.linear import COLUMNS, linear, pack_weight, write_columns
from vllm_gsd.cpu.packed_weights import packs_weights
from vllm_gsd.engine.verify.staging import send

# Rare tokens in the ring buffer, shared by all requests. The oldest is replaced first.
RECENT = 512
# The largest ``top_k``.
MOST_CANDIDATES = 32


class TrimmedHead(torch.nn.Module):
    """A subset of an LM head's tokens, packed in the fastest way on CPUs.

    Args:
        lookup: returns the LM head's rows [n, hidden] for tokens, int64 [n] on ``device``.
        vocab_size: number of tokens of the full LM head.
        token_ids: int64 numpy [n], the frequent tokens.
        recent: size of the ring buffer of rare tokens.
        kernels: whether our kernel or int8 multiplies where that is faster; otherwise vLLM's own product does.
    """

    def __init__(
        self,
        lookup: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
        token_ids: np.ndarray,
        device: torch.device,
        recent: int = RECENT,
        kernels: bool = True,
    ):
        super().__init__()
        self.lookup = lookup
        frequent = torch.from_numpy(token_ids).to(device)
        self.num_frequent = len(frequent)
        weight = lookup(frequent).contiguous()
        # Our kernel takes multiples of COLUMNS, so the matrix is padded with zero columns.
        room = recent + -(self.num_frequent + recent) % COLUMNS
        padded = torch.cat([weight, weight.new_zeros(room, weight.shape[1])])
        packs = kernels and packs_weights(padded)
        self.columns = _Together(padded) if packs else _Apart(weight, recent, kernels)
        # The token of each column; -1 for columns that have no token yet.
        self.ids = torch.cat([frequent, torch.full((recent,), -1, device=device)])
        self.missing = self.ids < 0
        # Number of columns in the logits. Shapes may change on CPUs, so columns without a token are left out there,
        # provided that the frequent tokens suffice as candidates.
        narrow = device.type == "cpu" and self.num_frequent >= MOST_CANDIDATES
        self.width = self.num_frequent if narrow else len(self.ids)
        self.kept = np.full(recent, -1)
        self.known = np.zeros(vocab_size, np.bool_)
        self.known[token_ids] = True
        self.next = 0

    def see(self, tokens: np.ndarray) -> None:
        """Add the rare ones among ``tokens``, int [n], to the ring buffer; the last ones if it cannot hold all."""
        rare = tokens[~self.known[tokens]][::-1]
        if len(rare) == 0:
            return
        rare = rare[np.sort(np.unique(rare, return_index=True)[1])[: len(self.kept)]][::-1]
        places = (self.next + np.arange(len(rare))) % len(self.kept)
        self.next = int(places[-1]) + 1
        left = self.kept[places]
        self.known[left[left >= 0]] = False
        self.known[rare] = True
        self.kept[places] = rare
        columns, ids = send(self.ids.device, places + self.num_frequent, rare.astype(np.int64))
        self.columns.write(columns, self.lookup(ids))
        self.ids[columns] = ids
        self.missing[columns] = False
        self.width = max(self.width, self.num_frequent + int(places.max()) + 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, columns] of hidden states [rows, hidden]. ``ids`` holds the token of each column."""
        return self.columns(hidden)[:, : self.width]

    def tokens_of(self, places: torch.Tensor) -> torch.Tensor:
        """The tokens of the given columns, int64 of any shape."""
        if places.device.type == "cpu":  # NumPy is faster for small arrays
            return torch.from_numpy(self.ids.numpy()[places.numpy()])
        return self.ids[places]

    def hide(self, logits: torch.Tensor) -> torch.Tensor:
        """Set the logits of columns without a token to -inf, in place."""
        if self.width == len(self.ids):
            logits[:, self.num_frequent :].masked_fill_(self.missing[self.num_frequent :], -torch.inf)
        return logits


class _Together(torch.nn.Module):
    """All columns in one matrix that is packed for our kernel."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.packed = pack_weight(weight)

    def write(self, columns: torch.Tensor, rows: torch.Tensor) -> None:
        write_columns(self.packed, columns, rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.packed)


class _Apart(torch.nn.Module):
    """Frequent columns in int8 or as vLLM packs LM heads, and recent columns unpacked in a second matrix."""

    def __init__(self, weight: torch.Tensor, recent: int, kernels: bool = True):
        super().__init__()
        self.num_frequent = len(weight)
        self.multiply = Int8Rows(weight) if kernels and int8_pays(weight) else _Packed(weight)
        self.rows = torch.zeros_like(weight[:1]).repeat(recent, 1)

    def write(self, columns: torch.Tensor, rows: torch.Tensor) -> None:
        self.rows[columns - self.num_frequent] = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.multiply(x), torch.nn.functional.linear(x, self.rows)], dim=1)


class _Packed(torch.nn.Module):
    """Computes ``x @ weight.T`` with vLLM's method for unquantised LM heads."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.method = UnquantizedEmbeddingMethod()
        self.method.process_weights_after_loading(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self, x)
