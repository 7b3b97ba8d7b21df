"""Where texts end: the worker finds out before the scheduler does."""

from vllm import SamplingParams
from vllm.v1.core.sched.utils import check_sequence_repetition

# More tokens than a request can get behind its end, in the step that ends it and the next: those of two whole graphs.
MOST_BEHIND = 2 * (1 + 256)


def ends_text(params: SamplingParams, output: list[int], token: int) -> bool:
    """Whether ``token`` after ``output`` ends a request's text, as upstream's ``check_stop`` says, lengths apart."""
    if token == params.eos_token_id or token in (params.stop_token_ids or ()):
        return True
    repetition = params.repetition_detection
    if repetition is None or len(output) + 1 < params.min_tokens:
        return False
    return check_sequence_repetition([*output, token], repetition)


def text_of(params: SamplingParams, output: list[int]) -> list[int]:
    """The output of a request that has ended, without what its last steps added behind the end of its text.

    The front end finds stop strings, so what follows one stays.
    """
    output, repeats = output[: params.max_tokens], params.repetition_detection is not None
    for place in range(max(0, len(output) - MOST_BEHIND), len(output)):
        if ends_text(params, output[:place] if repeats else [], output[place]):
            return output[: place + 1]
    return output
