"""Where texts end: the worker finds out before the scheduler does."""

from vllm import SamplingParams
from vllm.v1.core.sched.utils import check_sequence_repetition


def ends_text(params: SamplingParams, output: list[int], token: int) -> bool:
    """Whether ``token`` after ``output`` ends a request's text, as upstream's ``check_stop`` says, lengths apart."""
    if token == params.eos_token_id or token in (params.stop_token_ids or ()):
        return True
    repetition = params.repetition_detection
    if repetition is None or len(output) + 1 < params.min_tokens:
        return False
    return check_sequence_repetition([*output, token], repetition)
