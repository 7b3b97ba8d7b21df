"""Custom logits processors along a walk: each is called once per emitted token, as in plain decoding.

A processor may have state that advances with every call, such as a counter or an automaton. So it must not be called
for a request whose walk has ended while other walks continue. vLLM's ``AdapterLogitsProcessor`` has one callable per
request; those of ended walks are removed during the call. Any other processor sees the whole batch in one tensor, so
all walks must take the same number of steps: they end as soon as the first one does. A single request is not affected.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    AdapterLogitsProcessor,
    LogitsProcessor,
    LogitsProcessors,
)

logger = init_logger("vllm.gsd")


class CustomProcessors:
    """The custom logits processors of a batch."""

    def __init__(self, processors: LogitsProcessors):
        custom = [processor for processor in processors.all if type(processor) not in BUILTIN_LOGITS_PROCESSORS]
        self.by_request = [one for one in custom if asks_by_request(one) and one.req_info]
        self.in_step = any(not asks_by_request(one) for one in custom)  # whether all walks must end together

    def __bool__(self) -> bool:
        """Whether any custom processor may change the logits of this batch."""
        return self.in_step or bool(self.by_request)

    @contextmanager
    def only_for(self, requests: np.ndarray) -> Iterator[None]:
        """Within this context, call the per-request callables of ``requests``, int [n], only."""
        saved = [processor.req_info for processor in self.by_request]
        active = set(requests.tolist())
        for processor, callables in zip(self.by_request, saved, strict=True):
            processor.req_info = {request: one for request, one in callables.items() if request in active}
        try:
            yield
        finally:
            for processor, callables in zip(self.by_request, saved, strict=True):
                processor.req_info = callables


def asks_by_request(processor: LogitsProcessor) -> bool:
    """Whether a custom processor is an ``AdapterLogitsProcessor`` with vLLM's own ``apply`` and ``update_state``."""
    kind = type(processor)
    return (
        isinstance(processor, AdapterLogitsProcessor)
        and kind.apply is AdapterLogitsProcessor.apply
        and kind.update_state is AdapterLogitsProcessor.update_state
    )


def tell_of_processors(processors: LogitsProcessors) -> None:
    """Warn about each processor that makes all walks of a batch end together."""
    for processor in processors.all:
        if type(processor) not in BUILTIN_LOGITS_PROCESSORS and not asks_by_request(processor):
            logger.warning(
                "The logits processor %s sees all requests of a batch at once, so a step of gsd accepts no more tokens "
                "of any request than of the one with the fewest; an AdapterLogitsProcessor has no such limit.",
                type(processor).__name__,
            )
