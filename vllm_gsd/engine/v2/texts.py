"""The requests' texts on the host, by the slot that V2 gives each request."""

import numpy as np


class Texts:
    """Tokens known to the host: prompts, and what it was told was accepted.

    Args:
        num_slots: most requests at a time.
        max_length: most tokens of each.
    """

    def __init__(self, num_slots: int, max_length: int):
        self.tokens = np.zeros((num_slots, max_length), np.int32)
        self.length = np.zeros(num_slots, np.int64)
        self.prompt_length = np.zeros(num_slots, np.int64)

    def clear(self) -> None:
        """Forget all texts."""
        for of in (self.tokens, self.length, self.prompt_length):
            of.fill(0)

    def begin(self, slot: int, tokens: list[int], prompt_length: int) -> None:
        """A request starts, or resumes with tokens it has generated."""
        self.tokens[slot, : len(tokens)] = tokens
        self.length[slot] = len(tokens)
        self.prompt_length[slot] = prompt_length

    def output(self, slot: int) -> list[int]:
        """Tokens that were generated."""
        return self.tokens[slot, self.prompt_length[slot] : self.length[slot]].tolist()

    def append(self, slots: np.ndarray, sampled: np.ndarray, counts: np.ndarray) -> None:
        """Requests got tokens.

        Args:
            slots: int64 [n]; sampled: int64 [n, most]; counts: int [n], how many of a row count.
        """
        columns = np.arange(sampled.shape[1])
        at = self.length[slots][:, None] + columns
        # A request that has ended may have run on; what it got beyond its limits is never used.
        real = (columns < counts[:, None]) & (at < self.tokens.shape[1])
        self.tokens[np.broadcast_to(slots[:, None], at.shape)[real], at[real]] = sampled[real]
        self.length[slots] = np.minimum(self.length[slots] + counts, self.tokens.shape[1])
