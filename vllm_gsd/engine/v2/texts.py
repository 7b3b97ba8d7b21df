"""The requests' tokens on the host, by the slot that Model Runner V2 assigns to each request."""

import numpy as np


class Texts:
    """The tokens that the host knows: the prompts, and accepted tokens once they have been copied from the device."""

    def __init__(self, num_slots: int, max_length: int) -> None:
        self.tokens = np.zeros((num_slots, max_length), np.int32)
        self.length = np.zeros(num_slots, np.int64)
        self.prompt_length = np.zeros(num_slots, np.int64)

    def clear(self) -> None:
        """Forget all texts."""
        for array in (self.tokens, self.length, self.prompt_length):
            array.fill(0)

    def begin(self, slot: int, tokens: list[int], prompt_length: int) -> None:
        """Start or resume a request with its tokens so far, of which the first ``prompt_length`` are its prompt."""
        self.tokens[slot, : len(tokens)] = tokens
        self.length[slot] = len(tokens)
        self.prompt_length[slot] = prompt_length

    def output(self, slot: int) -> list[int]:
        """The tokens that the request in this slot has generated."""
        return self.tokens[slot, self.prompt_length[slot] : self.length[slot]].tolist()

    def append(self, slots: np.ndarray, sampled: np.ndarray, counts: np.ndarray) -> None:
        """Append new tokens to requests.

        Args:
            slots: int64 [n], the requests' slots.
            sampled: int64 [n, most], their new tokens.
            counts: int [n], the number of valid tokens in each row of ``sampled``.
        """
        columns = np.arange(sampled.shape[1])
        at = self.length[slots][:, None] + columns
        # A finished request may have run for another step; its tokens beyond the maximum length are discarded.
        real = (columns < counts[:, None]) & (at < self.tokens.shape[1])
        self.tokens[np.broadcast_to(slots[:, None], at.shape)[real], at[real]] = sampled[real]
        self.length[slots] = np.minimum(self.length[slots] + counts, self.tokens.shape[1])
