"""A custom logits processor as a user would write one."""

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class NoStutter:
    """Forbids a token that is among the last ``window`` ones."""

    def __init__(self, window: int):
        self.window = window

    def __call__(self, output_ids, logits):
        logits[list(output_ids[-self.window :])] = -float("inf")
        return logits


class NoStutterProcessor(AdapterLogitsProcessor):
    """For requests with ``extra_args={"no_stutter": window}``."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params):
        window = (params.extra_args or {}).get("no_stutter")
        return NoStutter(window) if window else None
