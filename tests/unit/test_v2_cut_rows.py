"""Removing the rows that a plan leaves out, and their grammar masks."""

from types import SimpleNamespace

import numpy as np
from vllm import SamplingParams
from vllm.v1.core.sched.output import GrammarOutput

from vllm_gsd.engine.v2.cut_rows import cut_masks, cut_rows
from vllm_gsd.upstream import structured


def scheduled_step():
    drafts = {"a": [-1] * 3, "b": [-1] * 2, "c": [-1] * 3}
    tokens = {"a": 4, "prompt": 20, "b": 3, "c": 4}
    fields = {"num_scheduled_tokens": tokens, "total_num_scheduled_tokens": 31, "scheduled_new_reqs": []}
    return SimpleNamespace(scheduled_spec_decode_tokens=drafts, **fields)


def test_rows_are_cut_from_a_copy():
    whole = scheduled_step()
    assert cut_rows(whole, lambda request_id: 3) is whole
    cut = cut_rows(whole, {"a": 1, "b": 2, "c": 0}.get)
    assert cut.scheduled_spec_decode_tokens == {"a": [-1], "b": [-1, -1]}
    assert cut.num_scheduled_tokens == {"a": 2, "prompt": 20, "b": 3, "c": 1}
    assert cut.total_num_scheduled_tokens == 26
    assert whole == scheduled_step()


def test_a_padded_prompt_whose_logprobs_are_wanted_has_no_rows_for_nodes():
    whole = scheduled_step()
    wanted = {"a": SamplingParams(prompt_logprobs=0), "b": SamplingParams(), "c": None}
    whole.scheduled_new_reqs = [SimpleNamespace(req_id=name, sampling_params=params) for name, params in wanted.items()]
    cut = cut_rows(whole, lambda request_id: 3)
    assert cut.scheduled_spec_decode_tokens == {"b": [-1] * 2, "c": [-1] * 3}
    assert cut.num_scheduled_tokens == {"a": 1, "prompt": 20, "b": 3, "c": 4}


def test_masks_of_the_rows_that_are_left(monkeypatch):
    whole = scheduled_step()
    cut = cut_rows(whole, {"a": 1, "b": 2, "c": 0}.get)
    masks = np.arange(9, dtype=np.int32)[:, None]  # the root and nodes of each request
    output = GrammarOutput(["c", "b", "prompt"], masks[:8], [3, 2, 0])
    monkeypatch.setattr(structured, "SINCE_0_33", False)
    assert cut_masks(output, whole, whole) is output
    assert cut_masks(output, whole, cut).grammar_bitmask.ravel().tolist() == [0, 4, 5, 6, 7]
    monkeypatch.setattr(structured, "SINCE_0_33", True)
    assert cut_masks(output, whole, cut) is output
