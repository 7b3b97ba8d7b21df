"""What the V2 speculator keeps of its requests."""

import pickle
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from vllm import envs
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.output import NewRequestData

from vllm_gsd.engine.v2.grammars import WorkerGrammars
from vllm_gsd.engine.v2.speculator import GraphSpeculator

NODES, SLOTS = 8, 4


@pytest.fixture
def speculator():
    speculator = GraphSpeculator.__new__(GraphSpeculator)
    speculator.num_rows, speculator.requests, speculator.slots, speculator.grammars = NODES, {}, {}, MagicMock()
    speculator.speculation, speculator.proposals = MagicMock(), MagicMock()
    speculator.plan = MagicMock(shares=np.full(SLOTS, NODES), active=True, captured=[0, 2, NODES])
    speculator.ends, speculator.tenants = np.zeros((2, SLOTS), np.int64)
    speculator.plain, speculator.texts = np.zeros(SLOTS, np.bool_), MagicMock(tokens=np.zeros((SLOTS, 64)))
    return speculator


def request_of(prompt: list[int]) -> NewRequestData:
    params = SamplingParams(max_tokens=5)
    params.prompt_logprob_token_ids = np.array([[4, 5]], np.int32)  # arrays cannot be compared for a truth value
    return NewRequestData("a", prompt, [], params, None, block_ids=([],), num_computed_tokens=0, lora_request=None)


def test_a_later_chunk_of_a_session_is_admitted_again(speculator):
    """In one process, the scheduler adds the later chunk to the list that the first one brought."""
    prompt = [1, 2, 3]
    request = request_of(prompt)
    speculator.admit(request, slot=0)
    speculator.preempt(["a"])
    speculator.admit(pickle.loads(pickle.dumps(request)), slot=1)  # resumed, in another process
    speculator.speculation.admit.assert_not_called()
    prompt += [4, 5]
    later = replace(request)
    speculator.admit(later, slot=1)
    speculator.speculation.admit.assert_called_once_with(later)
    speculator.grammars.forget.assert_called_once_with(["a"])
    assert speculator.ends[1] == 10


@pytest.mark.parametrize(("text", "kept"), [([1, 2, 7, 8, 9], True), ([1, 2, 7], False), ([1, 2, 5, 8], False)])
def test_a_grammar_starts_again_if_its_tokens_were_taken_back(text, kept):
    """As by a reset of the prefix cache, after which vLLM samples the tokens of the step that ran again."""
    grammars = WorkerGrammars.__new__(WorkerGrammars)
    former = SimpleNamespace(output_token_ids=[7, 8])
    grammars.manager, grammars.requests, grammars.ready = MagicMock(), {"a": former}, {"a"}
    request = replace(request_of([1, 2]), prefill_token_ids=text)
    request.sampling_params.structured_outputs = StructuredOutputsParams(regex="x*")
    grammars.admit(request)
    assert (grammars.requests["a"] is former) == ("a" in grammars.ready) == kept
    assert grammars.manager.grammar_init.call_count == (not kept)


def test_a_padded_prompt_has_as_many_rows_as_the_other_requests(speculator, monkeypatch):
    """vLLM pads a prompt of one token before it has a slot. Full CUDA graphs need equally many rows."""
    assert speculator.share_of("new") == 0
    speculator.slots, speculator.plan.shares = {"a": 1, "b": 3}, np.array([NODES, 2, NODES, 0])
    assert [speculator.share_of(name) for name in ("new", "a", "b")] == [2, 2, 0]
    speculator.plan.captured = []
    assert speculator.share_of("new") == 0
    speculator.plan.active = False  # all nodes are verified in every step
    assert speculator.share_of("new") == NODES
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    assert speculator.share_of("new") == 0
