"""A custom logits processor for Model Runner V2 with a state that each row of a request updates."""

from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor


class AutomatonProcessor(LogitsProcessor):
    """For requests with ``extra_args={"automaton": first state}``; forbids every third token, at an offset by state.

    A preempted request is added again. The state is then computed from all tokens that it has sampled.
    """

    def __init__(self, vllm_config, req_states):
        self.req_states = req_states
        self.states: dict[int, int] = {}
        self.added: set[int] = set()

    def add_request(self, req_idx, sampling_params):
        self.states[req_idx] = (sampling_params.extra_args or {}).get("automaton", 0)
        self.added.add(req_idx)
        return self.states[req_idx] > 0

    def apply(self, logits, ctx):
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            if self.states[slot]:
                length = int(self.req_states.total_len.gpu[slot])
                first = int(self.req_states.prompt_len.np[slot]) if slot in self.added else length
                self.added.discard(slot)
                for last in self.req_states.all_token_ids.gpu[slot, first - 1 : length].tolist():
                    self.states[slot] = (5 * self.states[slot] + last + 1) % 1009
                logits[row, self.states[slot] % 3 :: 3] = -float("inf")
        return logits
