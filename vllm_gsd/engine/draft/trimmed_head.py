"""A draft's LM head that computes the frequent tokens, and those that texts have had lately.

Texts repeat their own rare words: names, terms, a prompt's foreign language. The head's last rows are a ring of such
tokens, so the frequent ones can be few.
"""

from collections.abc import Callable

import numpy as np
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_gsd.cpu.int8_rows import Int8Rows, int8_pays
from vllm_gsd.cpu.linear import COLUMNS, linear, pack_weight, write_columns
from vllm_gsd.cpu.packed_weights import packs_weights

# Rare tokens that are kept, of all requests together; who comes first leaves first.
RECENT = 512
# Of ``top_k``.
MOST_CANDIDATES = 32


class TrimmedHead(torch.nn.Module):
    """Rows of an LM head, packed on a CPU as is fastest there if ``kernels``.

    Args:
        lookup: gives the LM head's rows [n, hidden] of tokens, int64 [n] on ``device``.
        vocab_size: of the whole head.
        token_ids: int64 numpy [n], the frequent tokens.
        recent: most rare tokens kept besides.
        kernels: whether to multiply by our kernel, or in int8, where that is faster; else as vLLM does.
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
        # Sizes that our kernel does not take are filled up with columns of nobody.
        room = recent + -(self.num_frequent + recent) % COLUMNS
        whole = torch.cat([weight, weight.new_zeros(room, weight.shape[1])])
        packs = kernels and packs_weights(whole)
        self.columns = _Together(whole) if packs else _Apart(weight, recent, kernels)
        # The token of each column; -1 where there is none yet.
        self.ids = torch.cat([frequent, torch.full((recent,), -1, device=device)])
        self.missing = self.ids < 0
        # Columns looked at: where shapes may change those that have a token, and all candidates come from them.
        narrow = device.type == "cpu" and self.num_frequent >= MOST_CANDIDATES
        self.width = self.num_frequent if narrow else len(self.ids)
        self.kept = np.full(recent, -1)
        self.known = np.zeros(vocab_size, np.bool_)
        self.known[token_ids] = True
        self.next = 0

    def see(self, tokens: np.ndarray) -> None:
        """Texts have these tokens, int [n]."""
        rare = tokens[~self.known[tokens]]
        if len(rare) == 0:
            return
        rare = np.unique(rare)[-len(self.kept) :]
        places = (self.next + np.arange(len(rare))) % len(self.kept)
        self.next = int(places[-1]) + 1
        left = self.kept[places]
        self.known[left[left >= 0]] = False
        self.known[rare] = True
        self.kept[places] = rare
        device = self.ids.device
        slots, ids = torch.from_numpy(places).to(device), torch.from_numpy(rare.astype(np.int64)).to(device)
        columns = slots + self.num_frequent
        self.columns.write(columns, self.lookup(ids))
        self.ids[columns] = ids
        self.missing[columns] = False
        self.width = max(self.width, self.num_frequent + int(places.max()) + 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, columns] of hidden states [rows, hidden]; tokens of the columns are in ``ids``."""
        return self.columns(hidden)[:, : self.width]

    def tokens_of(self, places: torch.Tensor) -> torch.Tensor:
        """The tokens of columns, int64 of any shape."""
        if places.device.type == "cpu":  # NumPy is the faster one at so little
            return torch.from_numpy(self.ids.numpy()[places.numpy()])
        return self.ids[places]

    def hide(self, logits: torch.Tensor) -> torch.Tensor:
        """Make columns without a token impossible, in place, where there are any."""
        if self.width == len(self.ids):
            logits[:, self.num_frequent :].masked_fill_(self.missing[self.num_frequent :], -torch.inf)
        return logits


class _Together(torch.nn.Module):
    """All columns in one matrix of our own kernel's."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.packed = pack_weight(weight)

    def write(self, columns: torch.Tensor, rows: torch.Tensor) -> None:
        write_columns(self.packed, columns, rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.packed)


class _Apart(torch.nn.Module):
    """The frequent columns in int8, or as vLLM packs its own LM heads; the recent ones behind them as they are."""

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
    """``x @ weight.T`` as vLLM multiplies its own LM heads."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.method = UnquantizedEmbeddingMethod()
        self.method.process_weights_after_loading(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self, x)
