"""Generate for a prompt file with one engine and print tokens, speed and steps as JSON. Other scripts call it."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from vllm_gsd.tools.models import built_in_pair
from vllm_gsd.tools.prompt_file import read_requests, thinned


def load_prompts(path: Path, limit: int | None) -> list[str]:
    """The first turns of a prompt file, at most ``limit``, spread evenly over the file."""
    return [request.chat[-1]["content"] for request in thinned(read_requests(path), limit)]


def steps_of(llm) -> int:
    """Target steps of all requests that gave them tokens: vLLM measures one latency for each."""
    latencies = ("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds")
    return sum(metric.count for metric in llm.get_metrics() if metric.name in latencies)


def speculative_config(method: str, draft: str) -> dict | None:
    """The config of a method. In JSON, the model "draft" stands for the built-in draft."""
    if method == "plain":
        return None
    if method == "gsd":
        return {"method": "gsd", "model": draft}
    config: dict = json.loads(method)
    return {**config, "model": draft} if config.get("model") == "draft" else config


def answer(llm, chats: list, params, rounds: int) -> tuple[list[float], list[list[int]]]:
    """Seconds of each round, and the tokens of the first."""
    seconds: list[float] = []
    tokens: list[list[int]] = []
    for _ in range(rounds):
        start = time.perf_counter()
        outputs = llm.chat(chats, params, use_tqdm=sys.stderr.isatty())
        seconds.append(time.perf_counter() - start)
        tokens = tokens or [list(output.outputs[0].token_ids) for output in outputs]
    return seconds, tokens


def main(
    prompts: Annotated[Path, typer.Argument(help="Spec-Bench style file")],
    method: Annotated[str, typer.Option(help="plain, gsd, or JSON of a speculative config")] = "plain",
    limit: int | None = None,
    batch: int = 1,
    max_tokens: int = 96,
    dtype: str = "float32",
    compiled: bool = False,
    rounds: Annotated[
        int, typer.Option(help="repetitions of the whole set; only the first one's tokens are reported")
    ] = 1,
    out: Annotated[Path | None, typer.Option(help="write the JSON here instead of standard output")] = None,
) -> None:
    """Run one engine over the prompts, greedily, at most ``batch`` requests at a time."""
    stdout = os.dup(1)
    os.dup2(2, 1)  # vLLM logs to standard output
    from vllm import LLM, SamplingParams

    from vllm_gsd.tools.bench.engine import counters_of, gained

    pair = built_in_pair()
    chats = [[{"role": "user", "content": text}] for text in load_prompts(prompts, limit)]
    llm = LLM(
        str(pair.target),
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=batch,
        kv_cache_memory_bytes=2 << 30,
        enforce_eager=not compiled,
        speculative_config=speculative_config(method, str(pair.draft)),
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    llm.chat(chats[:1], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    before, steps_before = counters_of(llm), steps_of(llm)
    seconds, tokens = answer(llm, chats, params, rounds)
    generated = sum(len(t) for t in tokens)
    result = {
        "method": method,
        "batch": batch,
        "dtype": dtype,
        "compiled": compiled,
        "generated": generated,
        "seconds": seconds,
        "tokens_per_second": [generated / s for s in seconds],
        "tokens_per_step": rounds * generated / (steps_of(llm) - steps_before),
        "counters": gained(before, counters_of(llm)),
        "tokens": tokens,
    }
    text = json.dumps(result)
    if out is None:
        os.write(stdout, text.encode() + b"\n")
    else:
        out.write_text(text)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    typer.run(main)
