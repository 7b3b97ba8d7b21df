"""A pool of engines that tests share and of which only a few run at once.

Three processes run the tests, and one file may use a dozen engines of up to 2 GB each. Together they would not fit into
a machine with 24 GB, and everything takes minutes when memory runs out, because programs are paged in again and again.
"""

from collections.abc import Callable

from engine_process import Engine

MOST = 3  # a test seldom uses more than plain vLLM and one with gsd


class Pool:
    """Starts engines when they are used, and closes the least recently used ones."""

    def __init__(self):
        self.engines: dict[str, Kept] = {}
        self.alive: dict[Kept, Engine] = {}  # the most recently used engine comes last

    def engine(self, key: str, make: Callable[[], Engine]) -> "Kept":
        """Return the engine with that key; ``make`` starts it the first time."""
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
        """Close engines until only ``count`` are left."""
        while len(self.alive) > count:
            oldest = next(iter(self.alive))
            self.alive.pop(oldest).close()


class Kept:
    """An ``Engine`` of a pool. If the pool has closed it, its next use restarts it, with counters at zero."""

    def __init__(self, pool: Pool, make: Callable[[], Engine]):
        self.pool = pool
        self.make = make

    def __getattr__(self, name: str):
        return getattr(self.pool.use(self), name)
