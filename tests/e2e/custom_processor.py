"""Custom logits processors as a user would write them. The automatons keep a state that every call updates."""

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class NoStutter:
    """Forbids tokens that occur among the last ``window`` ones."""

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


class Automaton:
    """Forbids every third token, at an offset given by a state that each call updates with the last token."""

    def __init__(self, state: int):
        self.state = state

    def __call__(self, output_ids, logits):
        self.state = (5 * self.state + (output_ids[-1] if output_ids else 0) + 1) % 1009
        logits[self.state % 3 :: 3] = -float("inf")
        return logits


class AutomatonProcessor(AdapterLogitsProcessor):
    """For requests with ``extra_args={"automaton": first state}``."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params):
        state = (params.extra_args or {}).get("automaton")
        return Automaton(state) if state else None


class BatchAutomatonProcessor(LogitsProcessor):
    """``AutomatonProcessor`` for a whole batch at once."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.rows: dict[int, tuple[Automaton, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update):
        def new_row(params, _, output_ids):
            state = (params.extra_args or {}).get("automaton")
            return (Automaton(state), output_ids) if state else None

        process_dict_updates(self.rows, batch_update, new_row)

    def apply(self, logits):
        for row, (automaton, output_ids) in self.rows.items():
            automaton(output_ids, logits[row])
        return logits
