"""Custom logits processors along a walk: each is asked once for every token that a request emits, as in plain decoding.

A processor may keep state that goes on whenever it is asked (a count, an automaton), so it must not be asked for a
request whose walk has ended while others go on. vLLM's ``AdapterLogitsProcessor`` holds one callable for each request,
and those of ended walks are taken out meanwhile. Any other processor sees the whole batch in one tensor, so all its
walks take the same number of steps: they end where the first of them does. A lone request loses nothing by that.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from vllm import SamplingParams
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    AdapterLogitsProcessor,
    LogitsProcessor,
    LogitsProcessors,
)

logger = init_logger("vllm.gsd")


class CustomProcessors:
    """The processors of a batch that are not vLLM's own.

    Args:
        processors: of the batch's sampling metadata.
    """

    def __init__(self, processors: LogitsProcessors):
        custom = [processor for processor in processors.all if type(processor) not in BUILTIN_LOGITS_PROCESSORS]
        self.by_request = [one for one in custom if asks_by_request(one) and one.req_info]
        self.in_step = any(not asks_by_request(one) for one in custom)  # whether walks end together

    def __bool__(self) -> bool:
        """Whether any of them may have to say something about this batch."""
        return self.in_step or bool(self.by_request)

    @contextmanager
    def only_for(self, requests: np.ndarray) -> Iterator[None]:
        """Within it, the callables of other requests than these, int [n], are not called."""
        everything = [processor.req_info for processor in self.by_request]
        going = set(requests.tolist())
        for processor, known in zip(self.by_request, everything, strict=True):
            processor.req_info = {request: one for request, one in known.items() if request in going}
        try:
            yield
        finally:
            for processor, known in zip(self.by_request, everything, strict=True):
                processor.req_info = known


def asks_by_request(processor: LogitsProcessor) -> bool:
    """Whether a custom processor is an ``AdapterLogitsProcessor`` that works as vLLM wrote it."""
    kind = type(processor)
    return (
        isinstance(processor, AdapterLogitsProcessor)
        and kind.apply is AdapterLogitsProcessor.apply
        and kind.update_state is AdapterLogitsProcessor.update_state
    )


def stop_tokens(params: SamplingParams) -> set[int]:
    """The tokens that end a request's text, as upstream's ``check_stop`` has them."""
    return {*(params.stop_token_ids or ()), *([] if params.eos_token_id is None else [params.eos_token_id])}


def tell_of_processors(processors: LogitsProcessors) -> None:
    """Log which processors keep the walks of a batch in step."""
    for processor in processors.all:
        if type(processor) not in BUILTIN_LOGITS_PROCESSORS and not asks_by_request(processor):
            logger.warning(
                "The logits processor %s sees all requests of a batch at once, so a step of gsd accepts no more tokens "
                "of any request than of the one with the fewest; an AdapterLogitsProcessor does not limit it so.",
                type(processor).__name__,
            )
