"""A program that runs one engine over several ranks. It reads a job from a JSON file and writes the result to another.

The job has these keys:

- ``target``, ``config`` (gsd's or null), ``engine`` (arguments of ``LLM``), ``prompts`` (token ids), and ``params`` (a
  dict for each prompt);
- ``disturb``: whether to add noise that could make ranks disagree;
- ``opt_out``: whether to answer all prompts without the graph first;
- ``steps``: keep generating until this many steps are recorded. Without it, graphs are not recorded.

The result has ``plain_tokens`` (with ``opt_out``), ``tokens``, ``accepted``, and ``hashes``: for each rank, a hash of
its proposals in each step.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
# The engine core runs in this process, so that all requests arrive before the first step and every run has the same
# batches.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def watch(worker, disturb: bool):
    """Record this rank's graphs; with ``disturb``, ranks differ in their floats, thread counts and timing."""
    import random
    import time

    import torch

    proposer = worker.model_runner.drafter
    proposer.hashes = []
    propose, speculation = proposer.propose, proposer.speculation

    def recorded(*args, **kwargs):
        if disturb and worker.rank > 0:
            time.sleep(random.uniform(0, 0.003))
        proposals = propose(*args, **kwargs)
        trees = [[tree.token.tolist(), tree.parent.tolist()] for tree in speculation.trees.values()]
        proposer.hashes.append(hashlib.sha256(json.dumps([proposals, trees]).encode()).hexdigest())
        return proposals

    proposer.propose = recorded
    if disturb:
        torch.set_num_threads(1 + worker.rank)
        drafter = speculation.drafter
        candidates = drafter.model.candidates

        def noisy(hidden, k):
            # Rounding makes nodes equally probable, and noise makes ranks order them differently.
            hidden = hidden.round(decimals=1) + worker.rank * 1e-2 * torch.randn_like(hidden)
            return candidates(hidden, k)

        drafter.model.candidates = noisy


def watch_v2(worker, disturb: bool, planned: bool):
    """Record this rank's graphs with Model Runner V2; with ``disturb``, add noise to other ranks' draft hidden states.

    With ``planned``, ranks plan with a fixed table of costs and with the durations of their steps.
    """
    import numpy as np
    import torch

    from vllm_gsd.planner.costs import Costs

    speculator = worker.model_runner.speculator
    speculator.hashes = []
    propose, model = speculator.propose, speculator.speculation.drafter.model
    run_rows = model.run_rows

    def recorded(input_batch, *args, **kwargs):
        tokens = propose(input_batch, *args, **kwargs)
        trees = [tree[input_batch.idx_mapping].tolist() for tree in speculator.proposals.trees]
        proposed = [tokens.tolist(), trees, speculator.plan.shares.tolist(), speculator.plan.phase]
        if speculator.proposals.trees.size[input_batch.idx_mapping].any():  # skip steps without nodes
            speculator.hashes.append(hashlib.sha256(json.dumps(proposed).encode()).hexdigest())
        return tokens

    def noisy(*args):
        hidden = run_rows(*args)
        return hidden + worker.rank * 1e-2 * torch.randn_like(hidden)

    speculator.propose = recorded
    if planned:
        rows = np.array([1, 2, 256])
        planner = speculator.speculation.planner
        draft = np.full((len(planner.levels), 3), 3.0)
        planner.costs = Costs(rows, 100.0 + 5 * rows, draft, attention=0.0)
    if disturb:
        model.run_rows = noisy


def hashes(worker):
    """The hashes recorded so far."""
    runner = worker.model_runner
    return (runner.speculator if hasattr(runner, "speculator") else runner.drafter).hashes


def main(job_path: str, result_path: str) -> None:
    """Run the job."""
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_path).read_text())
    options = {
        "dtype": "float32",
        "seed": 0,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 26,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        **job["engine"],
    }
    longest = options["max_model_len"] - max(map(len, job["prompts"])) - 1
    llm = LLM(job["target"], speculative_config=job["config"], **options)
    watched = job["config"] is not None and job.get("steps") is not None
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]

    def answers(**more) -> list[list[int]]:
        params = [SamplingParams(detokenize=False, **{**keys, **more}) for keys in job["params"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    result = {}
    if job.get("opt_out"):
        result["plain_tokens"] = answers(extra_args={"gsd": False})
    if watched:
        v2 = llm.llm_engine.vllm_config.use_v2_model_runner
        options = (job["disturb"], job["planned"]) if v2 else (job["disturb"],)
        llm.collective_rpc(watch_v2 if v2 else watch, args=options)
    result["tokens"] = answers()
    accepted = [m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"]
    result["accepted"] = sum(accepted)
    while watched and (done := len(llm.collective_rpc(hashes)[0])) < job["steps"]:
        left = min(longest, job["steps"] - done + 2)  # no nodes are proposed for a text's last two tokens
        params = [SamplingParams(detokenize=False, max_tokens=left, ignore_eos=True, seed=done + i) for i in range(2)]
        llm.generate(prompts[:2], params, use_tqdm=False)  # two suffice: the goal is a number of steps, not tokens
    result["hashes"] = llm.collective_rpc(hashes) if watched else []
    Path(result_path).write_text(json.dumps(result))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
