"""Says how long each stage of a run takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("vllm_gsd.tools.distill")


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Log the time that the body took."""
    begun = time.perf_counter()
    yield
    logger.info("%s took %.1f seconds", name, time.perf_counter() - begun)
