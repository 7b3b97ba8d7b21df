"""What a draft is worth in the real engine: tokens per target step and speed beside plain decoding.

Each engine runs in a process of its own, ``python -m vllm_gsd.tools.distill.engine``, because two do not fit into the
memory of one GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def compare(
    target: Path, draft: Path, prompts: list[list[int]], max_tokens: int, eager: bool = False
) -> dict[str, float]:
    """Greedy decoding of prompts (token ids) one at a time, plain and with the draft.

    Returns:
        ``tokens_per_step`` of the draft alone, 16 nodes always verified; ``speed_up`` over plain decoding with
        the default configuration.
    """
    gsd = {"method": "gsd", "model": str(draft)}
    job = {"target": str(target), "prompts": prompts, "tokens": max_tokens, "eager": eager}
    every_node = _run(job, {**gsd, "sources": ["draft"], "budget": 16})
    plain = _run(job, None)
    auto = _run(job, gsd)
    return {
        "tokens_per_step": every_node["tokens_per_step"],
        "speed_up": auto["tokens_per_second"] / plain["tokens_per_second"],
    }


def _run(job: dict[str, Any], config: dict[str, Any] | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        asked, result = Path(folder) / "job.json", Path(folder) / "result.json"
        asked.write_text(json.dumps({**job, "config": config}))
        command = [sys.executable, "-m", "vllm_gsd.tools.distill.engine", str(asked), str(result)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        report: dict[str, float] = json.loads(result.read_text())
        return report


def main(job_path: str, result_path: str) -> None:
    """Run one engine's job."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_path).read_text())
    longest = max(map(len, job["prompts"])) + job["tokens"]
    llm = LLM(
        job["target"],
        dtype="bfloat16",
        max_model_len=longest,
        max_num_seqs=1,
        enforce_eager=job["eager"],
        kv_cache_memory_bytes=1 << 30,
        speculative_config=job["config"],
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0, max_tokens=job["tokens"])
    llm.generate([{"prompt_token_ids": job["prompts"][0]}], params, use_tqdm=False)  # warms everything
    before = _accepted(llm)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    steps = count - (_accepted(llm) - before)
    Path(result_path).write_text(json.dumps({"tokens_per_second": count / seconds, "tokens_per_step": count / steps}))


def _accepted(llm: Any) -> float:
    name = "vllm:spec_decode_num_accepted_tokens"
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


if __name__ == "__main__":
    main(*sys.argv[1:])
