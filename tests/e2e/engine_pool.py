"""Engines that tests share, only a few of them alive at once.

Three processes run the tests, and a file of them may want a dozen engines of up to 2 GB: together more than a machine
of 24 GB holds. Near its end everything takes minutes, as programs are read from the disk again and again.
"""

from collections.abc import Callable

from engine_process import Engine

MOST = 3  # a test seldom uses more than plain vLLM and one with gsd


class Pool:
    """Starts engines when they are used, and closes the one that was not used for longest."""

    def __init__(self):
        self.engines: dict[str, Kept] = {}
        self.alive: dict[Kept, Engine] = {}  # the one used last comes last

    def engine(self, key: str, make: Callable[[], Engine]) -> "Kept":
        """The engine of that key; the first time, ``make`` starts it."""
        if key not in self.engines:
            kept = Kept(self, make)
            self.use(kept)
            self.engines[key] = kept
        return self.engines[key]

    def use(self, kept: "Kept") -> Engine:
        engine = self.alive.pop(kept, None)
        if engine is None:
            self.leave(MOST - 1)
            engine = kept.make()
        self.alive[kept] = engine
        return engine

    def leave(self, count: int) -> None:
        """Close all but ``count`` engines."""
        while len(self.alive) > count:
            oldest = next(iter(self.alive))
            self.alive.pop(oldest).close()


class Kept:
    """An ``Engine`` of a pool; started anew, and its counters with it, where others have taken its place since."""

    def __init__(self, pool: Pool, make: Callable[[], Engine]):
        self.pool = pool
        self.make = make

    def __getattr__(self, name: str):
        return getattr(self.pool.use(self), name)
