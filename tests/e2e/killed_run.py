"""A program that runs an engine which never stops generating, so that a test can kill one of its ranks.

The argument is JSON: ``target``, ``config`` (gsd's or null), ``engine`` (arguments of ``LLM``). The program prints two
lines: its process id and those of its ranks as a JSON list, and "generating" after ten steps.
"""

import json
import os
import sys

os.environ |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}


def process_id(worker) -> int:
    """The id of the rank's process."""
    return os.getpid()


def main(job: dict) -> None:
    from vllm import LLM, SamplingParams

    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 26,
        "skip_tokenizer_init": True,
        **job["engine"],
    }
    llm = LLM(job["target"], speculative_config=job["config"], **options)
    say(json.dumps([os.getpid(), *llm.collective_rpc(process_id)]))
    params = SamplingParams(detokenize=False, ignore_eos=True, max_tokens=options["max_model_len"] - 112)
    steps = 0
    while True:
        for request in range(8):
            llm.llm_engine.add_request(f"{steps}-{request}", {"prompt_token_ids": [request + 5] * 8}, params)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            steps += 1
            if steps == 10:
                say("generating")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
