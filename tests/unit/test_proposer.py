"""What V1's proposer tells speculation of a batch."""

from types import SimpleNamespace

import numpy as np
import torch
from vllm import SamplingParams

from vllm_gsd.engine.v1.proposer import GraphProposer

EOS, STOP = 2, 7


def test_texts_that_have_ended_are_known():
    """Nothing is drafted for a request that the scheduler is about to end."""
    params = [SamplingParams(stop_token_ids=[STOP]), SamplingParams(), SamplingParams(ignore_eos=True)]
    for one in params:
        one.update_from_generation_config({}, EOS)
    emitted = [[5, STOP, 5], [5, STOP], [EOS]]
    requests = [
        SimpleNamespace(sampling_params=one, output_token_ids=tokens, num_tokens=9)
        for one, tokens in zip([*params, params[1], params[1]], [*emitted, [5, EOS], []], strict=True)
    ]
    names, emitted = list("abcde"), [*emitted, [5, EOS], []]
    tables = SimpleNamespace(
        block_table=SimpleNamespace(cpu=torch.zeros((5, 1))), num_blocks_per_row=np.ones(5, np.int32), block_size=16
    )
    proposer, batches = GraphProposer.__new__(GraphProposer), []
    proposer.speculation = SimpleNamespace(propose=lambda batch: batches.append(batch) or [])
    proposer.runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=names, block_table=[tables]),
        requests=dict(zip(names, requests, strict=True)),
        optimistic_seq_lens_cpu=torch.arange(5),
    )
    proposer.propose(emitted, np.arange(5), np.zeros((5, 9), np.int32))
    assert batches[0].ended.tolist() == [True, False, False, True, False]
