"""Grammars in the worker, which choose among the nodes of a graph before its rows run.

vLLM keeps grammars in the scheduler's process. With asynchronous scheduling, the rows of a step run before that process
learns what the step before accepted. The worker waits for it anyway when it grows the graph of a request with a
grammar, so it has a second copy of each grammar, and takes its choice as the scheduler does with Model Runner V1. The
scheduler checks all nodes again.
"""

import time
from collections.abc import Iterable

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from vllm_gsd.engine.parallel.ranks import from_first_rank
from vllm_gsd.engine.schedule.grammar import GrammarTokens, GrammarTree, ProposedTree, allowed_nodes


class WorkerGrammars:
    """The grammars of running requests, each as far as its text is known to the host."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.manager = StructuredOutputManager(vllm_config)
        self.tokens = GrammarTokens(self.manager)
        self.requests: dict[str, Request] = {}
        self.ready: set[str] = set()  # requests whose grammar is compiled

    def admit(self, new: NewRequestData) -> None:
        """Start to compile the grammar of a new request; a resumed one keeps its own.

        A reset of the prefix cache takes tokens back that the grammar has accepted already. It starts again then.
        """
        if (former := self.requests.get(new.req_id)) is not None:
            accepted, text = list(former.output_token_ids), new.prefill_token_ids or []
            if text[new.prompt_len :][: len(accepted)] == accepted:
                return
            self.forget([new.req_id])
        request = Request(new.req_id, new.prompt_token_ids, new.sampling_params, None)
        if request.use_structured_output:
            self.manager.grammar_init(request)
            self.requests[new.req_id] = request

    def forget(self, request_ids: Iterable[str]) -> None:
        """Remove finished requests."""
        for request_id in request_ids:
            self.requests.pop(request_id, None)
            self.ready.discard(request_id)

    def choose(self, request_id: str, output: list[int], proposed: ProposedTree) -> GrammarTree | None:
        """Choose the nodes to verify as ``allowed_nodes`` does, after all tokens that the request has generated.

        All tensor-parallel ranks make the same choice: the others wait for grammars that the first rank has compiled.

        Returns:
            None if the grammar is still being compiled, has ended or does not accept the output, for example
            after reasoning, whose end only the scheduler knows.
        """
        request = self.requests.get(request_id)
        if request is None:
            return None
        structured = request.structured_output_request
        assert structured is not None and request.sampling_params is not None
        if request_id not in self.ready:
            if not from_first_rank(np.array([int(structured.is_grammar_ready)]))[0]:
                return None
            while not structured.is_grammar_ready:
                time.sleep(0.001)
            self.ready.add(request_id)
        new = output[len(request.output_token_ids) :]
        ends = [place for place, token in enumerate(new) if token in request.sampling_params.all_stop_token_ids]
        if ends:  # tokens after the end of a response are no part of it
            new = new[: ends[0] + 1]
        request.append_output_token_ids(new)
        if not isinstance(structured.grammar, StructuredOutputGrammar) or not self.manager.accept_tokens(request, new):
            del self.requests[request_id]
            return None
        return allowed_nodes(self.manager, request, proposed, self.tokens.after)
