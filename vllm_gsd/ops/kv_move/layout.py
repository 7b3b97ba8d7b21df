"""The order of the elements inside a page of vLLM's CPU KV cache.

A layer's cache is ``[num_blocks, kv_heads, block_size, 2 * head_size]``. For each block and KV head it holds a page of
keys and after it a page of values, with ``block_size * head_size`` elements each. The order inside a page depends on
the instruction set that vLLM uses: keys may be transposed, or pairs interleaved for AMX. Every order is separable: the
element of token ``t`` and dimension ``d`` lies at ``token[t] + dim[d]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

#: ``write(key, value, key_cache, value_cache, slots)``: stores rows ``[n, kv_heads, head_size]`` in the slots
#: (int64 ``[n]``) of two caches ``[num_blocks, kv_heads, block_size, head_size]``.
WriteRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

_DIGIT = 128  # numbers are written in digits of this base, which are exact in bfloat16


def pages_of(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The key pages and the value pages of a cache, as views ``[num_blocks, kv_heads, block_size, head_size]``."""
    num_blocks, kv_heads, block_size, _ = kv_cache.shape
    key, value = kv_cache.view(num_blocks, kv_heads, 2 * block_size, -1).chunk(2, dim=2)
    return key, value


@dataclass(frozen=True, eq=False)
class KVLayout:
    """Addresses of the elements inside a page, for keys and for values.

    ``key_token`` and ``value_token`` are int32 ``[block_size]``, ``key_dim`` and ``value_dim`` int32
    ``[head_size]``; the element lies at ``token[t] + dim[d]``.
    """

    key_token: torch.Tensor
    key_dim: torch.Tensor
    value_token: torch.Tensor
    value_dim: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.key_token.numel()

    @property
    def head_size(self) -> int:
        return self.key_dim.numel()

    @cached_property
    def tables(self) -> torch.Tensor:
        """The four tables concatenated, as the kernels take them."""
        return torch.cat([self.key_token, self.key_dim, self.value_token, self.value_dim])

    @classmethod
    def probe(cls, write: WriteRows, block_size: int, head_size: int, dtype: torch.dtype) -> KVLayout:
        """Find the layout: write token and dimension numbers into a cache and see where they end up.

        Args:
            write: stores keys and values, see :data:`WriteRows`; called with 2 blocks, 2 KV heads and
                ``2 * block_size`` rows of ``dtype`` at most.
            dtype: dtype of the cache, in which the integers -1 to 127 must be exact.

        Raises:
            ValueError: ``write`` does not use a separable order inside pages of that size.
        """

        def written(numbers: torch.Tensor) -> torch.Tensor:
            """The caches after writing ``numbers`` [block_size, head_size] to block 1; -1 where nothing was written."""
            rows = numbers.to(dtype).unsqueeze(1).expand(block_size, 2, head_size).contiguous()
            kv_cache = torch.full((2, 2, block_size, 2 * head_size), -1, dtype=dtype)
            write(rows, rows.clone(), *pages_of(kv_cache), torch.arange(block_size, 2 * block_size))
            return torch.stack([page.flatten(2) for page in pages_of(kv_cache)]).long()

        def arrived(numbers: torch.Tensor) -> torch.Tensor:
            low, high = written(numbers % _DIGIT), written(numbers // _DIGIT)
            return torch.where(low < 0, low, low + _DIGIT * high)

        token = torch.arange(block_size).unsqueeze(1).expand(block_size, head_size)
        dim = torch.arange(head_size).unsqueeze(0).expand(block_size, head_size)
        token_at, dim_at = arrived(token), arrived(dim)  # [keys or values, block, head, element of the page]
        for at in (token_at, dim_at):
            if (at[:, 0] != -1).any() or (at[:, 1, 0] != at[:, 1, 1]).any():
                raise ValueError("the KV cache's rows do not stay in the page of their block and KV head")
        key_token, key_dim = _separate(token_at[0, 1, 0], dim_at[0, 1, 0], block_size, head_size, "key")
        value_token, value_dim = _separate(token_at[1, 1, 0], dim_at[1, 1, 0], block_size, head_size, "value")
        return cls(key_token, key_dim, value_token, value_dim)

    def check(self, kv_cache: torch.Tensor) -> None:
        """Raise ValueError unless ``kv_cache`` has the shape and strides of this layout."""
        if kv_cache.dim() != 4 or kv_cache.shape[2:] != (self.block_size, 2 * self.head_size):
            raise ValueError(
                f"the layout is for a KV cache [num_blocks, kv_heads, {self.block_size}, "
                f"{2 * self.head_size}], not {list(kv_cache.shape)}"
            )
        if kv_cache.stride()[2:] != (kv_cache.shape[3], 1):
            raise ValueError("the pages of kv_cache must be contiguous")

    def read(self, kv_cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[n, kv_heads, head_size]`` of ``slots``: int64, ``block * block_size + offset``."""
        self.check(kv_cache)
        key, value = self._addresses(slots)
        flat = kv_cache.flatten(2)[slots // self.block_size]  # [n, kv_heads, both pages]
        heads = flat.shape[1]
        return (
            flat.gather(2, key.unsqueeze(1).expand(-1, heads, -1)),
            flat.gather(2, value.unsqueeze(1).expand(-1, heads, -1)),
        )

    def write(self, kv_cache: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values ``[n, kv_heads, head_size]`` to ``slots``; the inverse of :meth:`read`."""
        self.check(kv_cache)
        block = (slots // self.block_size).view(-1, 1, 1)
        head = torch.arange(kv_cache.shape[1], device=slots.device).view(1, -1, 1)
        width = kv_cache.shape[3]
        for addresses, rows in zip(self._addresses(slots), (key, value), strict=True):
            at = addresses.unsqueeze(1)
            kv_cache[block, head, at // width, at % width] = rows

    def _addresses(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets of the key and the value of ``slots`` from the start of their key page, [n, head_size] each."""
        offset = slots % self.block_size
        key_token, key_dim, value_token, value_dim = (
            table.to(slots) for table in (self.key_token, self.key_dim, self.value_token, self.value_dim)
        )
        key = key_token[offset].unsqueeze(1) + key_dim
        value = value_token[offset].unsqueeze(1) + value_dim
        return key, value + self.block_size * self.head_size


def _separate(
    token_at: torch.Tensor, dim_at: torch.Tensor, block_size: int, head_size: int, what: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a page's order, given as the token and the dimension of each element, into their offsets."""
    numbers = token_at * head_size + dim_at
    expected = torch.arange(block_size * head_size)
    if not torch.equal(numbers.sort().values, expected):
        raise ValueError(f"the {what} page does not hold every dimension of every token of its block once")
    address = torch.empty_like(expected)
    address[numbers] = expected
    address = address.view(block_size, head_size)
    dim, token = address[0], address[:, 0] - address[0, 0]
    if not torch.equal(token.unsqueeze(1) + dim, address):
        raise ValueError(f"the {what} page's order is not a token's offset plus a dimension's offset")
    return token.to(torch.int32), dim.to(torch.int32)
