"""A custom logits processor of Model Runner V2 whose state goes on with every row that it sees of a request."""

from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor


class AutomatonProcessor(LogitsProcessor):
    """For requests with ``extra_args={"automaton": first state}``; forbids every third token, which by the state."""

    def __init__(self, vllm_config, req_states):
        self.req_states = req_states
        self.states: dict[int, int] = {}

    def add_request(self, req_idx, sampling_params):
        self.states[req_idx] = (sampling_params.extra_args or {}).get("automaton", 0)
        return self.states[req_idx] > 0

    def apply(self, logits, ctx):
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            if self.states[slot]:
                length = int(self.req_states.total_len.gpu[slot])
                last = int(self.req_states.all_token_ids.gpu[slot, length - 1])
                self.states[slot] = (5 * self.states[slot] + last + 1) % 1009
                logits[row, self.states[slot] % 3 :: 3] = -float("inf")
        return logits
